"""Who judges an accepted pair again, more strictly than the verifier that let it pass.

``target``   the target is sent to search for a difference (:data:`~lr_backend.verify.judge_prompt.AUDIT_TASK_TEXT`)
``judge``    the judge is asked with the two steps changed over: what holds in one order only was not sure
``checker``  a function of the deployment's own says whether the two texts mean the same
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

import numpy as np

from lr_backend.config import Checker, LoopConfig
from lr_backend.engine import Engine
from lr_backend.errors import InvalidRequest
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.asking import ask_for_label
from lr_backend.verify.factory import VerifierParts
from lr_backend.verify.judge_prompt import JudgePrompt, readable_step_tokens
from lr_backend.verify.verdict import Reason, StepPair

_logger = logging.getLogger(__name__)
MAX_CHECKS = 4
"""Of a checker, at a time: one that somebody waits for, and those that were given up."""


class Auditor(Protocol):
    """Judges pairs that were accepted. Unlike in a verifier, doubt says nothing: a failed audit counts neither way."""

    async def audit(self, pair: StepPair) -> bool | Reason:
        """True if the drafted step was rightly accepted, False if it was not, or why nobody could tell. May be cancelled."""


@dataclass(frozen=True)
class ModelAuditor:
    """A language model, greedily: one prefill and one token. ``swapped``: the drafted step comes first."""

    engine: Engine
    prompt: JudgePrompt
    tokenizer: StepTokenizer
    on_error: Reason
    swapped: bool = False

    async def audit(self, pair: StepPair) -> bool | Reason:
        texts = (pair.target_text, pair.drafted_text)
        ids = self.prompt.ids(*reversed(texts)) if self.swapped else self.prompt.ids(*texts)
        return await ask_for_label(self.engine, self.tokenizer, pair.call_id, ids, timeout_s=None, on_error=self.on_error)


class CheckerAuditor:
    """A function, each time on a thread of its own: it may take its time and does not hold up the event loop.

    A call that was given up keeps its thread until it comes to its end. Nothing waits for such a thread, the interpreter's end
    neither; while there are :data:`MAX_CHECKS` of them audits fail at once.
    """

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._num_running = 0
        self._is_told = False

    async def audit(self, pair: StepPair) -> bool | Reason:
        if self._num_running >= MAX_CHECKS:
            return Reason.VERIFIER_ERROR
        loop = asyncio.get_running_loop()
        found: asyncio.Future[bool | Reason] = loop.create_future()

        def ended(answer: bool | Reason) -> None:
            self._num_running -= 1
            if not found.done():
                found.set_result(answer)

        def check() -> None:
            answer = self._check(pair)
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(ended, answer)

        Thread(target=check, name="audit", daemon=True).start()
        self._num_running += 1
        return await found

    def _check(self, pair: StepPair) -> bool | Reason:
        try:
            same: object = self._checker(pair.drafted_text.strip(), pair.target_text.strip())
        except BaseException as error:  # whatever a function of the deployment's raises, it is a failed audit
            self._tell("the checker failed", error)
            return Reason.VERIFIER_ERROR
        if isinstance(same, (bool, np.bool_)):
            return bool(same)
        self._tell(f"the checker gave no bool but a {type(same).__name__}")
        return Reason.GARBAGE

    def _tell(self, event: str, error: BaseException | None = None) -> None:
        """A line in the log, once: without audits no risk budget is ever spent."""
        if not self._is_told:
            self._is_told = True
            _logger.warning(event, exc_info=error)


def make_auditor(config: LoopConfig, parts: VerifierParts, checker: Checker | None) -> Auditor:
    """The server's auditor. ``checker`` is there where the settings name one.

    Raises:
        InvalidRequest: the target's chat template refuses the auditor's prompt, so that no request can be audited.
    """
    match config.audit.auditor:
        case "checker":
            assert checker is not None
            return CheckerAuditor(checker)
        case "judge":
            return ModelAuditor(parts.judge, parts.judge_prompt, parts.judge_tokenizer, Reason.JUDGE_ERROR, swapped=True)
        case "target":
            tokenizer: Any = parts.tokenizer
            try:
                most = readable_step_tokens(config.limits.max_step_tokens)
                prompt = JudgePrompt.for_audits(tokenizer, config.think_open, config.think_close, max_step_tokens=most)
            except Exception as error:  # templates raise whatever they like at turns they do not accept
                rule = f"the target's chat template refuses the prompt of this server's auditor: {error}"
                raise InvalidRequest("audit_rate", "target", rule) from error
            return ModelAuditor(parts.target, prompt, parts.tokenizer, Reason.VERIFIER_ERROR)
