"""How likely the target finds the drafted step: its mean log-probability a token, after the same prefix.

One pass over the step where it fits the engine's ``max_draft_len``, else one a chunk, all in flight together: the step goes as
token drafts that the engine takes whatever it thinks of them (``draft_acceptance_threshold`` 0), and it says how likely each was.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import numpy as np

from lr_backend.engine import Engine, EngineCall, Generation
from lr_backend.verify.asking import ask
from lr_backend.verify.verdict import Reason, StepPair


@dataclass(frozen=True)
class LikelihoodScorer:
    """Nats a token, at most 0. ``max_draft_len``: most tokens of one call. ``timeout_s`` (of the whole step) None waits."""

    engine: Engine
    max_draft_len: int
    timeout_s: float | None
    reason = Reason.LIKELIHOOD

    async def measure(self, pair: StepPair) -> float | Reason:
        ids = pair.drafted.ids
        starts = range(0, len(ids), self.max_draft_len)
        if not starts:
            return Reason.UNKNOWN
        answers = await asyncio.gather(*(self._chunk(pair, start) for start in starts))
        total = 0.0
        for answer, start in zip(answers, starts, strict=True):
            if isinstance(answer, Reason):
                return answer
            chunk = ids[start : start + self.max_draft_len]
            # An engine that shortened or dropped the drafts has not graded this step.
            if answer.token_ids[: len(chunk)] != chunk or len(answer.log_probs) < len(chunk):
                return Reason.GARBAGE
            total += math.fsum(answer.log_probs[: len(chunk)])
        mean = total / len(ids)
        return Reason.GARBAGE if math.isnan(mean) else mean

    async def _chunk(self, pair: StepPair, start: int) -> Generation | Reason:
        ids = np.asarray(pair.drafted.ids, dtype=np.int32)
        chunk = ids[start : start + self.max_draft_len]
        call = EngineCall(
            request_id=f"{pair.call_id}/{start}",
            input_ids=np.concatenate([pair.prefix, ids[:start]]),
            max_new_tokens=len(chunk) + 1,
            draft_ids=chunk,
            accept_all_drafts=True,
            return_log_probs=True,
        )
        return await ask(self.engine, call, timeout_s=self.timeout_s, on_error=Reason.VERIFIER_ERROR)
