"""The benchmarks run and say what they measured; what they make of figures is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bench.engine
import bench.profile
from bench.profile import Stopwatch
from bench.timing import Spread, in_turns, ratio
from tests.support.torch_engines import tiny_checkpoint


def run(main: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(main)  # type: ignore[type-var]
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1280, tie_word_embeddings=True)


def test_the_engine_benchmark_ends_with_its_figures(checkpoint: Path) -> None:
    output = run(bench.engine.main, str(checkpoint), "--rounds", "1", "--prefix", "20")

    figures = json.loads(output.strip().splitlines()[-1])
    assert {"decode_vs_transformers", "batch8_scaling", "verify8_cost", "prefix_reused_share", "device"} <= figures.keys()
    assert figures["prefix_reused_share"] >= 0.95
    assert all(figures[name] > 0 for name in figures["ranges"])


def test_the_profile_adds_up_the_parts_of_an_iteration(checkpoint: Path) -> None:
    output = run(bench.profile.main, str(checkpoint), "--prefix", "20", "--batch", "2", "--weight-dtype", "same")

    columns = json.loads(output.strip().splitlines()[-1])["us_an_iteration"]
    assert set(columns) == {f"2, {name}" for name in bench.profile.SAMPLINGS}
    for parts in columns.values():
        assert set(parts) == {name for name, _, _ in bench.profile.PARTS}
        assert all(microseconds > 0 for microseconds in parts.values())


def test_a_stopwatch_counts_exclusive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(bench.profile.time, "perf_counter", lambda: now)
    watch = Stopwatch()
    inner = watch.wrap("inner", lambda: spend(3.0))

    def outer() -> None:
        spend(1.0)
        inner()
        spend(0.5)
        inner()

    watch.wrap("outer", outer)()
    assert watch.seconds == {"outer": 1.5, "inner": 6.0}


def test_turns_rotate_and_the_first_round_is_not_kept() -> None:
    calls: list[str] = []

    def action(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = in_turns({name: (lambda name=name: action(name)) for name in "abc"}, 3)  # type: ignore[misc]

    assert calls == [*"abc", *"abc", *"bca", *"cab"]
    assert figures == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 6.0, 9.0], [1.0, 2.0, 4.5], 2.0) == Spread(median=4.0, low=4.0, high=6.0)
    assert Spread(1.0, 0.5, 2.0).text(1) == "1.0 (0.5 to 2.0)"
