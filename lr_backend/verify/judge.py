"""A language model as the verifier: one prefill and one token (paper, section 4 and appendix A)."""

from __future__ import annotations

from lr_backend.engine import Engine
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.asking import ask_for_label
from lr_backend.verify.judge_prompt import JudgePrompt
from lr_backend.verify.verdict import Reason, StepPair, Verdict


class JudgeVerifier:
    """Asks the judge engine whether two steps mean the same.

    One instance serves one request; once the judge's engine has failed, the rest of the request goes on without it
    (``failed``), so that a dead judge costs one error and not one a step.

    Args:
        timeout_s: a verdict later than this is a rejection; None waits (``deterministic``).
    """

    def __init__(self, engine: Engine, prompt: JudgePrompt, tokenizer: StepTokenizer, *, timeout_s: float | None) -> None:
        self._engine = engine
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self.failed = False

    async def verify(self, pair: StepPair) -> Verdict:
        label = Reason.JUDGE_ERROR if self.failed else await self._label(pair)
        if isinstance(label, Reason):
            self.failed = self.failed or label is Reason.JUDGE_ERROR
            return Verdict(False, label, verifier="judge")
        return Verdict(label, Reason.JUDGE, verifier="judge")

    async def _label(self, pair: StepPair) -> bool | Reason:
        ids, error = self._prompt.ids(pair.target_text, pair.drafted_text), Reason.JUDGE_ERROR
        return await ask_for_label(self._engine, self._tokenizer, pair.call_id, ids, timeout_s=self._timeout_s, on_error=error)
