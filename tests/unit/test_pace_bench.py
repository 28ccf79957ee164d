"""What the bench at production pace says of answers that the virtual clock has given itself: then everything must agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from lr_client import Usage

from bench import pace
from bench.kit import pace as kit_pace
from bench.kit.measure import LEARNS_FROM, Sample
from bench.kit.pace import ROWS, SYSTEM, Paced
from bench.kit.serving import demo_spec
from lr_backend.build.paced import paced
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.hardware.lateness import Lateness
from lr_backend.plan.simulation import Policy, Prediction, Scenario, simulate
from lr_backend.request import Mode
from lr_backend.trace.schema import Trace

TEXTS = Workload(0.7, token_agreement=0.8, word_agreement=0.5, prompt_tokens=150, step_tokens=25, num_steps=12)
ASKED = {name: fields for name, fields in ROWS.items() if name != "auto"}
NUM_ANSWERS = 6
NUM_STEPS = NUM_ANSWERS * TEXTS.num_steps
"""Predictions are made of the very texts that were answered, so that chance is the same on both sides: steps are all of one
length, since a spread that is fitted would move them."""


@pytest.fixture(scope="module")
def found() -> Paced:
    """Answers by the kernel tables; ``lr_sd`` is put down as twice as slow as it was."""
    spec = paced(demo_spec(), SYSTEM)
    empty = Paced(spec, ASKED, [], {}, Lateness(100.0, 0.5))
    scenario = Scenario(TEXTS, empty.machine())
    samples: list[Sample] = []
    traces: dict[str, list[Trace]] = {name: [] for name in ASKED}
    for row in ASKED:
        for number in range(NUM_ANSWERS):
            answer = simulate(scenario, empty.policy(row), number, trace=True)
            (usage,) = answer.usages
            slower = 2.0 if row == "lr_sd" else 1.0
            samples.append(
                Sample(row, number, number != 3, slower * answer.latency_s, Usage(completion_tokens=usage.completion_tokens))
            )
            traces[row] += answer.traces
    return Paced(spec, ASKED, samples, traces, Lateness(100.0, 0.5))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def lines(found: Paced, monkeypatch_module: pytest.MonkeyPatch) -> dict[str, pace.Agreement]:
    monkeypatch_module.setattr(pace.ms_a_token, "__defaults__", (NUM_STEPS,))
    monkeypatch_module.setattr(pace, "NUM_STEPS_AT_A_BOUND", TEXTS.num_steps)
    return {line.row: line for line in pace.agreements(found)}


@pytest.mark.parametrize("row", ["ar", "sd", "lr"])
def test_a_row_that_went_as_predicted_is_within_its_limit(lines: dict[str, pace.Agreement], row: str) -> None:
    line = lines[row]
    assert line.within, line
    assert line.planned == pytest.approx(line.measured, rel=line.limit)
    assert line.here == pytest.approx(line.planned, rel=0.01)
    assert line.fitted == pytest.approx(line.measured, rel=line.limit)
    assert min(line.low, line.high) <= 1.1 * lines["ar"].measured / line.measured
    assert max(line.low, line.high) >= 0.9 * lines["ar"].measured / line.measured


def test_a_row_that_took_longer_than_predicted_is_not(lines: dict[str, pace.Agreement]) -> None:
    assert not lines["lr_sd"].within
    assert all(off < -0.3 for off in lines["lr_sd"].off)


def test_limits_are_those_of_the_modes(lines: dict[str, pace.Agreement]) -> None:
    assert {row: line.limit for row, line in lines.items()} == {"ar": 0.05, "sd": 0.08, "lr": 0.05, "lr_sd": 0.08}


def test_calls_are_on_their_way_for_as_long_as_the_machine_says(found: Paced) -> None:
    hops = {one.role: one for one in pace.hops(found)}
    assert set(hops) == set(Role)
    for one in hops.values():
        assert one.p50_ms == pytest.approx(one.constant_ms, rel=0.05)
        assert one.p99_ms >= one.p50_ms


def test_a_row_that_has_stopped_looking_ahead_is_predicted_over_texts_of_the_others(found: Paced) -> None:
    stopped = replace(found, traces={**found.traces, "lr_sd": found.traces["sd"]})
    workload = stopped.scenario("lr_sd", found.machine()).workload
    assert workload.acceptance_rate == found.scenario("lr", found.machine()).workload.acceptance_rate
    assert workload.token_agreement > 0.0


def test_a_mode_that_chooses_is_predicted_of_a_server_that_has_learned(found: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_pace, "LEARNS_FROM", 6)
    monkeypatch.setattr(kit_pace, "LEAST_STEPS", 6 * TEXTS.num_steps)
    chosen = replace(found, asked=ROWS, traces={**found.traces, "auto": found.traces["lr"]})
    assert chosen.policy("auto").mode is Mode.AUTO
    assert 1.3 < chosen.gain("auto", found.machine()) < 3.0


def test_what_chooses_is_predicted_of_one_server_that_is_asked_everything(found: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def seen(scenario: Scenario, policy: Policy, seed: int = 0, *, num_sets: int = 1) -> Prediction:
        asked.append((seed, num_sets))
        return simulate(scenario, policy, seed, num_sets=num_sets)

    monkeypatch.setattr(pace, "simulate", seen)
    scenario = found.scenario("lr", found.machine())
    for mode in (Mode.AUTO, Mode.LR):
        pace.ms_a_token(scenario, Policy(mode), 3 * scenario.workload.num_steps)
    assert asked == [(0, LEARNS_FROM + 3), (0, 1), (1, 1), (2, 1)]


def test_longer_hops_than_planned_go_into_the_prediction(found: Paced) -> None:
    measured = [replace(one, mean_ms=one.constant_ms + 2.0) for one in pace.hops(found)]
    planned = pace.with_hops(found.machine(), measured).places
    for one in measured:
        hops = planned[one.role].hops
        assert 1e3 * (hops.there_s + hops.back_s) == pytest.approx(one.constant_ms + 2.0)


def test_the_document_says_whose_pace_it_is_and_how_late(found: Paced, lines: dict[str, pace.Agreement]) -> None:
    document = pace.document(found, list(lines.values()), "lr")
    assert document["profile"] == "Qwen3-32B TP 2 bfloat16 on h200_sxm, compiled"
    assert "not a run on h200_sxm" in document["label"]
    assert (document["late_share"], document["void"]) == (0.005, False)
    assert document["modes"].keys() == ASKED.keys()
    of_rows = {"ar": Lateness(50.0, 0.1), "lr": Lateness(50.0, 0.6)}
    modes = pace.document(replace(found, late_rows=of_rows), list(lines.values()), "lr")["modes"]
    assert [(modes[row]["late_share"], modes[row]["void"]) for row in ("ar", "lr", "sd")] == [
        (0.002, False),
        (0.012, True),
        (0.0, True),  # nothing is known
    ]
    # Hops are part of what is measured and no part of what only engines take.
    assert 0.9 <= document["realised_share"] < 1.05
    assert [line["within"] for line in document["agreement"]] == [True, True, True, False]
