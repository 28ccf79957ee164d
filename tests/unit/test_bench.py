"""The benchmarks run and say what they measured; what they make of figures is exact."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import typer
from lr_client import Options
from typer.testing import CliRunner

import bench.engine
import bench.faults
import bench.maps
import bench.overhead
import bench.verifiers
from bench.faults import is_lost, until
from bench.kit.crowd import CANCELLED, Crowd, Ended
from bench.kit.models import CHECKPOINTS, Model
from bench.kit.stand import Stand, standing
from bench.kit.turns import Spread, ratio, timed_rounds
from bench.overhead import Overhead
from bench.pace_peers import Peer
from bench.verifiers import Case, VerifierFigures
from bench.wording import Writing, answers, figures, rights
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.build.placements import Where
from lr_backend.plan.equal_gpus import Used
from lr_backend.steps.step import Step, StepEnd
from lr_backend.verify import Reason, StepPair, Verdict
from tests.support.embedded_engines import tiny_checkpoint


def run(main: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(main)  # type: ignore[type-var]
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1280, tie_word_embeddings=True)


def test_the_engine_benchmark_ends_with_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"another run": {"decode_vs_transformers": 2.0}}')
    output = run(bench.engine.main, str(checkpoint), "--rounds", "1", "--prefix", "20", "--output", str(path))

    figures = json.loads(output.strip().splitlines()[-1])
    assert {"decode_vs_transformers", "batch8_scaling", "verify8_cost", "prefix_reused_share", "device"} <= figures.keys()
    assert figures["prefix_reused_share"] >= 0.95
    assert all(isfinite(figures[name]) for name in figures["ranges"])  # a difference of two times may be below 0
    kept = json.loads(path.read_text())
    assert kept == {"another run": {"decode_vs_transformers": 2.0}, "python -m bench engine": figures}


def test_overhead_is_what_neither_target_nor_judge_accounts_for() -> None:
    large = Overhead(wall_s=10.0, target_s=8.0, judge_s=1.5, num_tokens=100, num_steps=5, num_calls=10)
    busy = Overhead(wall_s=1.0, target_s=0.9, judge_s=0.2, num_tokens=100, num_steps=5, num_calls=10)

    assert (large.seconds, large.share, large.ms_a_call) == pytest.approx((0.5, 0.05, 50.0))
    assert busy.share == 0.0
    line = bench.overhead.summary({"100 M random": large, "demo": busy})
    assert (line["overhead_share"], line["demo_calls_a_step"]) == (0.05, 2.0)


def test_turns_rotate_and_the_first_round_is_not_kept() -> None:
    calls: list[str] = []

    def action(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = timed_rounds({name: (lambda name=name: action(name)) for name in "abc"}, 3)  # type: ignore[misc]

    assert calls == [*"abc", *"abc", *"bca", *"cab"]
    assert figures == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 6.0, 9.0], [1.0, 2.0, 4.5], 2.0) == Spread(median=4.0, low=4.0, high=6.0)
    assert Spread(1.0, 0.5, 2.0).text(1) == "1.0 (0.5 to 2.0)"


def test_a_verifiers_figures_count_what_it_accepts_and_what_it_should_not_have() -> None:
    step = Step((1,), StepEnd.DELIMITER)
    pair = StepPair(step, step, "", "", "id", np.asarray([1], dtype=np.int32))
    cases = [Case(pair, same, problem) for problem, same in enumerate((True, True, False, False))]
    verdicts = [Verdict(accepted, Reason.JUDGE, verifier="judge") for accepted in (True, False, True, False)]

    figures = VerifierFigures.of(cases, verdicts, [0.001, 0.002, 0.004, 0.002])

    assert (figures.accepted.value, figures.agreed.value, figures.wrong.value) == (0.5, 0.5, 0.5)
    assert figures.wrong.total == 2
    assert figures.ms_a_verdict == pytest.approx(2.0)
    assert figures.by == {"judge": 4}


def test_pairs_of_one_problem_are_cases_of_one_problem() -> None:
    target = cast(Model, SimpleNamespace(encode=lambda text: [1]))
    for made in (bench.verifiers.checker_cases, bench.verifiers.second_cases):
        cases = made(target, 60, 1)
        figures = VerifierFigures.of(cases, [Verdict(True, Reason.JUDGE)] * 60, [])
        assert cases[-1].problem < 20 and figures.accepted.worth == cases[-1].problem + 1


def test_the_comparison_of_verifiers_runs_on_the_demo_models(tmp_path: Path) -> None:
    path = tmp_path / "verifiers.json"
    output = run(bench.verifiers.main, "--problems", "1", "--pairs", "4", "--threads", "1", "--output", str(path))

    figures = json.loads(output.strip().splitlines()[-1])
    assert figures == json.loads(path.read_text())
    assert set(figures) == {"drafted", "changed", "second domain"}
    rows = figures["changed"]
    assert {"chance 0.5", "exact", "numeric veto alone", "judge", "grade 9", "cascade"} <= rows.keys()
    assert all(row["num_pairs"] == 4 for row in rows.values())
    assert rows["exact"]["accept_rate"] == 0.0
    assert rows["exact"]["false_accept_rate"] is None


@pytest.mark.parametrize(
    ("kind", "before_s", "lost"),
    [
        ("served", 3.0, False),
        ("Overloaded", 3.0, False),
        ("ServerUnreachable", 0.1, False),
        ("ServerUnreachable", 3.0, True),
        ("TargetUnavailable", 0.1, True),
    ],
)
def test_an_answer_whose_server_went_away_is_lost_and_a_call_that_came_too_late_is_not(
    kind: str, before_s: float, lost: bool
) -> None:
    ended = Ended(10.0 - before_s, 11.0, kind)
    assert is_lost(ended, 10.0) is lost
    assert not is_lost(ended, 12.0), "it was over"


def test_a_stand_that_does_not_start_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped: list[Stand] = []

    def never(self: Stand) -> None:
        raise RuntimeError("not served")

    monkeypatch.setattr(Stand, "start", never)
    monkeypatch.setattr(Stand, "stop", lambda self: stopped.append(self))
    with pytest.raises(RuntimeError, match="not served"), standing(Layout.ONE_PROCESS, tmp_path):
        raise AssertionError("there is nothing to ask")
    assert [stand.folder for stand in stopped] == [tmp_path]


@pytest.fixture
def crowds_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What runs in the place of a crowd's process."""
    program = tmp_path / "program"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def test_a_crowd_whose_process_fails_is_no_crowd_without_answers(crowds_process: Path) -> None:
    crowds_process.write_text("#!/bin/sh\necho '[]'\nexit 3\n")
    with pytest.raises(RuntimeError, match="2 clients of nowhere ended with status 3"):
        asyncio.run(Crowd("nowhere", 2, 1.0).ended())


def test_a_crowd_s_process_ends_with_the_wait_for_it(crowds_process: Path) -> None:
    noted = crowds_process.with_name("pid")
    crowds_process.write_text(f"#!/bin/sh\necho $$ > {noted}.new\nmv {noted}.new {noted}\nexec sleep 60\n")

    async def cancelled() -> None:
        task = asyncio.create_task(Crowd("nowhere", 2, 1.0).ended())
        assert await until(noted.exists)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


@pytest.mark.parametrize("too_late", [False, True])
def test_half_of_the_requests_are_cancelled_while_they_are_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, too_late: bool
) -> None:
    """The half with odd seeds; too late comes a cancel of what was answered at once."""
    num_quiet = 0

    async def ask(client: object, options: Options) -> Ended:
        nonlocal num_quiet
        num_quiet += 1
        if num_quiet > 8 and options.seed is not None and options.seed % 2 and not too_late:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return Ended(0.0, 0.01, CANCELLED)
        return Ended(0.0, 0.01, "served", text=str(options.seed))

    monkeypatch.setattr(bench.faults, "ask", ask)
    row = asyncio.run(bench.faults.cancelled(Stand(Layout.ONE_PROCESS, tmp_path, grpc_port=9), 24))

    assert (row.requests, row.typed_errors, row.untyped_errors) == (24, 0, 0)
    assert (row.served, row.cancelled) == ((24, 0) if too_late else (12, 12))
    assert row.missed == (("ended before their cancel: 12",) if too_late else ())


def test_an_answer_goes_on_from_a_drafted_step_only_where_it_means_what_the_targets_own_does() -> None:
    models = [Model.load(CHECKPOINTS / role, threads=1) for role in ("target", "draft")]
    tasks = list(islice(problems(2, "test"), 3))
    alone = answers(*models, tasks, None, 0)
    drafted = answers(*models, tasks, 0.0, 0)
    assert [one.num_drafted for one in alone] == [0] * len(tasks)
    assert sum(one.num_accepted for one in drafted) > 0
    for one in (*alone, *drafted):
        assert one.num_accepted <= one.num_drafted
        assert not one.is_reasoning
        assert models[0].decode(one.written).endswith("<|im_end|>")
    assert [one.written for one in answers(*models, tasks, None, 0)] == [one.written for one in alone]
    each = rights(models[0], [drafted])
    alone_figures = figures([drafted], each)
    assert (alone_figures["answers"], alone_figures["difference_points"]) == (len(tasks), None)


def test_a_contender_gains_over_the_same_texts() -> None:
    """The texts differ by a factor of ten, and the gain by none: then there is no range."""
    alone = Peer("ar", "", ((200.0, 10), (20_000.0, 100)))
    twice, other = Peer("lr", "", ((100.0, 10), (10_000.0, 100))), Peer("sd", "", ((50.0, 10), (20_000.0, 100)))

    assert alone.ms_a_token == pytest.approx(20_200 / 110)
    assert twice.gain(alone) == pytest.approx((2.0, 2.0, 2.0))
    assert other.gain(alone) == pytest.approx((20_200 / 20_050, 1.0, 4.0))


def test_equal_gpus_are_told_of_uses_that_there_are_at_every_load() -> None:
    def used(name: str, mode: str, ms_a_token: float) -> Used:
        return Used(name, "LLM API", mode, 1, 1, ms_a_token, 1.0, 1.0)

    shared = f"TP 1, {Where.TARGETS_CARDS}"
    turns = f"{shared}, taking turns"
    rows = [used("TP 1", "ar", 20.0), used("TP 1", "sd", 9.0), used(shared, "lr_sd", 9.5), used(shared, "auto", 10.0)]
    rows += [used(turns, "lr", 8.0), used(turns, "lr_sd", 8.0), used(turns, "auto", 7.0)]

    (told,) = bench.maps.summary([], {(1, 1): rows})["equal_gpus"].values()

    assert (told["auto_over_ar"], told["lr_sd_over_sd"]) == (2.0, round(9.0 / 9.5, 3))
    assert told["auto_share_of_best_min"] == 0.9, "`sd` has the target's cards too, and is faster than `lr_sd`"


def test_a_row_s_loss_is_paired_by_problem() -> None:
    """Nine problems out of ten are right in both rows, and the others are not the same: intervals of one row cannot tell."""
    written = [[Writing(task, []) for task in islice(problems(2, "test"), 40)]] * 2
    first = [[number % 10 != 0 for number in range(40)]] * 2
    fewer = [[right and number != 1 for number, right in enumerate(row)] for row in first]

    same, lost = (figures(written, each, first)["difference_points"] for each in (first, fewer))

    assert same[0] == 0.0 and same[1] < 0.0 < same[2]
    assert lost[0] == -2.5 and lost[1] < -2.5 < lost[2]
    apart = figures(written, fewer, first)["right"]
    assert lost[2] - lost[1] < 100.0 * (apart[2] - apart[1])
