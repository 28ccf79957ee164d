"""How likely a drafted step is to be accepted, by how sure the draft was of it.

A draft that hesitated wrote something of a low log-probability, and that is rejected more often. How much more depends on the
models and on what they write about, so it is learned from the verdicts of one verifier of one server.
"""

from __future__ import annotations

from collections import deque

import numpy as np

MEMORY = 512
"""Verdicts remembered."""
NEIGHBOURS = 24
"""Verdicts of steps of like log-probability that an estimate is the mean of."""
PRIOR_VERDICTS = 4
"""The overall acceptance rate weighs as much as this many of them."""
LEAST_VERDICTS = 32
"""With fewer, every step is taken to be accepted."""


class Confidence:
    """The chance of acceptance as a function of the draft's log-probability, by nearest neighbours."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, bool]] = deque(maxlen=MEMORY)

    def decided(self, log_prob: float, accepted: bool) -> None:
        """A drafted step of this log-probability was accepted, or not."""
        self._seen.append((log_prob, accepted))

    def chance(self, log_prob: float | None) -> float:
        """Probability, in [0, 1], that a drafted step will be accepted; 1 while little is known."""
        if log_prob is None or len(self._seen) < LEAST_VERDICTS:
            return 1.0
        seen = np.array(self._seen)
        distances = np.abs(seen[:, 0] - log_prob)
        nearest = np.argpartition(distances, NEIGHBOURS)[:NEIGHBOURS]
        return float((seen[nearest, 1].sum() + PRIOR_VERDICTS * seen[:, 1].mean()) / (NEIGHBOURS + PRIOR_VERDICTS))
