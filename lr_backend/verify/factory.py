"""Which verifier a request gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lr_backend.config import Bounds, LoopConfig
from lr_backend.engine import Engine
from lr_backend.errors import InvalidRequest
from lr_backend.request import LookaheadRequest, VerifierName
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.cascade import Band, CascadeVerifier, NumericVeto, SameText, Stage
from lr_backend.verify.exact import ExactVerifier
from lr_backend.verify.grade import GradeScorer
from lr_backend.verify.judge import JudgeVerifier
from lr_backend.verify.judge_prompt import JudgePrompt
from lr_backend.verify.scores import Disregarding, RandomVerifier, Scorer, ThresholdVerifier
from lr_backend.verify.similarity import Embedder, EmbeddingScorer
from lr_backend.verify.verdict import Verifier

NO_CHEAP_SCORE = "bounds the cascade's cheap score, and this server has no embedding model for one (embedding_dir)"


@dataclass(frozen=True)
class VerifierParts:
    """What verifiers ask. ``embedder`` is there where the server's settings name an embedding model."""

    target: Engine
    judge: Engine
    tokenizer: StepTokenizer
    judge_prompt: JudgePrompt
    judge_tokenizer: StepTokenizer
    embedder: Embedder | None = None


def make_verifier(request: LookaheadRequest, config: LoopConfig, parts: VerifierParts) -> Verifier:
    """The verifier of one request; it serves no other. The mode ``lossless`` accepts equal tokens only, whoever else is named.

    Raises:
        InvalidRequest: this server lacks what the named verifier needs.
    """
    # Asked of the one that was named: a field that this server cannot serve is refused even where ``lossless`` makes it idle.
    if (missing := config.lacks(request.verifier)) is not None:
        raise InvalidRequest("verifier", request.verifier.value, missing)
    # ``deterministic``: no verdict may depend on a clock.
    judge_s = None if request.deterministic else config.timeouts.judge_s
    embedding_s = None if request.deterministic else config.timeouts.embedding_s
    threshold = request.threshold

    def judge() -> Verifier:
        return JudgeVerifier(parts.judge, parts.judge_prompt, parts.judge_tokenizer, timeout_s=judge_s)

    def embedding() -> Scorer:
        assert parts.embedder is not None
        return EmbeddingScorer(parts.embedder, embedding_s)

    def cascade() -> Verifier:
        stages: list[Stage] = [SameText(), NumericVeto()]
        if parts.embedder is not None and config.embedding_dir is not None:
            stages.append(band(embedding(), config.cascade, request.verifier_threshold))
        elif request.verifier_threshold is not None:
            raise InvalidRequest("verifier_threshold", request.verifier_threshold, NO_CHEAP_SCORE)
        return CascadeVerifier(stages, judge())

    match request.effective_verifier:
        case VerifierName.EXACT:
            return ExactVerifier()
        case VerifierName.JUDGE:
            return judge()
        case VerifierName.CASCADE:
            return cascade()
        case VerifierName.EMBEDDING:
            return ThresholdVerifier(embedding(), threshold)
        case VerifierName.SCORE:
            grades = grade_prompt(parts.tokenizer, config)
            return ThresholdVerifier(GradeScorer(parts.target, grades, parts.tokenizer, judge_s), threshold)
        case VerifierName.RANDOM:
            chance = RandomVerifier(threshold, request.seed)
            return Disregarding(judge(), chance) if config.random_asks_judge else chance


def grade_prompt(tokenizer: Any, config: LoopConfig) -> JudgePrompt:
    """The target's prompt for grades, in its own template.

    Raises:
        InvalidRequest: the template refuses it.
    """
    try:
        return JudgePrompt.for_grades(tokenizer, config.think_open, config.think_close)
    except Exception as error:  # templates raise whatever they like at turns they do not accept
        raise InvalidRequest("verifier", "score", f"the target's chat template refuses the prompt for it: {error}") from error


def band(scorer: Scorer, bounds: Bounds, accept_from: float | None) -> Band:
    """A cascade's cheap stage; a request's own threshold takes the place of the upper bound."""
    upper = bounds.accept_from if accept_from is None else accept_from
    return Band(scorer, min(bounds.reject_below, upper), upper)
