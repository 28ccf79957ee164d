"""Paired speedups and the rates beside them."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lr_client import Usage
from rich.console import Console

from bench.kit.intervals import paired_speedup
from bench.kit.measure import ModeReport, Sample, num_decided, report
from bench.kit.turns import in_turns
from demo.problems import problems
from lr_backend.policy.formulas import ceiling

seconds = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20)


@given(seconds, st.floats(0.1, 10.0))
def test_a_constant_ratio_has_no_range(baseline_s: list[float], ratio: float) -> None:
    speedup, low, high = paired_speedup(baseline_s, [value / ratio for value in baseline_s])

    assert speedup == pytest.approx(ratio)
    assert low == pytest.approx(ratio)
    assert high == pytest.approx(ratio)


@given(seconds, st.randoms())
def test_the_range_holds_the_ratio_of_the_sums_for_spread_out_pairs(baseline_s: list[float], random: object) -> None:
    speedup, low, high = paired_speedup(baseline_s, list(reversed(baseline_s)))

    assert low <= speedup * 1.0001
    assert speedup <= high * 1.0001


def test_a_report_has_one_row_a_mode_with_pooled_rates() -> None:
    def usage(accepted: int, rejected: int, mean: float | None) -> Usage:
        return Usage(
            completion_tokens=10,
            num_steps_accepted=accepted,
            num_steps_rejected={"judge": rejected},
            mean_accepted_length=mean,
            num_draft_tokens=8,
            num_accepted_tokens=2,
            num_target_passes=5,
        )

    samples = [
        Sample("ar", 0, True, 2.0, Usage(completion_tokens=10)),
        Sample("lr", 0, True, 1.0, usage(3, 1, 3.0)),
        Sample("lr", 1, False, 1.0, usage(0, 2, 0.0)),
        Sample("ar", 1, True, 4.0, Usage(completion_tokens=10)),
    ]

    rows = report(samples, baseline="ar")

    assert list(rows) == ["ar", "lr"]
    assert rows["lr"].speedup == pytest.approx(3.0)
    assert (rows["lr"].correct, rows["lr"].total) == (1, 2)
    assert rows["lr"].step_acceptance_rate == pytest.approx(3 / 6)
    assert rows["lr"].token_acceptance_rate == pytest.approx(4 / 16)
    assert rows["lr"].mean_accepted_length == pytest.approx(1.0)
    assert rows["lr"].passes_per_token == pytest.approx(0.5)
    assert rows["ar"].step_acceptance_rate is None
    assert rows["ar"].tokens_per_s == pytest.approx(20 / 6)


def test_a_draft_that_failed_was_not_decided_on() -> None:
    usage = Usage(completion_tokens=10, num_steps_accepted=3, num_steps_late=1, num_steps_rejected={"judge": 2, "draft_error": 4})

    assert num_decided(usage) == 6
    rows = report([Sample("ar", 0, True, 2.0, Usage(completion_tokens=10)), Sample("lr", 0, True, 1.0, usage)], baseline="ar")
    assert rows["lr"].step_acceptance_rate == pytest.approx(3 / 6)


def test_ceilings_follow_the_acceptance_and_how_fast_draft_tokens_make_the_target() -> None:
    pytest.importorskip("torch")
    from demo.run import ceilings

    def row(speedup: float, alpha: float | None) -> ModeReport:
        return ModeReport(1, 1, 1.0, speedup, 1.0, 1.0, alpha, None, None, None, 1.0)

    rows = {"ar": row(1.0, None), "sd": row(1.2, None), "lr": row(1.1, 0.5), "lr_sd": row(1.3, 0.5)}
    assert ceilings(rows, 0.1, 4) == pytest.approx({"lr": ceiling(0.5, 0.1, 4), "lr_sd": 1.2 * ceiling(0.5, 0.12, 4)})
    assert ceilings(rows | {"sd": row(0.8, None)}, 0.1, 4)["lr_sd"] == pytest.approx(ceiling(0.5, 0.1, 4))
    assert ceilings(rows | {"lr": row(1.0, None)}, 0.1, 4).keys() == {"lr_sd"}


@pytest.mark.parametrize(("num_problems", "told"), [(5, "2.00"), (6, "2.00 (2.00 to 2.00)")])
def test_the_demo_gives_no_interval_of_a_few_problems(num_problems: int, told: str) -> None:
    pytest.importorskip("torch")
    from demo.run import figures, small_table, table

    took_s = {"ar": 2.0, "lr": 1.0}
    rows = report([Sample(mode, index, True, took_s[mode], Usage()) for mode in took_s for index in range(num_problems)], "ar")
    for view in (table(rows, ""), small_table(rows, "")):
        (column,) = (each for each in view.columns if each.header == "speedup (95 %)")
        assert list(column.cells)[1] == told
    bounds = [figures(rows)["lr"][name] for name in ("speedup_low", "speedup_high")]
    assert bounds == ([None, None] if "(" not in told else [2.0, 2.0])


def test_every_turn_asks_every_problem_once_and_none_soon_after_another() -> None:
    turns, questions = ["ar", "sd", "lr"], list(islice(problems(1, "test"), 12))
    asked = list(in_turns(turns, questions, "", Console(quiet=True)))

    assert sorted((index, turn) for index, _, turn in asked) == [(i, t) for i in range(12) for t in sorted(turns)]
    assert all(problem is questions[index] for index, problem, _ in asked)
    for index in range(12):
        places = [place for place, (other, _, _) in enumerate(asked) if other == index]
        assert min(later - sooner for sooner, later in pairwise(places)) >= 10
    firsts = [asked[number * len(turns)][2] for number in range(12)]
    assert {turn: firsts.count(turn) for turn in turns} == {"ar": 4, "sd": 4, "lr": 4}
