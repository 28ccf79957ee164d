"""Shares, differences and ratios with their intervals: known values, and coverage on drawn data."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.evaluation.statistics import (
    NonInferiority,
    chance_of_difference,
    common,
    non_inferiority,
    paired_difference,
    percentiles,
    share,
)
from bench.kit import intervals
from bench.kit.intervals import Cluster, Estimate, Share, effective_trials, ratio, ratio_of_sums, wilson
from lr_backend.audit.interval import Z_95

shares = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=30)


def ones(values: Iterable[float]) -> list[Cluster]:
    """One answer a problem."""
    return [Cluster(float(value), 1.0) for value in values]


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 400)


def test_a_share_counts_samples_and_draws_problems() -> None:
    found = share([Cluster(4, 4), Cluster(0, 4), Cluster(2, 2)])

    assert found.value == pytest.approx(0.6)
    assert found.low < 0.15 and found.high > 0.9


@given(st.integers(1, 5000).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num))))
def test_wilsons_interval_holds_the_shares_that_a_score_test_does_not_reject(seen: tuple[int, int]) -> None:
    value, num = seen[0] / seen[1], seen[1]

    low, high = wilson(value, num)

    assert 0.0 <= low <= value <= high <= 1.0
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            assert abs(value - bound) == pytest.approx(Z_95 * sqrt(bound * (1 - bound) / num))


def test_samples_of_one_problem_are_no_further_evidence() -> None:
    once = share([Cluster(number % 2, 1) for number in range(40)])
    often = share([Cluster(16 * (number % 2), 16) for number in range(40)])

    assert (often.low, often.high) == pytest.approx((once.low, once.high), abs=0.01)


@given(st.lists(st.booleans(), min_size=2, max_size=80))
def test_one_trial_a_problem_counts_as_it_is(hits: list[bool]) -> None:
    found = Share.of(enumerate(hits))

    assert (found.hits, found.total) == (sum(hits), len(hits))
    assert found.interval() == pytest.approx(wilson(found.value, len(hits)))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: (min(pair), max(pair))), max_size=30))
def test_trials_never_count_for_more_than_they_are(clusters: list[tuple[int, int]]) -> None:
    total = sum(num for _, num in clusters)

    assert 0.0 <= effective_trials(clusters) <= total + 1e-9
    assert Share.of((number, trial < hits) for number, (hits, num) in enumerate(clusters) for trial in range(num)).total == total


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_where_all_agree_the_interval_is_wilsons_by_problem(right: float) -> None:
    found = share([Cluster(16 * right, 16.0)] * 25)

    assert (found.value, found.low, found.high) == (right, *wilson(right, 25))


@pytest.mark.parametrize(
    ("mean", "alike", "num_problems"), [(2 / 3, 3.0, 60), (0.93, 10.0, 40), (0.04, 1.0, 200), (0.04, 5.0, 100), (0.3, 0.5, 12)]
)
def test_the_interval_of_a_share_covers_as_often_as_it_says(mean: float, alike: float, num_problems: int) -> None:
    rng = np.random.default_rng(1)
    runs, hits, plain = 1000, 0, 0
    for _ in range(runs):
        of_problem = rng.beta(mean * alike, (1 - mean) * alike, num_problems)  # trials of a problem are alike
        nums = rng.integers(1, 8, num_problems)
        found = share([Cluster(float(one), float(num)) for one, num in zip(rng.binomial(nums, of_problem), nums, strict=True)])
        hits += found.low <= mean <= found.high
        low, high = wilson(found.value, nums.sum())
        plain += low <= mean <= high

    assert 0.92 <= hits / runs <= 0.99
    assert plain < hits


@pytest.mark.parametrize("gain", [0.0, 0.1])
@pytest.mark.parametrize("num", [12, 60])
def test_the_interval_of_a_difference_covers_at_least_as_often_as_it_says(few_draws: None, num: int, gain: float) -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        p = rng.beta(8.0, 2.0, num)
        base, ours = rng.random(num) < p * (1 - gain), rng.random(num) < p
        found = paired_difference(ones(ours), ones(base), trial)
        hits += found.low <= 0.8 * gain <= found.high

    assert hits / 200 >= 0.93


def test_runs_of_a_problem_are_drawn_again_too(few_draws: None) -> None:
    """Every problem is answered right half of the time: only runs differ."""
    rng = np.random.default_rng(4)
    hits = 0
    for trial in range(200):
        ours, theirs = ([Cluster(float(one), 4.0) for one in rng.binomial(4, 0.5, 20)] for _ in range(2))
        found = paired_difference(ours, theirs, trial)
        hits += found.low <= 0.0 <= found.high

    assert hits / 200 >= 0.95
    alike = paired_difference([Cluster(2.0, 4.0)] * 20, [Cluster(2.0, 4.0)] * 20)
    single = paired_difference([Cluster(1.0, 1.0)] * 20, [Cluster(1.0, 1.0)] * 20)
    assert alike.high - alike.low > single.high - single.low


@given(shares)
def test_no_difference_is_never_certain(values: list[float]) -> None:
    found = paired_difference(ones(values), ones(values))

    assert found.value == 0.0 and found.low < 0.0 < found.high
    assert chance_of_difference(values, values) == 1.0


def test_a_plain_difference_is_seen() -> None:
    ours, theirs = [1.0] * 40 + [0.0] * 10, [1.0] * 20 + [0.0] * 30

    found = paired_difference(ones(ours), ones(theirs))

    assert found.value == pytest.approx(0.4) and 0.2 < found.low < 0.4 < found.high < 0.6
    assert chance_of_difference(ours, theirs) < 0.001
    assert chance_of_difference([1.0, 0.0, 1.0], [0.0, 0.0, 1.0]) == 1.0


def test_few_differences_are_counted_exactly() -> None:
    # Five problems differ, all the same way: 2 of the 32 ways to place the signs are as far from 0.
    assert chance_of_difference([1.0] * 5 + [0.0] * 9, [0.0] * 14) == pytest.approx(2 / 32)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.019, 0.03, NonInferiority.SHOWN),
        (0.01, 0.03, NonInferiority.SHOWN),
        (-0.02, 0.03, NonInferiority.OPEN),
        (-0.05, -0.01, NonInferiority.OPEN),
        (-0.05, -0.021, NonInferiority.REFUTED),
    ],
)
def test_non_inferiority_needs_the_whole_interval(low: float, high: float, verdict: NonInferiority) -> None:
    assert non_inferiority(Estimate((low + high) / 2, low, high), 0.02) is verdict


def test_a_ratio_of_equal_factors_has_no_range() -> None:
    slow, fast = [Cluster(seconds, 1.0) for seconds in (2.0, 4.0, 6.0)], [Cluster(seconds, 1.0) for seconds in (1.0, 2.0, 3.0)]

    found = ratio(slow, fast)

    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_ratio_weighs_by_what_was_measured() -> None:
    # Twice the answers to a problem are not twice as slow.
    found = ratio([Cluster(4.0, 2.0), Cluster(2.0, 1.0)], [Cluster(1.0, 1.0), Cluster(1.0, 1.0)])

    assert found.value == pytest.approx(2.0)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        ratio_of_sums([])
    with pytest.raises(ValueError, match="1 problems over 2"):
        ratio([Cluster(1, 1)], [Cluster(1, 1)] * 2)
    with pytest.raises(ValueError, match="nothing to divide"):
        ratio([Cluster(1, 1)], [Cluster(0, 1)])
    with pytest.raises(ValueError, match="0 problems beside 0"):
        paired_difference([], [])


def test_percentiles_and_common_problems() -> None:
    assert percentiles(range(101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {}
    first, second = common({"a": Cluster(1, 1), "b": Cluster(2, 1), "c": Cluster(3, 1)}, {"c": Cluster(4, 1), "a": Cluster(5, 1)})
    assert (first, second) == ([Cluster(1, 1), Cluster(3, 1)], [Cluster(5, 1), Cluster(4, 1)])


def test_draws_are_seeded() -> None:
    clusters = [Cluster(number**0.5, 2) for number in range(20)]
    assert ratio_of_sums(clusters) == ratio_of_sums(clusters)
    assert ratio_of_sums(clusters, 1) != ratio_of_sums(clusters, 2)
    runs = [Cluster(float(number % 3), 2.0) for number in range(20)]
    assert paired_difference(runs, runs[::-1]) == paired_difference(runs, runs[::-1])
