"""The report's plots, as SVG to stand inside a page. Colours are the page's CSS variables, so that they follow its dark or light
scheme.

matplotlib draws with stand-in colours, which are replaced by variables afterwards; text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from bench.evaluation.summary import Row, Summary
from lr_backend.request import Mode, VerifierName

MODE_COLOURS: Mapping[str, str] = {Mode.AR: "ar", Mode.SD: "sd", Mode.LR: "lr", Mode.LR_SD: "lr-sd", Mode.AUTO: "auto"}
INK, SOFT, GRID = "#010101", "#010102", "#010103"
FAMILIES = (*VerifierName, "chance", "grade", "embedding")
"""Verifiers that have a colour. ``chance_50`` is of the family ``chance``."""
_SERIES = ("ar", "sd", "lr", "lr-sd", "auto", *(f"by-{name}" for name in FAMILIES))
_STAND_INS = {name: f"#0102{number:02x}" for number, name in enumerate(_SERIES, start=1)}
_VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", **{colour: f"--{name}" for name, colour in _STAND_INS.items()}}
MARKERS = "os^DvP*Xhd<>p8"
LINES = ("-", "--", ":", "-.")
MIN_DECIDED = 5
"""Positions with fewer decisions are left out: their share says nothing."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


def series(row: Row) -> str:
    """What shares a colour: a mode, or in runs that name verifiers the verifier."""
    family = row.name.partition(" ")[2].partition("_")[0]
    return f"by-{family}" if family in FAMILIES else MODE_COLOURS.get(row.mode, "ar")


def colour(row: Row) -> str:
    """A stand-in."""
    return _STAND_INS[series(row)]


def svg(name: str, draw: Callable[[Axes], None]) -> str:
    """One plot as an ``<svg>`` element. ``name`` makes its ids differ from those of other plots of the page."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    # Ids such as "figure_1" repeat in every plot.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)


def plane(summary: Summary) -> str | None:
    """Speed against accuracy: one point a setting, with both intervals. None where there is nothing to compare."""
    rows = [row for row in summary.rows if row.accuracy is not None and row.speedup is not None]
    if len(rows) < 2:
        return None

    def draw(axes: Axes) -> None:
        for number, row in enumerate(rows):
            assert row.accuracy is not None and row.speedup is not None
            x, y = row.speedup, row.accuracy.scaled(100.0)
            axes.errorbar(
                [x.value], [y.value],
                xerr=[[max(0.0, x.value - x.low)], [max(0.0, x.high - x.value)]],
                yerr=[[max(0.0, y.value - y.low)], [max(0.0, y.high - y.value)]],
                fmt=MARKERS[number % len(MARKERS)], color=colour(row), markersize=8, elinewidth=1.4, capsize=3, label=row.name,
            )  # fmt: skip
        axes.axvline(1.0, color=SOFT, linewidth=1.0, linestyle=":")
        axes.set_xlabel(f"speedup over {summary.baseline}")
        axes.set_ylabel("right answers, %")
        axes.margins(0.08)
        _legend(axes, len(rows))

    return svg("plane", draw)


def latency(summary: Summary) -> str:
    """Share of answers that were there after so many seconds."""
    rows = [row for row in summary.rows if row.latencies_s]
    widest = max(max(row.latencies_s) for row in rows)
    narrowest = min(min(row.latencies_s) for row in rows)

    def draw(axes: Axes) -> None:
        seen: dict[str, int] = {}
        for row in rows:
            line = LINES[seen.setdefault(series(row), 0) % len(LINES)]
            seen[series(row)] += 1
            values = np.sort(np.asarray(row.latencies_s))
            axes.step(
                [*values, widest], [*(100.0 * np.arange(1, len(values) + 1) / len(values)), 100.0],
                where="post", color=colour(row), linestyle=line, linewidth=1.8, label=row.name,
            )  # fmt: skip
        for level in (50, 90, 99):
            axes.axhline(level, color=SOFT, linewidth=0.8, linestyle=":")
            axes.annotate(f"p{level}", (1.005, level), xycoords=("axes fraction", "data"), color=SOFT, va="center", fontsize=9)
        if widest > 8 * narrowest:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.set_ylim(0.0, 103.0)
        axes.set_xlabel("seconds from submit to the last event")
        axes.set_ylabel("answers, %")
        _legend(axes, len(rows))

    return svg("latency", draw)


def by_position(summary: Summary) -> str | None:
    """Share of the drafted steps accepted at each place of the answer. None where no traced answer has steps."""
    rows = [(row, [one for one in row.positions if one.decided >= MIN_DECIDED]) for row in summary.rows]
    rows = [(row, found) for row, found in rows if len(found) >= 2]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for number, (row, found) in enumerate(rows):
            places = [one.index for one in found]
            shares = [one.share.value for one in found]
            bounds = [one.share.interval() for one in found]
            if len(rows) <= 3:
                low, high = ([100.0 * one[side] for one in bounds] for side in (0, 1))
                axes.fill_between(places, low, high, color=colour(row), alpha=0.13, linewidth=0)
            axes.plot(
                places, [100.0 * share for share in shares],
                color=colour(row), marker=MARKERS[number % len(MARKERS)], markersize=5, linewidth=1.6,
                linestyle=LINES[number % len(LINES)] if len(rows) > 3 else "-", label=row.name,
            )  # fmt: skip
        axes.set_ylim(-3.0, 103.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step of the answer")
        axes.set_ylabel("accepted, % of those decided")
        _legend(axes, len(rows))

    return svg("position", draw)


def trial(summary: Summary) -> str | None:
    """Step acceptance against accuracy, one point a verifier; the baseline's accuracy as a line. None for fewer than three."""
    rows = [row for row in summary.rows if row.step_acceptance_rate is not None and row.accuracy is not None and " " in row.name]
    if len(rows) < 3:
        return None
    base = next((row for row in summary.rows if row.name == summary.baseline), None)

    def draw(axes: Axes) -> None:
        if base is not None and base.accuracy is not None:
            one = base.accuracy.scaled(100.0)
            axes.axhspan(one.low, one.high, color=colour(base), alpha=0.12, linewidth=0)
            axes.axhline(one.value, color=colour(base), linewidth=1.2, linestyle="--", label=f"{base.name}, alone")
        threads: dict[str, list[tuple[float, float]]] = {}
        for number, row in enumerate(rows):
            assert row.accuracy is not None and row.step_acceptance_rate is not None
            threads.setdefault(series(row), []).append((100.0 * row.step_acceptance_rate, 100.0 * row.accuracy.value))
            y = row.accuracy.scaled(100.0)
            axes.errorbar(
                [100.0 * row.step_acceptance_rate], [y.value],
                yerr=[[max(0.0, y.value - y.low)], [max(0.0, y.high - y.value)]],
                fmt=MARKERS[number % len(MARKERS)], color=colour(row), markersize=8, elinewidth=1.4, capsize=3, label=row.name,
            )  # fmt: skip
        for name, places in threads.items():  # the thresholds of one verifier
            axes.plot(*zip(*sorted(places), strict=True), color=_STAND_INS[name], linewidth=1.0, alpha=0.5)
        axes.set_xlim(-3.0, 103.0)
        axes.set_xlabel("drafted steps accepted, %")
        axes.set_ylabel("right answers, %")
        axes.margins(y=0.08)
        _legend(axes, len(rows) + 1)

    return svg("trial", draw)


def _legend(axes: Axes, num: int) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=min(4 if num < 9 else 3, num), fontsize=9.5)
