"""Shares of steps and answers with 95 % intervals that know that trials of one problem are alike. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import sqrt

from lr_backend.audit.desk import Z_95


def wilson(share: float, num: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in ``num`` > 0 trials."""
    spread = Z_95**2 / num
    centre = (share + spread / 2) / (1 + spread)
    half = Z_95 * sqrt(share * (1 - share) / num + spread / (4 * num)) / (1 + spread)
    # Rounding must not push a bound past what was seen.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def effective_trials(clusters: Iterable[tuple[float, float]]) -> float:
    """As how many independent trials those of some problems count, given as (hits, trials) a problem; at most as they are.

    After Korn and Graubard (1998): the number at which the plain variance of a share is the ratio estimator's between problems,
    less what Student's t asks of few problems (to first order). Where all trials agree nobody knows how alike they are, and each
    problem counts as one.
    """
    found = [(hits, num) for hits, num in clusters if num]
    count, total, hits = len(found), sum(num for _, num in found), sum(hits for hits, _ in found)
    share = hits / total if total else 0.0
    if count < 2 or not 0.0 < share < 1.0:
        return float(count)
    spread = sum((one - share * num) ** 2 for one, num in found) * count / (count - 1) * (total - 1) / total
    few = (Z_95**2 + 1) / 2
    students = (1 + few / (total - 1)) / (1 + few / (count - 1))
    return min(total, total**2 * share * (1 - share) / spread if spread else total) * students


@dataclass(frozen=True)
class Share:
    """``hits`` out of ``total``, which count as ``worth`` independent trials; None: as they are."""

    hits: int
    total: int
    worth: float | None = None

    @classmethod
    def of(cls, trials: Iterable[tuple[Hashable, bool]]) -> Share:
        """Of trials, each with its problem."""
        by: dict[Hashable, tuple[int, int]] = {}
        for problem, hit in trials:
            hits, num = by.get(problem, (0, 0))
            by[problem] = (hits + hit, num + 1)
        return cls(sum(hits for hits, _ in by.values()), sum(num for _, num in by.values()), effective_trials(by.values()))

    @property
    def value(self) -> float:
        return self.hits / max(1, self.total)

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        return wilson(self.value, max(1.0, self.total if self.worth is None else self.worth))
