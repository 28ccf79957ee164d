"""Verifiers that the paper compares the judge with (table 2): chance, the target's grade, a cosine of sentence embeddings.

A spec takes them on as any other plug-in::

    [lookahead.verifiers.chance]
    factory = "bench.plug_ins.verifiers:Chance"
    probability = 0.5
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lr_backend.engine import EngineCall
from lr_backend.errors import InvalidRequest
from lr_backend.request import LookaheadRequest
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify import Reason, StepPair, Verdict, Verifier, VerifierParts
from lr_backend.verify.asking import ask
from lr_backend.verify.judge_prompt import JudgePrompt, closed_reasoning

GRADE_SYSTEM_TEXT = "You grade how well two reasoning steps agree."
GRADE_TASK_TEXT = (
    "Grade from 0 to 9 how far step 2 means the same as step 1. Compare what is computed, the numbers, the operators, the units, "
    "the names and the results; ignore the wording. 9: the same meaning and the same results. 0: a different meaning, or any "
    "wrong number. If you are not sure, give the lower grade. Answer with the digit in brackets only, like [0]."
)


@dataclass(frozen=True)
class Chance:
    """Accepts with a probability, blind to the pair: the control of every comparison of verifiers.

    The draw is a hash of (seed, position, both steps), so that it does not depend on which pair was judged first.

    Attributes:
        asks_judge: wait for the judge and disregard its word. Chance then decides in the time of a verdict: for sizes whose judge
            has no trained weights.
    """

    probability: float = 0.5
    asks_judge: bool = False

    def __post_init__(self) -> None:
        _in_range("probability", self.probability, 0.0, 1.0)

    def for_request(self, request: LookaheadRequest, parts: VerifierParts) -> Verifier:
        return _Drawing(self.probability, request.seed, parts.judging() if self.asks_judge else None)


@dataclass(frozen=True)
class _Drawing:
    probability: float
    seed: int
    judge: Verifier | None

    async def verify(self, pair: StepPair) -> Verdict:
        if self.judge is not None:
            await self.judge.verify(pair)
        score = self._draw(pair)
        return Verdict(score < self.probability, Reason.PLUG_IN, score)

    def _draw(self, pair: StepPair) -> float:
        """A number in [0, 1)."""
        digest = blake2b(f"{self.seed}/{len(pair.prefix)}/".encode(), digest_size=8)
        for step in (pair.target, pair.drafted):
            digest.update(np.asarray([len(step.ids), *step.ids], dtype=np.int64).tobytes())
        return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53


@dataclass
class Grade:
    """The target grades a pair from 0 to 9 in one token, and a step is accepted from ``least`` up (SpecReason's verifier)."""

    least: float = 9.0
    _prompt: JudgePrompt | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _in_range("least", self.least, 1.0, 9.0)

    def for_request(self, request: LookaheadRequest, parts: VerifierParts) -> Verifier:
        self._prompt = self._prompt or grade_prompt(parts)
        return _Grading(parts, self._prompt, parts.tokenizer, self.least)


@dataclass(frozen=True)
class _Grading:
    parts: VerifierParts
    prompt: JudgePrompt
    tokenizer: StepTokenizer
    least: float

    async def verify(self, pair: StepPair) -> Verdict:
        if (ids := self.prompt.ids(pair.target_text, pair.drafted_text)) is None:
            return Verdict(False, Reason.CAPPED)
        call = EngineCall(request_id=pair.call_id, input_ids=np.asarray(ids, dtype=np.int32), max_new_tokens=1)
        answer = await ask(self.parts.target, call, timeout_s=None, on_error=Reason.VERIFIER_ERROR)
        if isinstance(answer, Reason):
            return Verdict(False, answer)
        grade = parse_grade(str(self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)))
        return Verdict(False, Reason.GARBAGE) if grade is None else Verdict(grade >= self.least, Reason.PLUG_IN, float(grade))


def grade_prompt(parts: VerifierParts) -> JudgePrompt:
    """The target's prompt for grades, in its own template; its reasoning is closed, so that its grade is its next token.

    Raises:
        InvalidRequest: the template refuses it.
    """
    tokenizer: Any = parts.tokenizer
    try:
        prefill = closed_reasoning(tokenizer, parts.think_open, parts.think_close)
        return JudgePrompt.from_tokenizer(tokenizer, system_text=GRADE_SYSTEM_TEXT, task_text=GRADE_TASK_TEXT, prefill=prefill)
    except Exception as error:  # templates raise whatever they like at turns they do not accept
        raise InvalidRequest("verifier", "grade", f"the target's chat template refuses the prompt for it: {error}") from error


def parse_grade(token_text: str) -> int | None:
    """0 to 9 for a token that is that one digit, None for anything else."""
    return int(token_text) if len(token_text) == 1 and token_text in "0123456789" else None


class Embedder(Protocol):
    """A sentence embedding model."""

    async def similarity(self, first: str, second: str) -> float:
        """Cosine of the two texts' embeddings, -1 to 1."""


@dataclass
class Embedding:
    """Accepts by the cosine of the two steps' sentence embeddings, from ``least`` up.

    Attributes:
        folder: a sentence-transformers checkpoint, loaded when the server starts.
        model: in place of one from a folder.
    """

    folder: str = ""
    least: float = 0.95
    model: Embedder | None = None

    def __post_init__(self) -> None:
        _in_range("least", self.least, 0.0, 1.0)
        if self.model is None:
            from bench.plug_ins.embedding_model import EmbeddingModel  # torch, which is not loaded without need

            self.model = EmbeddingModel.load(Path(self.folder))

    def for_request(self, request: LookaheadRequest, parts: VerifierParts) -> Verifier:
        return self

    async def verify(self, pair: StepPair) -> Verdict:
        assert self.model is not None
        score = await self.model.similarity(pair.target_text.strip(), pair.drafted_text.strip())
        return Verdict(score >= self.least, Reason.PLUG_IN, score)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value:g}: from {low:g} to {high:g}")
