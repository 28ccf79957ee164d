"""A language model as the verifier: one prefill and one token (paper, section 4 and appendix A)."""

from __future__ import annotations

import numpy as np

from lr_backend.engine import Engine, EngineCall
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.asking import ask
from lr_backend.verify.judge_prompt import JudgePrompt, parse_verdict
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
        answer = await self._label(pair)
        if isinstance(answer, Reason):
            return Verdict(False, answer, verifier="judge")
        return Verdict(answer, Reason.JUDGE, verifier="judge")

    async def _label(self, pair: StepPair) -> bool | Reason:
        if self.failed:
            return Reason.JUDGE_ERROR
        if (prompt := self._prompt.ids(pair.target_text, pair.drafted_text)) is None:
            return Reason.CAPPED
        call = EngineCall(
            request_id=pair.call_id,
            input_ids=np.asarray(prompt, dtype=np.int32),
            max_new_tokens=1,
        )
        answer = await ask(self._engine, call, timeout_s=self._timeout_s, on_error=Reason.JUDGE_ERROR)
        if isinstance(answer, Reason):
            self.failed = self.failed or answer is Reason.JUDGE_ERROR
            return answer
        aligned = parse_verdict(str(self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)))
        return Reason.GARBAGE if aligned is None else aligned
