"""Ratios and shares with 95 % intervals that know that trials of one problem are alike. Pure; every draw is seeded.

Ratios have a *cluster* bootstrap: percentiles of :data:`NUM_RESAMPLES` draws of problems.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from lr_backend.audit.interval import Z_95

NUM_RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)
_CHUNK = 2_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        return Estimate(factor * self.value, factor * self.low, factor * self.high)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the samples of one problem add up to: ``total`` out of ``weight``."""

    total: float
    weight: float


def ratio_of_sums(clusters: Sequence[Cluster], seed: int = 0) -> Estimate:
    """``sum(total) / sum(weight)`` with the interval of a cluster bootstrap.

    Raises:
        ValueError: no cluster, or none that weighs anything.
    """
    totals, weights = columns(clusters)
    if not weights.sum() > 0:
        raise ValueError("nothing to average over")
    return _estimate(totals, weights, seed)


def ratio(over: Sequence[Cluster], under: Sequence[Cluster], seed: int = 0) -> Estimate:
    """Two ratios of sums over each other, paired: ``over[i]`` and ``under[i]`` are of the same problem and are drawn together.

    Raises:
        ValueError: not as many on both sides, or nothing to divide by.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} problems over {len(under)}")
    first, second = columns(over), columns(under)
    if not (first[1].sum() > 0 and second[0].sum() > 0 and second[1].sum() > 0):
        raise ValueError("nothing to divide by")

    def rate(picks: npt.NDArray[np.intp]) -> Floats:
        one = first[0][picks].sum(axis=1) / first[1][picks].sum(axis=1)
        two = second[0][picks].sum(axis=1) / second[1][picks].sum(axis=1)
        return np.asarray(one / two, dtype=np.float64)

    everything = rate(np.arange(len(over))[None, :])
    low, high = np.percentile(resampled(len(over), rate, seed), INTERVAL)
    return Estimate(float(everything[0]), float(low), float(high))


def paired_speedup(baseline_s: Sequence[float], mode_s: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Ratio of the sums of seconds, and its 95 % interval over pairs."""
    assert len(baseline_s) == len(mode_s) > 0, (len(baseline_s), len(mode_s))
    found = ratio_of_sums([Cluster(*pair) for pair in zip(baseline_s, mode_s, strict=True)], seed)
    return found.value, found.low, found.high


def columns(clusters: Sequence[Cluster]) -> tuple[Floats, Floats]:
    return (
        np.asarray([cluster.total for cluster in clusters], dtype=np.float64),
        np.asarray([cluster.weight for cluster in clusters], dtype=np.float64),
    )


def _estimate(totals: Floats, weights: Floats, seed: int) -> Estimate:
    def rate(picks: npt.NDArray[np.intp]) -> Floats:
        drawn = weights[picks].sum(axis=1)
        return np.asarray(totals[picks].sum(axis=1) / np.where(drawn > 0, drawn, np.nan), dtype=np.float64)

    low, high = np.nanpercentile(resampled(len(totals), rate, seed), INTERVAL)
    return Estimate(float(totals.sum() / weights.sum()), float(low), float(high))


def resampled(num: int, statistic, seed: int) -> Floats:  # type: ignore[no-untyped-def]
    """``statistic`` of each draw; draws come as index arrays of shape [draws, num], some at a time to bound the memory."""
    rng = np.random.default_rng(seed)
    size = max(1, min(NUM_RESAMPLES, _CHUNK // max(1, num)))
    parts = []
    done = 0
    while done < NUM_RESAMPLES:
        now = min(size, NUM_RESAMPLES - done)
        parts.append(np.asarray(statistic(rng.integers(0, num, (now, num))), dtype=np.float64))
        done += now
    return np.concatenate(parts)


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
