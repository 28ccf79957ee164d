"""How near the planner comes: what it predicts from recorded requests, beside what other requests then take.

Some problems are asked with a trace, one at a time: of the target alone, and with ``lr`` at two depths and two widths. From these
:func:`lr_backend.plan.fitting.fit` takes a scenario, and :func:`lr_backend.plan.table.plan` predicts depths and a width. Then
other problems are asked with each of them and of the target alone, in turns, without a trace.

Other problems have another acceptance, by chance. So there are two predictions: with the acceptance of the recorded ones, which
is what a planner is for, and with that of the measured ones, which tells what its model of time is worth.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import acceptance_of_each, measure_hardware
from bench.kit.measure import ModeReport, report
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.rows import AS_IT_IS, PROBLEM_SEED, Row, ask, compare
from bench.kit.serving import TEMPERATURE, demo_spec, serving
from bench.kit.turns import in_turns
from demo.problems import Problem, problems
from lr_backend.build.base import Layout
from lr_backend.errors import TraceError
from lr_backend.plan.fitting import fit
from lr_backend.plan.losses import losses
from lr_backend.plan.simulation import Policy, Scenario
from lr_backend.plan.table import plan
from lr_backend.trace.schema import Trace

FIXED: Mapping[str, Any] = {"mode": "lr", "verifier": "judge"}
"""What the simulated loop does: look ahead as far as it is told, and ask the judge of every step."""
BASELINE = Row("ar", {"mode": "ar"})
RECORDED = (
    BASELINE,
    *(
        Row(f"recorded, {depth} x {width}", {**FIXED, "max_depth": depth, "width": width})
        for depth, width in ((1, 1), (4, 1), (1, 2))
    ),
)
SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (4, 2))
"""Depth and width of what is predicted and measured."""
LOSSES_AT = 4
"""Depth at which it is said what each cost takes."""


def row_of(max_depth: int, width: int) -> Row:
    return Row(f"depth {max_depth}, width {width}", {**FIXED, "max_depth": max_depth, "width": width})


def record(client: Client, questions: Sequence[Problem], console: Console) -> list[Trace]:
    """Traces of every recorded row on every problem.

    Raises:
        TraceError: the server sent none.
    """
    found = []
    for index, problem, row in in_turns(RECORDED, questions, "recording", console):
        _, result = ask(client, row, problem, index, trace=True)
        if result.trace is None:
            raise TraceError("the server sent no trace")
        found.append(Trace.from_json(result.trace))
    return found


def predicted(scenario: Scenario) -> dict[str, float]:
    """Speedup by the name of the row."""
    return {row_of(*shape).name: _gain(scenario, *shape) for shape in SHAPES}


def _gain(scenario: Scenario, max_depth: int, width: int) -> float:
    return plan(scenario, (max_depth,), (width,))[0].speedup


def at_acceptance(scenario: Scenario, alpha: float, width: int) -> Scenario:
    """The scenario in which ``alpha`` of the positions accept one of ``width`` candidates; what further ones are worth stays."""
    further = scenario.workload.sibling_acceptance_rate
    rate = acceptance_of_each(alpha, width)
    if further is not None:
        rate = max(0.0, 1.0 - (1.0 - alpha) / (1.0 - further) ** (width - 1))
    return replace(scenario, workload=replace(scenario.workload, acceptance_rate=rate))


def lines_of(scenario: Scenario, found: Mapping[str, ModeReport]) -> list[dict[str, Any]]:
    """A line for each shape: both predictions, and what was measured."""
    before = predicted(scenario)
    lines = []
    for depth, width in SHAPES:
        name = row_of(depth, width).name
        measured = found[name]
        alpha = measured.step_acceptance_rate or 0.0
        after = _gain(at_acceptance(scenario, alpha, width), depth, width)
        lines.append(
            {
                "max_depth": depth,
                "width": width,
                "predicted": round(before[name], 4),
                "alpha": round(alpha, 4),
                "predicted_at_alpha": round(after, 4),
                "speedup": round(measured.speedup, 4),
                "speedup_low": round(measured.speedup_low, 4),
                "speedup_high": round(measured.speedup_high, 4),
                "off": round(before[name] / measured.speedup - 1.0, 4),
                "off_at_alpha": round(after / measured.speedup - 1.0, 4),
            }
        )
    return lines


def main(
    num_recorded: Annotated[int, typer.Option("--recorded", min=2, help="Problems to fit to.")] = 40,
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="Other problems, answered by every row.")] = 60,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "planner.json",
) -> None:
    """Print a table, and one JSON line a row."""
    console = console_of_any_width()
    spec = demo_spec(Layout.PROCESS_A_ROLE)  # each engine is measured by itself
    rows = [row_of(depth, width) for depth, width in SHAPES]
    first, *questions = islice(problems(PROBLEM_SEED, "test"), 1 + num_recorded + num_problems)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-planner-")))
        server = stack.enter_context(serving(spec, folder))
        client = stack.enter_context(Client(server.grpc_url))
        for row in (*RECORDED, *rows):  # a row that is refused fails here
            ask(client, row, first, 0)
        # Two roles may not slow each other down where two and the hand-over of a call do.
        cores = measure_hardware(server, spec, first).num_cores or os.cpu_count()
        fitted = fit(record(client, questions[:num_recorded], console), cores)
        samples = compare({AS_IT_IS: client}, (BASELINE, *rows), questions[num_recorded:], console)
    scenario = fitted.scenario
    lines = lines_of(scenario, report(samples, BASELINE.name))
    show(console, f"{num_recorded} problems recorded, {num_problems} others measured, temperature {TEMPERATURE:g}", lines)
    without = {one.without: round(one.speedup, 4) for one in losses(scenario, Policy(max_depth=LOSSES_AT))}
    found = {"scenario": asdict(fitted), "rows": lines, f"depth {LOSSES_AT} without": without}
    write_json(output, found)
    for line in (*lines, {f"depth {LOSSES_AT} without": without}):
        print_line(console, line)


def show(console: Console, title: str, lines: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        "depth x width", "predicted", "measured (95 %)", "off by", "α measured", "predicted at it", "off by", title=title
    )
    for one in lines:
        gain = f"{one['speedup']:.2f} ({one['speedup_low']:.2f} to {one['speedup_high']:.2f})"
        shape = f"{one['max_depth']} x {one['width']}"
        by_then = (f"{one['alpha']:.2f}", f"{one['predicted_at_alpha']:.2f}", f"{one['off_at_alpha']:+.0%}")
        table.add_row(shape, f"{one['predicted']:.2f}", gain, f"{one['off']:+.0%}", *by_then)
    console.print(table)
