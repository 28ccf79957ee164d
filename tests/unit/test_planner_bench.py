"""The bench that holds the planner against what is measured: what it writes down of the two."""

from __future__ import annotations

import pytest

from bench.kit.measure import ModeReport
from bench.planner import FIXED, SHAPES, at_acceptance, lines_of, predicted, row_of
from lr_backend.plan import table
from lr_backend.plan.table import plan
from lr_backend.request import LookaheadRequest
from tests.support.scenarios import changed, fitted

KNOWN = fitted(acceptance_rate=0.7, draft_token_s=0.1, num_steps=12, step_tokens=8)
SCENARIO = KNOWN.scenario


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LEAST_STEPS", 36)


def measured(alpha: float | None, gain: float) -> ModeReport:
    return ModeReport(
        correct=1,
        total=1,
        tokens_per_s=1.0,
        speedup=gain,
        speedup_low=gain,
        speedup_high=gain,
        step_acceptance_rate=alpha,
        token_acceptance_rate=None,
        mean_accepted_length=1.0,
        passes_per_token=1.0,
        latency_s=1.0,
    )


def test_rows_ask_for_what_the_simulated_loop_does() -> None:
    for depth, width in SHAPES:
        request = LookaheadRequest.parse({"text_input": "?", **row_of(depth, width).fields})
        assert (request.max_depth, request.width) == (depth, width)
    simulated = LookaheadRequest.parse({"text_input": "?", "mode": "lr"})
    asked = LookaheadRequest.parse({"text_input": "?", **FIXED})
    assert asked.effective_verifier is simulated.effective_verifier


def test_predictions_are_the_planners() -> None:
    gains = predicted(SCENARIO)
    assert gains.keys() == {row_of(*shape).name for shape in SHAPES}
    assert gains[row_of(4, 1).name] == pytest.approx(plan(SCENARIO, (4,))[0].speedup)


def test_a_line_says_how_far_off_both_predictions_are() -> None:
    found = {row_of(*shape).name: measured(0.7, 2.0) for shape in SHAPES}
    lines = {(one["max_depth"], one["width"]): one for one in lines_of(SCENARIO, found)}
    four = lines[4, 1]
    # The same acceptance, so both predictions are the same.
    assert four["predicted"] == four["predicted_at_alpha"]
    assert four["off"] == pytest.approx(four["predicted"] / 2.0 - 1.0, abs=1e-4)
    # With two candidates 0.7 is that of the position; each has less.
    each = 1.0 - (1.0 - 0.7) ** 0.5
    two = changed(KNOWN, acceptance_rate=each).scenario
    assert lines[4, 2]["predicted_at_alpha"] == pytest.approx(plan(two, (4,), (2,))[0].speedup, abs=1e-4)


def test_what_further_candidates_are_worth_is_known_from_the_traces() -> None:
    """Of 0.4 that the first leaves, they take a quarter."""
    known = changed(KNOWN, sibling_acceptance_rate=0.25).scenario
    assert at_acceptance(known, 0.7, 2).workload.acceptance_rate == pytest.approx(0.6)
    assert at_acceptance(known, 0.7, 1).workload.acceptance_rate == pytest.approx(0.7)
    assert at_acceptance(known, 0.1, 2).workload.acceptance_rate == 0.0


def test_nothing_compared_counts_as_nothing_accepted() -> None:
    found = {row_of(*shape).name: measured(None, 1.0) for shape in SHAPES}
    assert {one["alpha"] for one in lines_of(SCENARIO, found)} == {0.0}
