"""Who judges an accepted pair again, more strictly than the verifier that let it pass.

``target``   the target is sent to search for a difference (:data:`~lr_backend.verify.judge_prompt.AUDIT_TASK_TEXT`)
``judge``    the judge is asked with the two steps changed over: what holds in one order only was not sure
``checker``  a function of the deployment's own says whether the two texts mean the same
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from lr_backend.config import Checker, LoopConfig
from lr_backend.engine import Engine
from lr_backend.errors import InvalidRequest
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.asking import ask_for_label
from lr_backend.verify.factory import VerifierParts
from lr_backend.verify.judge_prompt import JudgePrompt, readable_step_tokens
from lr_backend.verify.verdict import Reason, StepPair


class Auditor(Protocol):
    """Judges pairs that were accepted. Unlike in a verifier, doubt says nothing: a failed audit counts neither way."""

    async def audit(self, pair: StepPair) -> bool | Reason:
        """True if the drafted step was rightly accepted, False if it was not, or why nobody could tell. May be cancelled."""

    def close(self) -> None:
        """Nothing more is asked."""


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

    def close(self) -> None: ...


class CheckerAuditor:
    """A function, on one thread of its own: it may take its time and does not hold up the event loop."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._executor = ThreadPoolExecutor(1, "audit")

    async def audit(self, pair: StepPair) -> bool | Reason:
        texts = (pair.drafted_text.strip(), pair.target_text.strip())
        try:
            same = await asyncio.get_running_loop().run_in_executor(self._executor, self._checker, *texts)
        except Exception:  # whatever a function of the deployment's raises, it is a failed audit
            return Reason.VERIFIER_ERROR
        return same if isinstance(same, bool) else Reason.GARBAGE

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


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
