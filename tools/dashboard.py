"""``make dashboard``: the panels of deploy/grafana/dashboard.json as a picture, without Grafana.

The demo is served with a process for each role, and asked in every mode by a number of clients that grows and falls. On the way
its judge is killed. A real Prometheus scrapes the server as deploy/prometheus says, only faster, and answers the panels' queries.
Matplotlib draws what it says, with the titles, units, limits and legends of the dashboard.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from numpy.typing import NDArray
from openai import APIError, AsyncOpenAI
from PIL import Image

from bench.kit.plots import save, style
from bench.kit.stand import Stand, standing
from demo.problems import problems
from lr_backend.build.base import Layout
from tests.support.observed import DASHBOARD, PROJECT, Prometheus, filled_in, panels, prometheus

PICTURE = PROJECT / "docs" / "images" / "dashboard.png"
MODES = ("auto", "auto", "lr_sd", "sd", "lr", "ar")
CLIENTS = (1, 4, 8, 16, 8, 2)
"""How many ask, in each part of the time."""
KILLED_AT = 0.6
"""Of the time: when the judge dies."""
RATE_INTERVAL, STEP_S = "15s", 1.0
"""Grafana takes a rate over four scrapes of 15 s. Here a run is short and scrapes are quick."""
AUDIT_RATE = 0.5
PROBLEM_SEED = 22
PAUSE_S = 0.5

UNITS = {"reqps": "requests/s", "ops": "1/s", "s": "s", "percentunit": "%", "short": ""}
STAT_COLOURS = {"green": "#2e7d32", "orange": "#ef6c00", "red": "#c62828"}
INCHES = 0.62, 0.3
"""Of one column and one row of the dashboard's grid."""
HEAD_ROWS = 3
NUM_COLOURS = 128
"""Enough for the eye, and a fourth of the file."""
GREY = "#666666"

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One line of a panel, over the seconds since the first request."""

    name: str
    seconds: Values
    values: Values


async def under_load(stand: Stand, seconds: float) -> None:
    """Clients that ask the OpenAI API, each in one mode after another, and the death of the judge."""
    start_s, turns, questions = time.monotonic(), itertools.count(), problems(PROBLEM_SEED)

    async def ask_all_the_while(index: int) -> None:
        async with AsyncOpenAI(base_url=stand.openai_url, api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            while (part := (time.monotonic() - start_s) / seconds) < 1.0:
                if index >= CLIENTS[int(part * len(CLIENTS))]:
                    await asyncio.sleep(PAUSE_S)
                    continue
                turn = next(turns)
                try:
                    answer = await client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": next(questions).question}],
                        seed=turn,
                        stream=True,  # two panels are of steps that somebody waits for
                        extra_body={"lookahead": {"mode": MODES[turn % len(MODES)], "audit_rate": AUDIT_RATE}},
                    )
                    async for _ in answer:
                        pass
                except APIError:  # the server counts it
                    await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as running:
        for index in range(max(CLIENTS)):
            running.create_task(ask_all_the_while(index))
        await asyncio.sleep(KILLED_AT * seconds)
        stand.victim("judge").kill()


def lines_of(panel: Mapping[str, Any], asked: Prometheus, start_s: float, end_s: float) -> list[Line]:
    """What Prometheus says to a panel's queries."""
    found = []
    for target in panel["targets"]:
        for one in asked.over_time(filled_in(target["expr"], RATE_INTERVAL), start_s, end_s, STEP_S):
            name = target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", name):
                name = name.replace(f"{{{{{label}}}}}", one["metric"].get(label, ""))
            times, values = np.array(one["values"], dtype=float).T
            found.append(Line(name, times - start_s, values))
    return found


def draw(
    document: Mapping[str, Any], lines: Mapping[str, Sequence[Line]], length_s: float, marks: Sequence[float], about: str
) -> Figure:
    """The dashboard, each panel in its place.

    Args:
        document: the dashboard.
        lines: of each panel, by its title.
        marks: seconds in which something happened.
        about: stands below the title.
    """
    every = document["panels"]
    width = INCHES[0] * max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in every)
    height = INCHES[1] * (HEAD_ROWS + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in every))
    with style():
        figure = Figure(figsize=(width, height), facecolor="white")
        figure.text(0.15 / width, 1 - 0.4 / height, document["title"], fontsize=16, weight="bold", va="center")
        figure.text(0.15 / width, 1 - 0.72 / height, about, fontsize=9, color=GREY, va="center")
        for panel in every:
            place = panel["gridPos"]
            left, top = INCHES[0] * place["x"], height - INCHES[1] * (HEAD_ROWS + place["y"])
            right, bottom = left + INCHES[0] * place["w"], top - INCHES[1] * place["h"]
            if panel["type"] == "row":
                figure.text((left + 0.15) / width, bottom / height, panel["title"], fontsize=12, weight="bold", va="bottom")
                continue
            inner = (left + 0.55, bottom + 0.55, right - left - 0.75, top - bottom - 0.85)
            if panel["type"] == "stat":
                inner = (left + 0.15, bottom + 0.1, right - left - 0.3, top - bottom - 0.45)
            axes = figure.add_axes((inner[0] / width, inner[1] / height, inner[2] / width, inner[3] / height))
            if panel["type"] == "stat":
                _paint_stat(axes, panel, lines[panel["title"]])
            else:
                _paint_lines(axes, panel, lines[panel["title"]])
                axes.set_xlim(0, length_s)
                for second in marks:
                    axes.axvline(second, color=GREY, linewidth=1, linestyle=":")
        return figure


def _paint_stat(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """The last value, in the colour of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for line in lines for value in line.values if np.isfinite(value)]
    text, colour = "no data", GREY
    if values:
        unit, last = UNITS[defaults["unit"]], values[-1]
        text = f"{100 * last:.1f} %" if unit == "%" else f"{last:.2f} {unit}"
        reached = [step["color"] for step in defaults["thresholds"]["steps"] if last >= (step["value"] or 0.0)]
        colour = STAT_COLOURS[reached[-1]]
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_facecolor("#f7f7f7")
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=14, weight="bold", color=colour, transform=axes.transAxes)
    axes.spines[:].set_visible(False)


def _paint_lines(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], UNITS[defaults["unit"]]
    scale, alpha = (100.0 if unit == "%" else 1.0), custom["fillOpacity"] / 100
    stacked = custom["stacking"]["mode"] == "normal"
    below: dict[float, float] = {}
    for line in lines:
        values = scale * np.nan_to_num(line.values) if stacked else scale * line.values
        if stacked and not values.any():
            continue
        base = np.array([below.get(second, 0.0) for second in line.seconds]) if stacked else np.zeros_like(values)
        (drawn,) = axes.plot(line.seconds, base + values, linewidth=custom["lineWidth"], label=line.name)
        axes.fill_between(line.seconds, base, base + values, color=drawn.get_color(), alpha=alpha, linewidth=0)
        below |= dict(zip(line.seconds, base + values, strict=True)) if stacked else {}
    axes.set_title(panel["title"] + (f" ({unit})" if unit else ""), fontsize=9, loc="left")
    axes.set_ylim(scale * defaults["min"], scale * defaults["max"] if "max" in defaults else None)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(lambda second, _: f"{second // 60:.0f}:{second % 60:02.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(fontsize=6.5, loc="upper left", bbox_to_anchor=(-0.06, -0.1), ncols=4, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=GREY, transform=axes.transAxes)


def main(
    seconds: Annotated[float, typer.Option(min=30.0, help="Of load.")] = 300.0,
    output: Annotated[Path, typer.Option(help="Where the picture goes.")] = PICTURE,
) -> None:
    """Draw the dashboard; fails if a panel has nothing to draw."""
    with (
        tempfile.TemporaryDirectory(prefix="lookahead-dashboard-") as name,
        standing(Layout.PROCESS_A_ROLE, Path(name)) as (stand, _),
        prometheus(f"127.0.0.1:{stand.openai_port}", Path(name), interval="1s") as asked,
    ):
        start_s = time.time()
        asyncio.run(under_load(stand, seconds))
        lines = {panel["title"]: lines_of(panel, asked, start_s, start_s + seconds) for panel in panels()}
    version = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    about = (
        f"Drawn from the dashboard's queries without Grafana, by Prometheus {version} and matplotlib. "
        f"Rates over {RATE_INTERVAL}. The demo's server, asked by {', '.join(map(str, CLIENTS))} clients. "
        "Dotted: its judge is killed."
    )
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    save(draw(document, lines, seconds, [KILLED_AT * seconds], about), output)
    Image.open(output).quantize(NUM_COLOURS).save(output, optimize=True)
    empty = [title for title, drawn in lines.items() if not drawn]
    typer.echo(f"nothing to draw in: {', '.join(empty)}" if empty else f"{len(lines)} panels are drawn")
    raise typer.Exit(bool(empty))


if __name__ == "__main__":
    typer.run(main)
