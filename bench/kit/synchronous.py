"""The paper's synchronous procedure (arXiv 2506.19830, section 3 and theorem 1), as a baseline for the asynchronous loop.

A cycle has three phases, each of which waits for the whole of the one before: the draft writes k - 1 steps, one after another;
the target writes its own step after each of the k prefixes, in one batch; the judge compares each pair. The drafted steps up to
the first rejection are committed, and the target's own step after them: 1 to k steps a cycle, in the time of one target step and
k - 1 drafted ones, and a verdict.

What is compared follows the authors' public code: steps end at blank lines or a cap; equal texts, white space and case aside,
need no judge; a step that begins in the middle of another is always the target's, the first of an answer among them; the answer
after the reasoning is treated like the reasoning. Of what goes wrong there nothing is kept: seeds differ for every call, sampled
token ids are never re-tokenised, nothing is drafted or committed below an end token, a pair of which only one ends the answer is
rejected, and a judge that fails rejects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.engine import Engine, Role, Sampling
from lr_backend.loop.assemble import Engines
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.writer import StepWriter
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from lr_backend.steps.step import Step, StepEnd
from lr_backend.verify import StepPair
from lr_backend.verify.judge import JudgeVerifier
from lr_backend.verify.judge_prompt import JudgePrompt

STEP_TOKENS = 100
"""The reference's cap."""
JUDGE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class SynchronousAnswer:
    """What was written, and how: ``num_accepted`` of ``num_compared`` pairs that stood at the root when they were decided."""

    token_ids: tuple[int, ...]
    num_accepted: int
    num_compared: int
    num_cycles: int


@dataclass(frozen=True)
class Texts:
    """How steps are read: those of target and draft, and the judge's answer."""

    rules: StepRules
    tokenizer: Any
    judge_prompt: JudgePrompt
    judge_tokenizer: Any

    def plain(self, step: Step) -> str:
        return str(self.tokenizer.decode(list(step.ids), skip_special_tokens=True))

    def begins_a_step(self, prefix: IntArray) -> bool:
        """Whether what follows is a step from its beginning: the text so far ends with a delimiter."""
        last = prefix[-len(BLANK_LINE.text) :].tolist()  # a delimiter has as many tokens as characters at most
        return str(self.tokenizer.decode(last, skip_special_tokens=False)).endswith(BLANK_LINE.text)


def same_text(one: str, other: str) -> bool:
    """The reference's shortcut: equal without white space and case."""
    return "".join(one.split()).lower() == "".join(other.split()).lower()


@dataclass(frozen=True)
class SynchronousLookahead:
    """Answers one question at a time.

    Attributes:
        max_depth: k, target steps of one batch; 1 is the target alone, a step at a time.
        max_tokens: of an answer.
        draft_sampling: of drafted steps; None: as the target's.
    """

    engines: Engines
    texts: Texts
    sampling: Sampling
    max_depth: int = 4
    max_tokens: int = 640
    max_step_tokens: int = STEP_TOKENS
    draft_sampling: Sampling | None = None

    def __post_init__(self) -> None:
        assert self.max_depth >= 1, self.max_depth

    async def answer(self, prompt_ids: IntArray, request_id: str, seed: int) -> SynchronousAnswer:
        """Run cycles to the end of the answer.

        Raises:
            EngineError: target or draft failed.
        """
        work = _Work(self, request_id, seed, len(prompt_ids))
        prefix, ended, num_accepted, num_compared, num_cycles = prompt_ids, False, 0, 0, 0
        while not ended and len(prefix) < work.end:
            steps, accepted, compared = await self._cycle(work, prefix)
            prefix = _append(prefix, steps)
            ended = steps[-1].end is StepEnd.END
            num_accepted, num_compared, num_cycles = num_accepted + accepted, num_compared + compared, num_cycles + 1
        written = tuple(prefix[len(prompt_ids) :].tolist())
        return SynchronousAnswer(written, num_accepted, num_compared, num_cycles)

    async def _cycle(self, work: _Work, prefix: IntArray) -> tuple[list[Step], int, int]:
        """(steps to commit, accepted pairs, pairs decided at the root)."""
        drafted = await self._draft(work, prefix)
        prefixes = [_append(prefix, drafted[:number]) for number in range(len(drafted) + 1)]
        if drafted and (drafted[-1].end is StepEnd.END or len(prefixes[-1]) >= work.end):
            prefixes.pop()  # nothing is written below an end
        targets = await asyncio.gather(*(work.target(one) for one in prefixes))
        pairs = zip(prefixes, targets, drafted, strict=False)
        verdicts = await asyncio.gather(*(work.means_the_same(*pair) for pair in pairs))
        num_accepted = len(list(takewhile(bool, verdicts)))
        steps = [*drafted[:num_accepted], *targets[num_accepted : num_accepted + 1]]
        return steps, num_accepted, min(num_accepted + 1, len(verdicts))

    async def _draft(self, work: _Work, prefix: IntArray) -> list[Step]:
        drafted: list[Step] = []
        while len(drafted) < self.max_depth - 1:
            before = _append(prefix, drafted)
            if len(before) >= work.end or (drafted and drafted[-1].end is StepEnd.END):
                break
            drafted.append(await work.draft(before))
        return drafted


class _Work:
    """The engine calls of one answer."""

    def __init__(self, procedure: SynchronousLookahead, request_id: str, seed: int, num_prompt_tokens: int) -> None:
        engines, self._texts = procedure.engines, procedure.texts
        self._ending = procedure.texts.rules.of_step
        self.end = num_prompt_tokens + procedure.max_tokens
        self._max_step_tokens = procedure.max_step_tokens
        self._request_id = request_id
        self._judge_calls = count()
        ledger = Ledger(asyncio.get_running_loop().time, num_prompt_tokens)

        def writer(engine: Engine, role: Role) -> StepWriter:
            sampling = procedure.draft_sampling if role is Role.DRAFT else None
            return StepWriter(engine, role, sampling or procedure.sampling, Seeds(seed), request_id, ledger)

        self._target, self._draft = writer(engines.target, Role.TARGET), writer(engines.draft, Role.DRAFT)
        prompt, tokenizer = procedure.texts.judge_prompt, procedure.texts.judge_tokenizer
        self._judge = JudgeVerifier(engines.judge, prompt, tokenizer, timeout_s=JUDGE_TIMEOUT_S)

    async def target(self, prefix: IntArray) -> Step:
        return await self._target.write(prefix, self._budget(prefix), self._ending)

    async def draft(self, prefix: IntArray) -> Step:
        return await self._draft.write(prefix, self._budget(prefix), self._ending)

    async def means_the_same(self, prefix: IntArray, target: Step, drafted: Step) -> bool:
        """The reference's decision on one pair."""
        one_ends = (target.end is StepEnd.END) != (drafted.end is StepEnd.END)
        if one_ends or not self._texts.begins_a_step(prefix):
            return False
        texts = self._texts.plain(target), self._texts.plain(drafted)
        if same_text(*texts):
            return True
        call_id = f"{self._request_id}/judge/{next(self._judge_calls)}"
        return (await self._judge.verify(StepPair(target, drafted, *texts, call_id, prefix))).accepted

    def _budget(self, prefix: IntArray) -> int:
        return min(self._max_step_tokens, self.end - len(prefix))


def _append(prefix: IntArray, steps: Sequence[Step]) -> IntArray:
    return np.concatenate([prefix, *(np.asarray(step.ids, dtype=np.int32) for step in steps)]) if steps else prefix
