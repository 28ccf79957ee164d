"""The benches' plots, drawn from the figures that the docs hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench.kit.plots import Ratio, draw_ratios, draw_realised

FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks"
PNG = b"\x89PNG"


def test_peers_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    rows = json.loads((FIGURES / "peers.json").read_text(encoding="utf-8"))["rows"]
    path = tmp_path / "out" / "peers.png"

    draw_ratios([Ratio(row["name"], *row["tokens_per_s_ratio"]) for row in rows], "peers", "ar", path)

    assert path.read_bytes().startswith(PNG)
    assert {row["name"] for row in rows} >= {"ar", "sd", "lr", "lr_sd"}


def test_what_was_realised_is_drawn_by_depth_and_acceptance(tmp_path: Path) -> None:
    rows = json.loads((FIGURES / "systems.json").read_text(encoding="utf-8"))["rows"]
    path = tmp_path / "systems.png"

    draw_realised(rows, "systems", path)

    assert path.read_bytes().startswith(PNG)
    assert all(row["low"] <= row["speedup"] <= row["high"] <= row["ceiling"] * 1.5 for row in rows)
