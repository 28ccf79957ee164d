"""How likely drafted steps are to be accepted by one verifier."""

from __future__ import annotations

from lr_backend.policy.average import Average
from lr_backend.policy.confidence import Confidence

USUAL_ALPHA, USUAL_STEPS, USUAL_UNTIL = 0.6, 8.0, 64
"""What is expected of a verifier that has decided nothing yet; as how many of its steps that counts at first, and after how many
it counts no more."""
MAX_ALPHA = 0.98
"""A rate is at most this, and at least what is left to 1: no step is certain to be accepted, or to be rejected."""
LATELY = 32
"""Steps that tell luck from change."""


class Acceptance:
    """What the verdicts of one verifier have lately come to. Those of another say nothing of it.

    Attributes:
        confidence: the share of accepted steps by how sure the draft was.
    """

    def __init__(self) -> None:
        self._accepted, self._lately = Average(memory=256), Average(memory=LATELY)
        self.confidence = Confidence()

    @property
    def rate(self) -> float:
        """Share of the drafted steps at the root that are accepted, smoothed while few are known: a first verdict says little."""
        count, value = self._accepted.count, self._accepted.value or 0.0
        weight = USUAL_STEPS * max(0.0, 1.0 - count / USUAL_UNTIL)
        return min(MAX_ALPHA, max(1.0 - MAX_ALPHA, (count * value + weight * USUAL_ALPHA) / (count + weight)))

    @property
    def rate_lately(self) -> float:
        """The same of the last few steps: luck, or a change that has come."""
        return self.rate if self._lately.count < LATELY else self._lately.value or 0.0

    def decided(self, accepted: bool, log_prob: float | None) -> None:
        """A drafted step at the root was accepted, or not."""
        self._accepted.add(float(accepted))
        self._lately.add(float(accepted))
        if log_prob is not None:
            self.confidence.decided(log_prob, accepted)
