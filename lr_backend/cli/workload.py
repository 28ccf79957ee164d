"""``lookahead workload``: how texts behave, of the paper or of recorded traces, as a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lr_backend.cli.errors import fail, refuse, write
from lr_backend.emulated.workload import Workload, published
from lr_backend.errors import LookaheadError
from lr_backend.plan.fit_texts import fit_workload
from lr_backend.trace.schema import Trace

DIGITS = 4
"""More of a rate says nothing: it is counted over some hundred steps."""


def workload(
    published_name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of the paper's, to print.")] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", metavar="FILE", help="A recorded trace to fit one to; repeat it for more of them."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="With --trace: what the file's first line calls it.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it into this file (.toml) instead.")
    ] = None,
) -> None:
    """Print a workload file, for `plan` and `serve`: of recorded traces, or one of the paper's; without either, list those."""
    if published_name is not None and traces:
        refuse(f"{published_name} is published and needs no --trace; --name says what a fitted one is called")
    if name is not None and not traces:
        refuse("--name goes with --trace")
    if output is not None and output.suffix != ".toml":
        refuse(f"--output {output}: the name of a workload's file ends in .toml")
    try:
        if traces:
            text = _fitted(traces, name)
        elif published_name is not None:
            text = Workload.load(published_name).as_toml(published_name)
        elif output is not None:
            refuse("--output goes with a name or with --trace")
        else:
            Console().print(_table())
            return
    except LookaheadError as error:
        fail(error)
    if output is None:
        typer.echo(text, nl=False)
        return
    write(output, text)
    Console().print(f"wrote {output}", highlight=False, markup=False, soft_wrap=True)


def _fitted(paths: list[Path], name: str | None) -> str:
    """Raises: TraceError: a file is no trace, or they hold too little."""
    found = asdict(fit_workload([Trace.load(path) for path in paths]))
    rounded: dict[str, Any] = {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in found.items()}
    said = f"fitted to {len(paths)} trace{'s' if len(paths) > 1 else ''}"
    return Workload(**rounded).as_toml(f"{name}: {said}" if name else said)


def _table() -> Table:
    table = Table(title="workloads of arXiv 2506.19830")
    table.add_column("name", no_wrap=True)
    for heading in ("accepted", "agreeing", "n-grams", "prompt", "steps", "answer"):
        table.add_column(heading, justify="right")
    for name, one in published().items():
        rates = (one.acceptance_rate, one.token_agreement, one.ngram_hit_rate)
        lengths = (f"{one.prompt_tokens}", f"{one.num_steps} x {one.step_tokens}", f"{one.answer_tokens}")
        table.add_row(name, *(f"{rate:.2f}" for rate in rates), *lengths)
    return table
