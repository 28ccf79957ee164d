"""The benches' plots, drawn from the figures that the docs hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from bench.kit.plots import Ratio, draw_ratios, draw_realised
from tests.support.observed import DASHBOARD, panels
from tools.dashboard import STAT_COLOURS, Line, draw

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


def test_a_dashboard_is_drawn_panel_by_panel() -> None:
    seconds = np.arange(0.0, 60.0)
    lines = {panel["title"]: [Line(panel["title"].upper(), seconds, np.full(60, 0.4))] for panel in panels()}
    lines["Queue"] = []

    figure = draw(json.loads(DASHBOARD.read_text(encoding="utf-8")), lines, 60.0, [30.0], "about")

    drawn = {axes.get_title("left").partition(" (")[0]: axes for axes in figure.axes}
    assert drawn.keys() == lines.keys()
    told = {title: [text.get_text() for text in axes.texts] for title, axes in drawn.items()}
    assert told["Step acceptance"] == ["40.0 %"] and drawn["Step acceptance"].texts[0].get_color() == STAT_COLOURS["orange"]
    assert told["Queue"] == ["no data"] and told["Calls"] == []
    for panel in panels():
        if panel["type"] == "timeseries" and (legend := drawn[panel["title"]].get_legend()) is not None:
            assert [text.get_text() for text in legend.get_texts()] == [panel["title"].upper()]
            assert list(drawn[panel["title"]].lines[-1].get_xdata()) == [30.0, 30.0], "the mark"
    assert drawn["Acceptance"].get_ylim() == (0.0, 100.0) and max(drawn["Acceptance"].lines[0].get_ydata()) == 40.0
