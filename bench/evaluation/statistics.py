"""Shares, differences and what they say of a margin. Pure; every draw is seeded.

Answers to one problem are alike, so all intervals are by problem, as in :mod:`bench.kit.intervals`. All are two-sided 95 % ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.stats import permutation_test

from bench.kit.intervals import INTERVAL, NUM_RESAMPLES, Cluster, Estimate, Floats, columns, effective_trials, resampled, wilson

Key = TypeVar("Key", bound=Hashable)


class NonInferiority(StrEnum):
    """What an interval of a difference says of a margin."""

    SHOWN = "non-inferior"
    """The whole interval lies above minus the margin."""
    REFUTED = "inferior"
    """The whole interval lies below minus the margin."""
    OPEN = "undecided"


def share(clusters: Sequence[Cluster]) -> Estimate:
    """Right answers among all, with Wilson's interval for as many independent answers as they are worth.

    How much a problem's answers differ from run to run is in it: totals of problems vary by that too.
    """
    value = sum(cluster.total for cluster in clusters) / sum(cluster.weight for cluster in clusters)
    return Estimate(value, *wilson(value, effective_trials((cluster.total, cluster.weight) for cluster in clusters)))


def paired_difference(ours: Sequence[Cluster], theirs: Sequence[Cluster], seed: int = 0) -> Estimate:
    """Mean over problems of the share of right answers in ``ours[i]`` less that in ``theirs[i]``, of the same problem.

    The interval is a bootstrap over problems, and over the answers to each of them: runs differ. (With several answers a problem
    that is on the wide side, since problems differ by their runs already.) Two problems are added, one that says +1 and one that
    says -1 (as Bonett and Price add them for a pair of shares): where few problems differ, the plain one is too sure of itself,
    and where none does, it knows no doubt at all.

    Raises:
        ValueError: not as many on both sides, or none.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} problems beside {len(theirs)}")
    right, wrong = Cluster(1.0, 1.0), Cluster(0.0, 1.0)
    sides = [columns([*one, *added]) for one, added in ((ours, (right, wrong)), (theirs, (wrong, right)))]
    rng = np.random.default_rng([seed, 1])

    def difference(picks: npt.NDArray[np.intp]) -> Floats:
        first, second = (_drawn_again(totals[picks], weights[picks], rng) for totals, weights in sides)
        return np.asarray((first - second).mean(axis=1), dtype=np.float64)

    low, high = np.percentile(resampled(len(ours) + 2, difference, seed), INTERVAL)
    value = float(np.mean(means(ours)) - np.mean(means(theirs)))
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _drawn_again(totals: Floats, weights: Floats, rng: np.random.Generator) -> Floats:
    """Shares of as many answers again, drawn with repetition. Where there is one, it stays as it is."""
    if weights.max() > 1.0:
        totals = rng.binomial(weights.astype(np.int64), totals / weights).astype(np.float64)
    return totals / weights


def means(clusters: Iterable[Cluster]) -> list[float]:
    """Each problem's share."""
    return [cluster.total / cluster.weight for cluster in clusters]


def chance_of_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of no difference: signs of the problems' differences flipped at random, all of them where they are few."""
    found = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    found = found[found != 0.0]
    if len(found) == 0:
        return 1.0
    if len(found) == 1:
        return 1.0  # the one sign is as likely either way
    tested = permutation_test(
        (found,),
        lambda values, axis: np.mean(values, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=NUM_RESAMPLES - 1,
        rng=np.random.default_rng(seed),
    )
    return float(tested.pvalue)


def non_inferiority(difference: Estimate, margin: float) -> NonInferiority:
    """Whether what is lost is less than ``margin`` (in the difference's unit) beyond doubt."""
    if difference.low > -margin:
        return NonInferiority.SHOWN
    return NonInferiority.REFUTED if difference.high < -margin else NonInferiority.OPEN


def percentiles(values: Sequence[float], wanted: Sequence[float] = (50.0, 90.0, 99.0)) -> dict[str, float]:
    """``{"p50": ...}``, linear between neighbours; empty where there are no values."""
    if not len(values):
        return {}
    found = np.percentile(np.asarray(values, dtype=np.float64), wanted)
    return {f"p{name:g}": float(value) for name, value in zip(wanted, found, strict=True)}


def common(first: Mapping[Key, Cluster], second: Mapping[Key, Cluster]) -> tuple[list[Cluster], list[Cluster]]:
    """The clusters that both have, in the first one's order."""
    keys = [key for key in first if key in second]
    return [first[key] for key in keys], [second[key] for key in keys]
