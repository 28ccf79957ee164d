"""The picture of the dashboard, drawn from lines that are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tests.support.observed import DASHBOARD, panels
from tools.dashboard import STAT_COLOURS, Line, draw


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
