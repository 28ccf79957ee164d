"""Plots of the tables: ratios with their intervals, what was realised of what formulas allow, and the map of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

MEASURED, HARDWARE, FORMULA, BASELINE = "#d95f02", "#1f77b4", "#888888", "#444444"
DPI = 110
LOW, HIGH = 0.5, 2.5
"""Ends of the map's colours; 1 is their middle."""
PANELS_A_ROW = 3
Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio to the baseline, with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float


def draw_ratios(ratios: Sequence[Ratio], title: str, baseline: str, path: Path) -> None:
    """A bar for each ratio, first on top; a line where the baseline is."""
    with style():
        figure = Figure(figsize=(9, 1.2 + 0.42 * len(ratios)), layout="constrained")
        axes = figure.subplots()
        places = range(len(ratios), 0, -1)
        errors = [[one.value - one.low for one in ratios], [one.high - one.value for one in ratios]]
        colours = [BASELINE if one.name == baseline else MEASURED for one in ratios]
        axes.barh(places, [one.value for one in ratios], xerr=errors, color=colours, height=0.62, capsize=3)
        axes.axvline(1.0, color=BASELINE, linewidth=1)
        axes.set_yticks(list(places), [one.name for one in ratios])
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0.0)
        axes.set_xlabel(f"tokens a second over {baseline} (95 %)")
        axes.set_title(title, fontsize=10)
        save(figure, path)


def draw_realised(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Speedup by depth, a panel for each scripted acceptance, beside the hardware's ceiling and the formulas'.

    ``rows``: with ``alpha``, ``max_depth``, ``speedup``, ``low``, ``high``, ``hardware_ceiling`` and ``ceiling``.
    """
    alphas = sorted({row["alpha"] for row in rows})
    with style():
        figure = Figure(figsize=(1.5 + 3.6 * len(alphas), 3.8), layout="constrained")
        panels = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
        for axes, alpha in zip(panels, alphas, strict=True):
            _realised(axes, [row for row in rows if row["alpha"] == alpha], alpha)
        panels[0].set_ylabel("speedup over ar")
        panels[0].set_ylim(0.0, 1.06 * max(max(row["high"], row["ceiling"], row["hardware_ceiling"]) for row in rows))
        panels[0].legend(fontsize=8, loc="upper left")
        figure.suptitle(title)
        save(figure, path)


def _realised(axes: Axes, rows: Sequence[Mapping[str, Any]], alpha: float) -> None:
    rows = sorted(rows, key=lambda row: row["max_depth"])
    places = list(range(len(rows)))
    values = [row["speedup"] for row in rows]
    errors = [[row["speedup"] - row["low"] for row in rows], [row["high"] - row["speedup"] for row in rows]]
    axes.errorbar(places, values, yerr=errors, color=MEASURED, marker="o", capsize=3, label="measured (95 %)")
    for key, colour, label in (("hardware_ceiling", HARDWARE, "hardware ceiling"), ("ceiling", FORMULA, "S1/S2")):
        axes.plot(places, [row[key] for row in rows], color=colour, marker="_", linestyle="--", label=label)
    axes.axhline(1.0, color=BASELINE, linewidth=1)
    axes.set_xticks(places, [f"{row['max_depth']}" for row in rows])
    axes.set_xlabel("depth")
    axes.set_title(f"acceptance {alpha:g} asked for", fontsize=10)


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
