"""How many token drafts bring most: a pure rule over what was accepted of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.propose.draft_length import PRIOR_ACCEPTANCE, DraftCosts, DraftLength, best_length, expected_tokens

COSTS = DraftCosts(verification=1.3, verified_token=0.02, drafted_token=0.1)
acceptances = st.floats(0.0, 1.0)
lengths = st.integers(1, 64)


def test_a_verification_brings_the_accepted_run_and_one_token_more() -> None:
    assert expected_tokens(0.0, 8) == 1.0
    assert expected_tokens(1.0, 8) == 9.0
    assert expected_tokens(0.5, 2) == pytest.approx(1.0 + 0.5 + 0.25)


@given(acceptances, lengths)
def test_the_formula_is_the_mean_over_all_runs(acceptance: float, number: int) -> None:
    runs = [(1 - acceptance) * acceptance**run * (run + 1) for run in range(number)]
    assert expected_tokens(acceptance, number) == pytest.approx(sum(runs) + acceptance**number * (number + 1))


@given(acceptances, acceptances, lengths)
def test_more_acceptance_never_means_fewer_drafts(one: float, other: float, most: int) -> None:
    low, high = sorted((one, other))
    assert 1 <= best_length(low, COSTS, most) <= best_length(high, COSTS, most) <= most


@given(acceptances, lengths, st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_dearer_drafts_never_mean_more_of_them(acceptance: float, most: int, one: float, other: float) -> None:
    cheap, dear = (DraftCosts(1.3, 0.02, cost) for cost in sorted((one, other)))
    assert best_length(acceptance, dear, most) <= best_length(acceptance, cheap, most)


@given(acceptances, lengths)
def test_drafts_that_cost_nothing_are_asked_for_as_far_as_they_can_be_accepted(acceptance: float, most: int) -> None:
    free = DraftCosts(1.3)
    chosen = best_length(acceptance, free, most)
    assert expected_tokens(acceptance, chosen) == pytest.approx(expected_tokens(acceptance, most))


def test_without_room_nothing_is_asked_for() -> None:
    assert best_length(0.9, COSTS, 0) == 0


def test_the_length_follows_what_was_accepted_and_comes_back() -> None:
    length = DraftLength(COSTS)
    assert length.acceptance == PRIOR_ACCEPTANCE
    begun = length.next(64)
    for _ in range(30):
        length.observed(0, ended=True)
    assert length.next(64) == 1
    for _ in range(60):
        length.observed(length.next(64), ended=False)
    assert length.next(64) > begun
    assert length.next(3) == 3


@given(st.lists(st.tuples(st.integers(0, 64), st.booleans()), max_size=50))
def test_the_running_acceptance_is_a_probability(seen: list[tuple[int, bool]]) -> None:
    length = DraftLength(COSTS)
    for num_accepted, ended in seen:
        length.observed(num_accepted, ended)
    assert 0.0 < length.acceptance <= 1.0
    assert 1 <= length.next(16) <= 16
