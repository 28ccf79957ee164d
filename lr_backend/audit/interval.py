"""The share of accepted steps that were wrong, with an interval that allows for the auditor's own errors."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

Z_95 = 1.959964
"""Two-sided 95 % of a normal distribution."""
LEAST_AUDITS = 20.0
"""An interval around a few audits is too sure of itself; nothing is beyond doubt before these."""
LEAST_SHARE = 0.1
"""An audit stands for ten steps at most. The client chooses the share, and one audit is not to outweigh all others: neither in
the rate, nor in how sure of it anybody may be."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A false-accept rate and its 95 % interval. ``num``: audits that it rests on, older ones for less; at 0 nothing is known."""

    rate: float | None = None
    low: float = 0.0
    high: float = 1.0
    num: float = 0.0

    def exceeds(self, budget: float) -> bool:
        """The rate is above ``budget`` beyond doubt."""
        return self.num >= LEAST_AUDITS and self.low > budget


Trials = tuple[int, int]
"""Successes and trials."""


def corrected(called: float, num: float, sensitivity: Trials | None = None, specificity: Trials | None = None) -> Estimate:
    """The share that was wrong, where an auditor ``called`` that share of ``num`` > 0 cases wrong.

    Rogan and Gladen's estimate (1978) with Lang and Reiczigel's interval (2014), in which sensitivity and specificity are as
    uncertain as the trials they were measured in. Without such trials the auditor makes no errors, and the interval is that of
    Agresti and Coull (1998).
    """
    (seen_se, se, var_se), (seen_sp, sp, var_sp) = _measured(sensitivity), _measured(specificity)
    more = num + Z_95**2
    share = (called * num + Z_95**2 / 2) / more
    wrong = (share + sp - 1) / (se + sp - 1)
    centre = wrong + 2 * Z_95**2 * (wrong * var_se - (1 - wrong) * var_sp)
    half = Z_95 * sqrt(share * (1 - share) / more + wrong**2 * var_se + (1 - wrong) ** 2 * var_sp) / (se + sp - 1)
    rate = min(1.0, max(0.0, (called + seen_sp - 1) / (seen_se + seen_sp - 1)))
    return Estimate(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)), num)


def _measured(trials: Trials | None) -> tuple[float, float, float]:
    """A share as seen, with one success and one failure more, and the variance of that."""
    if trials is None:
        return 1.0, 1.0, 0.0
    hits, num = trials
    share = (hits + 1) / (num + 2)
    return hits / num, share, share * (1 - share) / (num + 2)


class FalseAccepts:
    """A running false-accept rate (:func:`corrected`). Each audit makes the older ones count for a little less.

    The interval is that for Kish's effective number of audits, (sum of weights)^2 / sum of squared weights.
    """

    def __init__(self, memory: int, sensitivity: Trials | None = None, specificity: Trials | None = None) -> None:
        self._fade, self._errors = 1.0 - 1.0 / memory, (sensitivity, specificity)
        self._weight = self._false = self._squares = 0.0
        # Replaced as a whole: another thread may read it.
        self.estimate = Estimate()

    def add(self, false: bool, share: float = 1.0) -> None:
        """One more audit: whether it called the step wrongly accepted.

        Args:
            share: of its request's steps that are audited, in (0, 1]. The audit stands for the others too.
        """
        weight = 1.0 / max(share, LEAST_SHARE)
        self._weight = self._weight * self._fade + weight
        self._false = self._false * self._fade + weight * false
        self._squares = self._squares * self._fade**2 + weight**2
        called, num = min(1.0, self._false / self._weight), self._weight**2 / self._squares
        self.estimate = corrected(called, num, *self._errors)
