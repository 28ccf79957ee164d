"""Plots of benches whose result is one table: ratios with their intervals, and what was realised of what formulas allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MEASURED, HARDWARE, FORMULA, BASELINE = "#d95f02", "#1f77b4", "#888888", "#444444"
DPI = 110


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio to the baseline, with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float


def draw_ratios(ratios: Sequence[Ratio], title: str, baseline: str, path: Path) -> None:
    """A bar for each ratio, first on top; a line where the baseline is."""
    with _style():
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
    with _style():
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


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})


def save(figure: Figure, path: Path) -> None:
    """Write a figure; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
