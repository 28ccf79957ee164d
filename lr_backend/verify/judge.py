"""A language model as the verifier: one prefill and one token (paper, section 4 and appendix A)."""

from __future__ import annotations

import asyncio

import numpy as np

from lr_backend.engine import Engine, EngineCall
from lr_backend.errors import EngineError
from lr_backend.step import StepTokenizer
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
        if self.failed:
            return Verdict(False, Reason.JUDGE_ERROR)
        call = EngineCall(
            request_id=pair.call_id,
            input_ids=np.asarray(self._prompt.ids(pair.target_text, pair.drafted_text), dtype=np.int32),
            max_new_tokens=1,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                generation = await self._engine.generate(call)
        except TimeoutError:
            return Verdict(False, Reason.TIMEOUT)
        except EngineError:
            self.failed = True
            return Verdict(False, Reason.JUDGE_ERROR)
        aligned = parse_verdict(str(self._tokenizer.decode(list(generation.token_ids), skip_special_tokens=False)))
        return Verdict(False, Reason.GARBAGE) if aligned is None else Verdict(aligned, Reason.JUDGE)
