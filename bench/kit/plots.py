"""What the plots look like, and the maps of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

DPI = 110
LOW, HIGH = 0.5, 2.5
"""Ends of the map's colours; 1 is their middle."""
PANELS_A_ROW = 3
Cells = Sequence[Mapping[str, Any]]


def style() -> AbstractContextManager[None]:
    """What all plots look like."""
    return matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})


def save(figure: Figure, path: Path) -> None:
    """Write a figure; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def draw_maps(cells: Cells, sizes: str, path: Path) -> None:
    """A panel for each system and acceptance rate that there is: the fastest lookahead row over the target alone."""
    mine = [one for one in cells if one["sizes"] == sizes]
    kinds = sorted({(one["system"] != "h200_sxm", one["system"], one["alpha"]) for one in mine})
    num_rows = -(-len(kinds) // PANELS_A_ROW)
    figure = Figure(figsize=(1.4 + 3.1 * PANELS_A_ROW, 0.9 + 2.5 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, PANELS_A_ROW, squeeze=False).ravel()
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    for axes, (_, system, alpha) in zip(panels, kinds, strict=False):
        chosen = [one for one in mine if (one["system"], one["alpha"]) == (system, alpha)]
        _panel(axes, chosen, f"{system.partition('_')[0].upper()}, acceptance {alpha:g}", _fastest)
    figure.suptitle("Fastest lookahead row over the target alone, at the same load (below 1: it loses)")
    save(figure, path)


def draw_limits(cells: Cells, path: Path) -> None:
    """A panel for each size of engines: the gain of lookahead alone, and what holds it back most."""
    mine = [one for one in cells if one["limit"]]
    sizes = sorted({one["sizes"] for one in mine})
    figure = Figure(figsize=(1.2 + 4.6 * len(sizes), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, name in zip(panels, sizes, strict=True):
        _panel(axes, [one for one in mine if one["sizes"] == name], f"H200, {name}", _limited)
    figure.suptitle("lr at depth 8 over the target alone;\nwhat would add most to that if it were free to both")
    save(figure, path)


def _fastest(cell: Mapping[str, Any]) -> tuple[float, str]:
    times = cell["ms_a_token"]
    name = min((one for one in times if one.startswith("lr")), key=lambda one: times[one])
    gain = times["ar"] / times[name]
    return gain, f"{gain:.2f}"


def _limited(cell: Mapping[str, Any]) -> tuple[float, str]:
    gain = cell["ms_a_token"]["ar"] / cell["ms_a_token"]["lr"]
    name, share = cell["limit"]
    return gain, f"{gain:.2f}\n{name}\n+{share:.0%}"


def _panel(axes: Axes, cells: Cells, title: str, say: Any) -> None:
    loads, contexts = sorted({one["load"] for one in cells}), sorted({one["context"] for one in cells})
    values = np.full((len(contexts), len(loads)), np.nan)
    for one in cells:
        if one["ms_a_token"]:
            place = contexts.index(one["context"]), loads.index(one["load"])
            values[place], text = say(one)
            axes.text(place[1], place[0], text, ha="center", va="center", fontsize=8)
    axes.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, LOW, HIGH), aspect="auto", origin="lower")
    for row, column in zip(*np.nonzero(np.isnan(values)), strict=True):
        axes.text(column, row, "KV memory", ha="center", va="center", fontsize=7, color="#888888")
    axes.set_xticks(range(len(loads)), [f"{load}" for load in loads])
    axes.set_yticks(range(len(contexts)), [f"{context // 1000}k" for context in contexts])
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("context, tokens")
    axes.set_title(title, fontsize=9)
