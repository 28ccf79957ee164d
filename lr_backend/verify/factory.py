"""Which verifier a request gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lr_backend.config import LoopConfig
from lr_backend.engine import Engine
from lr_backend.errors import InvalidRequest
from lr_backend.request import LookaheadRequest, VerifierName
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.cascade import CascadeVerifier, numeric_veto, same_text
from lr_backend.verify.exact import ExactVerifier
from lr_backend.verify.guarded import GuardedVerifier
from lr_backend.verify.judge import JudgeVerifier
from lr_backend.verify.judge_prompt import JudgePrompt
from lr_backend.verify.verdict import Verifier


class VerifierPlugIn(Protocol):
    """A verifier of the deployment's own. Made once, when the server starts, with the options of its section in the spec."""

    def for_request(self, request: LookaheadRequest, parts: VerifierParts) -> Verifier:
        """The verifier of one request; the same object for all of them where it keeps nothing of a request.

        Whatever its verifier raises, and a verdict that takes longer than the judge may, rejects the step.

        Raises:
            InvalidRequest: it cannot serve this request.
        """
        ...


@dataclass(frozen=True)
class VerifierParts:
    """What verifiers ask.

    Attributes:
        judge_s: what one verdict may take; None waits (``deterministic``: no verdict may depend on a clock).
        think_open, think_close: texts around the target's reasoning, where it has them.
        plug_ins: the deployment's own verifiers, by name.
    """

    target: Engine
    judge: Engine
    tokenizer: StepTokenizer
    judge_prompt: JudgePrompt
    judge_tokenizer: StepTokenizer
    judge_s: float | None = None
    think_open: str | None = None
    think_close: str | None = None
    plug_ins: Mapping[str, VerifierPlugIn] = field(default_factory=dict)

    def judging(self) -> JudgeVerifier:
        """The judge; it serves one request."""
        return JudgeVerifier(self.judge, self.judge_prompt, self.judge_tokenizer, timeout_s=self.judge_s)


def make_verifier(request: LookaheadRequest, config: LoopConfig, parts: VerifierParts) -> Verifier:
    """The verifier of one request; it serves no other. The mode ``lossless`` accepts equal tokens only, whoever else is named.

    Raises:
        InvalidRequest: this server has no such verifier, or it cannot serve the request.
    """
    # Asked of the one that was named: a verifier that this server has not is refused even where ``lossless`` makes it idle.
    if (missing := config.lacks_verifier(request.verifier)) is not None:
        raise InvalidRequest("verifier", request.verifier, missing)
    match request.effective_verifier:
        case VerifierName.EXACT:
            return ExactVerifier()
        case VerifierName.JUDGE:
            return parts.judging()
        case VerifierName.CASCADE:
            return CascadeVerifier((same_text, numeric_veto), parts.judging())
        case name:
            return GuardedVerifier(name, parts.plug_ins[name].for_request(request, parts), parts.judge_s)
