"""A deployment's own verifier, held to what every verifier promises: it answers in time and never raises."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import numpy as np

from lr_backend.errors import own_task_is_cancelled
from lr_backend.verify.verdict import SETTLED, Reason, StepPair, Verdict, Verifier

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardedVerifier:
    """Doubt rejects: an error, a verdict that is late, and what is no verdict. ``timeout_s`` None waits."""

    name: str
    verifier: Verifier
    timeout_s: float | None

    async def verify(self, pair: StepPair) -> Verdict:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                verdict: object = await self.verifier.verify(pair)
        except (Exception, asyncio.CancelledError) as error:  # a deployment's own code may raise anything
            if own_task_is_cancelled(error):
                raise
            if limit.expired():
                return Verdict(False, Reason.TIMEOUT, verifier=self.name)
            _logger.warning("the verifier %s failed", self.name, exc_info=error)
            return Verdict(False, Reason.VERIFIER_ERROR, verifier=self.name)
        if not isinstance(verdict, Verdict) or not _is_sound(verdict):
            _logger.warning("the verifier %s gave no verdict but a %s", self.name, type(verdict).__name__)
            return Verdict(False, Reason.GARBAGE, verifier=self.name)
        # What is settled without a verifier is not its to say: equal tokens are never audited.
        reason = Reason.PLUG_IN if verdict.reason in SETTLED else verdict.reason
        return replace(verdict, accepted=bool(verdict.accepted), reason=reason, verifier=verdict.verifier or self.name)


def _is_sound(verdict: Verdict) -> bool:
    """A plug-in may have put anything into it, and compares numbers of numpy."""
    return isinstance(verdict.accepted, (bool, np.bool_)) and isinstance(verdict.reason, Reason)
