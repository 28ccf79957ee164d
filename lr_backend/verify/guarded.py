"""A deployment's own verifier, held to what every verifier promises: it answers in time and never raises."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real

import numpy as np

from lr_backend.clock import time_limit
from lr_backend.errors import heed_cancel, require_in_time
from lr_backend.verify.verdict import SETTLED, Reason, StepPair, Verdict, Verifier

_logger = logging.getLogger(__name__)


@dataclass
class GuardedVerifier:
    """One request's. Doubt rejects: an error, a verdict that is late, and what is no verdict. ``timeout_s`` None waits."""

    name: str
    verifier: Verifier
    timeout_s: float | None
    _is_told: bool = False

    async def verify(self, pair: StepPair) -> Verdict:
        try:
            async with time_limit(self.timeout_s) as limit:
                answer: object = await self.verifier.verify(pair)
            require_in_time(limit)
            verdict = _sound(answer)
        except BaseException as error:  # a deployment's own code may raise anything
            heed_cancel(error)
            if limit.expired():
                return Verdict(False, Reason.TIMEOUT, verifier=self.name)
            self._tell("the verifier %s failed", self.name, error=error)
            return Verdict(False, Reason.VERIFIER_ERROR, verifier=self.name)
        if verdict is None:
            self._tell("the verifier %s gave no verdict but a %s", self.name, type(answer).__name__)
            return Verdict(False, Reason.GARBAGE, verifier=self.name)
        # What is settled without a verifier is not its to say: the same words are never audited.
        reason = Reason.PLUG_IN if verdict.reason in SETTLED else verdict.reason
        return replace(verdict, accepted=bool(verdict.accepted), reason=reason, verifier=verdict.verifier or self.name)

    def _tell(self, event: str, *about: str, error: BaseException | None = None) -> None:
        """A line in the log, once: a verifier that fails mostly fails for every step."""
        if not self._is_told:
            self._is_told = True
            _logger.warning(event, *about, exc_info=error)


def _sound(answer: object) -> Verdict | None:
    """The answer, if it is a verdict in all its parts. A plug-in may have put anything into them, and numbers may be numpy's."""
    if not isinstance(answer, Verdict):
        return None
    score: object = answer.score
    verifier: object = answer.verifier
    decides = isinstance(answer.accepted, (bool, np.bool_)) and isinstance(answer.reason, Reason)
    tells = (score is None or (isinstance(score, Real) and isfinite(score))) and isinstance(verifier, str | None)
    return answer if decides and tells else None
