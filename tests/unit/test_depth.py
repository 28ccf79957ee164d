"""The paper's speedup formulas against a simulation of what they describe, and against its own figures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.policy.formulas import ceiling, speedup, useful_depth


def simulated(alpha: float, c: float, k: int, num_runs: int = 20_000) -> float:
    """Runs of accepted steps up to a correction, in windows of k: a window lasts one target step, and the last one the drafts
    above its last step besides."""
    rng = random.Random(1)
    steps = seconds = 0.0
    for _ in range(num_runs):
        accepted = 0
        while rng.random() < alpha:
            accepted += 1
        steps += accepted + 1
        full, rest = divmod(accepted + 1, k)
        seconds += full + (rest > 0) + c * ((rest or k) - 1)
    return steps / seconds


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7])
@pytest.mark.parametrize(("c", "k"), [(0.05, 2), (0.05, 4), (0.1, 3), (0.2, 4)])
def test_a_limited_window_is_as_fast_as_its_simulation(alpha: float, c: float, k: int) -> None:
    assert ceiling(alpha, c, k) == pytest.approx(simulated(alpha, c, k), rel=0.02)


@pytest.mark.parametrize(("alpha", "c", "expected"), [(0.4, 0.1, 1.54), (0.5, 0.1, 1.75), (0.63, 0.3, 1.79)])
def test_reference_values_at_depth_4(alpha: float, c: float, expected: float) -> None:
    assert ceiling(alpha, c, 4) == pytest.approx(expected, abs=0.01)


@given(alpha=st.floats(0.01, 0.95), c=st.floats(0.01, 0.99))
def test_depth_helps_up_to_the_useful_one_and_then_not(alpha: float, c: float) -> None:
    most = useful_depth(c)
    gains = [ceiling(alpha, c, k) for k in range(1, most + 3)]
    assert gains[0] == pytest.approx(1.0) or most == 1
    assert gains[most - 1 :] == [gains[most - 1]] * (len(gains) - most + 1)
    assert gains[-1] <= 1.0 / (1.0 - alpha) + 1e-9


@given(alpha=st.floats(0.01, 0.95), c=st.floats(0.01, 0.99), k=st.integers(1, 12), factor=st.floats(1.0, 5.0))
def test_draft_tokens_multiply_but_drafted_steps_come_later_beside_them(alpha: float, c: float, k: int, factor: float) -> None:
    both = ceiling(alpha, c, k, by_tokens=factor)
    assert both == pytest.approx(factor * ceiling(alpha, min(1.0, factor * c), k))
    assert both <= factor * ceiling(alpha, c, k) + 1e-9


@pytest.mark.parametrize("arguments", [(1.0, 0.1, 4), (-0.1, 0.1, 4), (0.5, 0.0, 4), (0.5, 1.1, 4), (0.5, 0.1, 0)])
def test_what_means_nothing_is_refused(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        ceiling(*arguments)


@given(alpha=st.floats(0.0, 0.95), c=st.floats(0.01, 0.99), k=st.integers(1, 12), v=st.floats(0.0, 1.0))
def test_verdicts_only_cost(alpha: float, c: float, k: int, v: float) -> None:
    real = speedup(alpha, c, k, verdict_cost=v)
    assert real <= ceiling(alpha, c, k) + 1e-9
    assert real >= speedup(alpha, c, k, verdict_cost=v + 0.1)


def test_a_verdict_that_takes_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        speedup(0.5, 0.1, 4, verdict_cost=-0.1)


def test_every_move_of_the_root_waits_for_a_verdict() -> None:
    """Two steps deep, drafts half as fast as the target, verdicts as long as a step: by the real loop it is .865."""
    assert speedup(0.8, 0.5, 2, verdict_cost=1.0) == pytest.approx(0.865, abs=0.005)


@given(st.floats(0.0, 0.98), st.floats(0.01, 1.0), st.integers(1, 16), st.floats(0.0, 3.0))
def test_with_verdicts_steps_are_longer_and_drafts_cheaper(alpha: float, c: float, k: int, v: float) -> None:
    assert speedup(alpha, c, k, verdict_cost=v) == pytest.approx(ceiling(alpha, c / (1.0 + v), k) / (1.0 + v))
