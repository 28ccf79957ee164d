"""The benches that need a server, each once through a real Triton, as small as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bench.evaluation.quality
import bench.peers
from bench.__main__ import app

pytestmark = pytest.mark.integration


def test_systems_run_from_random_weights_to_the_json_line(tmp_path: Path) -> None:
    sizes = ["--target", "3m", "--draft", "tiny", "--judge", "tiny"]  # with a slower target no draft is late by chance
    few = ["--questions", "2", "--steps", "4", "--alpha", "0", "--alpha", "1", "--depth", "2"]

    result = CliRunner().invoke(app, ["systems", *sizes, *few, "--output", str(tmp_path / "systems.json")])

    assert result.exit_code == 0, result.output
    line = json.loads(result.output.strip().splitlines()[-1])
    assert line == json.loads((tmp_path / "systems.json").read_text())
    none, every = line["rows"]
    assert (none["alpha"], none["measured_alpha"]) == (0.0, 0.0)
    assert every["alpha"] == 1.0 and every["measured_alpha"] > 0.0
    assert {row["step_tokens"] for row in line["rows"]} == {24.0}
    assert all(0 < row["low"] <= row["speedup"] <= row["high"] for row in line["rows"])


def test_peers_answer_the_same_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.peers, "MAX_TOKENS", 32)
    runnable = typer.Typer()
    runnable.command()(bench.peers.main)

    result = CliRunner().invoke(runnable, ["--problems", "1", "--output", str(tmp_path / "peers.json")])

    assert result.exit_code == 0, result.output
    line = json.loads(result.output.strip().splitlines()[-1])
    rows = {row["name"]: row for row in line["rows"]}
    expected = {"ar", "sd", "lr", "lr_sd", "auto", bench.peers.DIRECT, bench.peers.SYNCHRONOUS}
    assert rows.keys() == expected | {bench.peers.GENERATE, bench.peers.ASSISTED, bench.peers.LOOKUP}
    assert all(row["tokens_per_s"] > 0 and row["total"] == 1 for row in rows.values())
    assert rows["ar"]["speedup"] == [1.0, 1.0, 1.0]


def test_an_evaluation_serves_its_own_spec_and_tells_how_late_it_was(tmp_path: Path) -> None:
    few = ["--problems", "2", "--mode", "lr", "--max-tokens", "64", "--concurrency", "2", "--pace", "h200_sxm"]
    runnable = typer.Typer()
    runnable.command()(bench.evaluation.quality.main)

    result = CliRunner().invoke(runnable, [*few, "--out", str(tmp_path / "run"), "--output", str(tmp_path / "quality.json")])

    assert result.exit_code == 0, result.output
    line = json.loads(result.output.strip().splitlines()[-1])
    assert line["num_problems"] == 2
    assert json.loads((tmp_path / "run" / "hardware.json").read_text())["cost_ratio"] > 0.0
    (lateness,) = map(json.loads, (tmp_path / "run" / "lateness.jsonl").read_text().splitlines())
    assert line["late_share"] == pytest.approx(lateness["late_s"] / lateness["paced_s"], abs=1e-4)
