"""The target grades a pair from 0 to 9 in one token (paper, table 2; SpecReason's verifier)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lr_backend.engine import Engine, EngineCall
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.asking import ask
from lr_backend.verify.judge_prompt import JudgePrompt, parse_grade
from lr_backend.verify.verdict import Reason, StepPair


@dataclass(frozen=True)
class GradeScorer:
    """The grade, 0.0 to 9.0; anything but one digit is garbage. ``timeout_s`` None waits."""

    engine: Engine
    prompt: JudgePrompt
    tokenizer: StepTokenizer
    timeout_s: float | None
    reason = Reason.GRADE

    async def measure(self, pair: StepPair) -> float | Reason:
        call = EngineCall(
            request_id=pair.call_id,
            input_ids=np.asarray(self.prompt.ids(pair.target_text, pair.drafted_text), dtype=np.int32),
            max_new_tokens=1,
        )
        answer = await ask(self.engine, call, timeout_s=self.timeout_s, on_error=Reason.VERIFIER_ERROR)
        if isinstance(answer, Reason):
            return answer
        grade = parse_grade(str(self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)))
        return Reason.GARBAGE if grade is None else float(grade)
