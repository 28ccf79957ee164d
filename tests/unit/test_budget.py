"""The split of a parallelism budget: the formulas, and what the paper's theorems say of the best one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.plan.budget import Rates, acceptance_from_length, best_split, splits, token_speedup
from lr_backend.policy.formulas import ceiling

rates = st.builds(Rates, st.floats(0.0, 0.95), st.floats(0.02, 1.0), st.floats(0.0, 0.95), st.floats(0.0, 1.0))


def test_one_position_is_decoding() -> None:
    assert token_speedup(0.7, 0.2, 1) == pytest.approx(1.0)


@pytest.mark.parametrize(("acceptance", "cost", "num_positions"), [(0.8, 0.1, 5), (0.5, 0.0, 3), (0.0, 0.3, 4)])
def test_the_token_formula_is_what_happens(acceptance: float, cost: float, num_positions: int) -> None:
    draw = random.Random(0)
    tokens, time = 0, 0.0
    for _ in range(20_000):
        accepted = next((k for k in range(num_positions - 1) if draw.random() >= acceptance), num_positions - 1)
        tokens, time = tokens + accepted + 1, time + 1.0 + cost * (num_positions - 1)
    assert token_speedup(acceptance, cost, num_positions) == pytest.approx(tokens / time, rel=0.02)


@given(st.integers(1, 40), rates)
def test_the_best_split_is_the_best_of_all_pairs_within_the_budget(budget: int, known: Rates) -> None:
    gains = [
        ceiling(known.step_acceptance, known.step_cost, k1) * token_speedup(known.token_acceptance, known.token_cost, k2)
        for k1 in range(1, budget + 1)
        for k2 in range(1, budget // k1 + 1)
    ]
    assert best_split(budget, known).speedup == pytest.approx(max(gains))
    assert all(split.num_steps * split.num_positions <= budget for split in splits(budget, known))


@given(
    st.integers(8, 20).map(lambda half: 2 * half),
    st.builds(Rates, st.floats(0.53, 0.79), st.floats(0.02, 0.33), st.floats(0.53, 0.79), st.floats(0.0, 0.19)),
)
def test_theorem_4_both_speculations_belong_to_the_best_split(budget: int, known: Rates) -> None:
    best = best_split(budget, known)
    assert best.num_steps >= 2
    assert best.num_positions >= 2


@given(st.integers(1, 64), rates)
def test_more_budget_never_gains_less(budget: int, known: Rates) -> None:
    assert best_split(budget + 1, known).speedup >= best_split(budget, known).speedup * (1 - 1e-12)


@given(st.floats(0.01, 0.98), st.integers(1, 32))
def test_the_acceptance_is_found_again_from_the_accepted_length(acceptance: float, num_drafts: int) -> None:
    mean = sum(acceptance**k for k in range(1, num_drafts + 1))
    assert acceptance_from_length(mean, num_drafts) == pytest.approx(acceptance, abs=1e-6)


@pytest.mark.parametrize(("acceptance", "cost", "num_positions"), [(1.0, 0.1, 2), (0.5, -0.1, 2), (0.5, 1.1, 2), (0.5, 0.1, 0)])
def test_rates_out_of_range_are_refused(acceptance: float, cost: float, num_positions: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        token_speedup(acceptance, cost, num_positions)
    with pytest.raises(ValueError, match="out of range"):
        best_split(0, Rates(0.5, 0.1, 0.5, 0.1))
    with pytest.raises(ValueError, match="out of range"):
        acceptance_from_length(3.0, 2)
