"""The crossover plot: latency and throughput of each mode against load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.kit.plots import save, style
from bench.load.export import Limits, PointFigures
from bench.load.summary import at_loads, speedups
from bench.load.sweep import Point, Series

COLOURS = {"ar": "#444444", "sd": "#1f77b4", "lr": "#d95f02", "lr_sd": "#2ca02c", "auto": "#9467bd"}
STREAMED_STYLE = (0, (4, 2))
TITLE_COLUMNS = 160

Found = Mapping[Point, PointFigures]


def draw(found: Found, limits: Limits, title: str, path: Path) -> None:
    """Write the plot as PNG; panels without a point say so. Points that are void are left out."""
    found = {point: figures for point, figures in found.items() if not figures.void}
    panels: list[Callable[[Axes, Found], None]] = [partial(_latency, closed=True), _throughput, _speedup, _first_step]
    if any(point.rate is not None for point in found):
        panels += [partial(_latency, closed=False), partial(_goodput, limits=limits)]
    columns = len(panels) // 2
    with style():
        figure = Figure(figsize=(4.4 * columns, 7.6), layout="constrained")
        for panel, axes in zip(panels, figure.subplots(2, columns).flat, strict=True):
            panel(axes, found)
        figure.suptitle(fill(title, TITLE_COLUMNS * columns // 3), fontsize=9)
        save(figure, path)


def _latency(axes: Axes, found: Found, *, closed: bool) -> None:
    for series, loads, points in _lines(found, closed=closed, whole=True):
        _line(axes, series, loads, [one.latency_s.p50 for one in points], label=series.name)
        _line(axes, series, loads, [one.latency_s.p90 for one in points], thin=True)
    _finish(axes, "E2E latency: p50, and p90 thin", "seconds", closed=closed)


def _throughput(axes: Axes, found: Found) -> None:
    for series, loads, points in _lines(found, closed=True, whole=True):
        _line(axes, series, loads, [one.tokens_per_s for one in points], label=series.name)
    _finish(axes, "throughput", "tokens/s, all requests", closed=True)


def _speedup(axes: Axes, found: Found) -> None:
    for series, loads, ratios in speedups(found):
        if loads:  # ar was measured at one of them at least
            _line(axes, series, loads, ratios, label=series.name)
    axes.axhline(1.0, color=COLOURS["ar"], linewidth=1)
    _finish(axes, "crossover: seconds a token of ar over the mode's", "speedup over ar", closed=True, from_zero=False)


def _first_step(axes: Axes, found: Found) -> None:
    for series, loads, points in _lines(found, closed=True, streamed=True):
        _line(axes, series, loads, [one.first_step_s.p50 for one in points], label=f"{series.mode}, streamed")
        _line(axes, series, loads, [one.first_step_s.p90 for one in points], thin=True)
    _finish(axes, "time to first step: p50, and p90 thin", "seconds", closed=True)


def _goodput(axes: Axes, found: Found, limits: Limits) -> None:
    for series, loads, points in _lines(found, closed=False):
        _line(axes, series, loads, [one.goodput_rps for one in points], label=series.name, dashed=not series.whole)
    told = f"goodput: first step <= {limits.first_step_s:g} s, end <= {limits.latency_s:g} s"
    _finish(axes, told, "good answers/s", closed=False)


def _lines(
    found: Found, *, closed: bool, whole: bool = False, streamed: bool = False
) -> list[tuple[Series, list[float], list[PointFigures]]]:
    lines = []
    for series, points in at_loads(found, closed=closed).items():
        if (series.whole or not whole) and (series.stream or not streamed):
            # Of a few arrivals the rate may be far from the one that they were drawn for.
            loads = [point.load if closed else found[point].arrivals_per_s or point.load for point in points]
            lines.append((series, loads, [found[point] for point in points]))
    return lines


def _line(
    axes: Axes,
    series: Series,
    loads: Sequence[float],
    values: Sequence[float | None],
    *,
    label: str | None = None,
    thin: bool = False,
    dashed: bool = False,
) -> None:
    shown = [float("nan") if value is None else value for value in values]
    width, size = (0.8, 0.0) if thin else (1.8, 4.0)
    style = STREAMED_STYLE if dashed else "-"
    axes.plot(
        loads, shown, color=COLOURS[series.mode], linewidth=width, linestyle=style, marker="o", markersize=size, label=label
    )


def _finish(axes: Axes, title: str, unit: str, *, closed: bool, from_zero: bool = True) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_xlabel("requests in flight" if closed else "arrivals/s as they came (Poisson)")
    if not axes.lines or not axes.get_legend_handles_labels()[0]:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
        return
    if closed:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda load, _: f"{load:g}"))
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
