"""How likely a drafted step is to be accepted, by how sure the draft was of it.

A draft that hesitated wrote something of a low log-probability, and that is rejected more often. How much more depends on the
models and on what they write about, so it is learned from the verdicts of one verifier of one server.
"""

from __future__ import annotations

import numpy as np

MEMORY = 512
"""Verdicts remembered."""
NEIGHBOURS = 24
"""Verdicts of steps of like log-probability that an estimate is the mean of."""
PRIOR_VERDICTS = 4
"""The overall acceptance rate weighs as much as this many of them."""
LEAST_VERDICTS = 32
"""With fewer, log-probabilities say nothing."""


class Confidence:
    """The chance of acceptance as a function of the draft's log-probability, by nearest neighbours."""

    def __init__(self) -> None:
        # In no order: the oldest makes room for the newest.
        self._log_probs = np.empty(MEMORY)
        self._accepted = np.empty(MEMORY)
        self._num_decided = 0

    def decided(self, log_prob: float, accepted: bool) -> None:
        """A drafted step of this log-probability was accepted, or not."""
        place = self._num_decided % MEMORY
        self._log_probs[place], self._accepted[place] = log_prob, accepted
        self._num_decided += 1

    def chance(self, log_prob: float) -> float | None:
        """Probability, in [0, 1], that a drafted step will be accepted; None while little is known."""
        known = min(self._num_decided, MEMORY)
        if known < LEAST_VERDICTS:
            return None
        accepted = self._accepted[:known]
        nearest = np.argpartition(np.abs(self._log_probs[:known] - log_prob), NEIGHBOURS)[:NEIGHBOURS]
        return float((accepted[nearest].sum() + PRIOR_VERDICTS * accepted.mean()) / (NEIGHBOURS + PRIOR_VERDICTS))
