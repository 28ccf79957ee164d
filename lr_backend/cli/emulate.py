"""``lookahead emulate``: a workload on a system that is not here, as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lr_backend.build.pace import stood_for
from lr_backend.cli.errors import fail, refuse, write
from lr_backend.emulated.workload import Workload
from lr_backend.errors import LookaheadError
from lr_backend.plan.sweep import SWEPT, as_json, as_markdown, sweep
from lr_backend.request import Mode

LOADS = (1, 4)
SHARING = "roles that share cards do so by CUDA MPS"


def emulate(
    spec: Annotated[str, typer.Option(metavar="SPEC", help="The deployment on GPUs, by name or file.")] = "qwen3-32b",
    system: Annotated[str, typer.Option(metavar="SYSTEM", help="Whose kernel tables: h100_sxm, h200_sxm, ...")] = "h200_sxm",
    workload: Annotated[
        str, typer.Option(help="How texts behave: one of `lookahead workload`, by name, or a file (.toml).")
    ] = "qwen3-gsm8k",
    load: Annotated[list[int] | None, typer.Option(min=1, help="Requests in flight; by default 1 and 4.")] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="By default ar, sd, lr, lr_sd and auto.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Of a row at least; p99 wants 100.")] = 1,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of one card for an hour; adds the cost of an answer.")] = None,
    limits: Annotated[bool, typer.Option("--limits", help="Also what limits each row; takes several times as long.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page (.md) here, and JSON beside it.")
    ] = None,
) -> None:
    """Size a deployment for a workload, by mode, placement and load: latency, throughput, GPU-seconds and cost of an answer,
    predicted on a virtual clock. `lookahead serve --pace` answers requests at that pace."""
    if output is not None and output.suffix != ".md":
        refuse(f"--output {output}: the page's name ends in .md")
    if unknown := [one for one in mode or () if one not in SWEPT]:
        refuse(f"--mode {unknown[0]} is not swept; known: {', '.join(SWEPT)}")
    try:
        texts = Workload.load(workload)
        found = sweep(
            stood_for(spec), system, texts, load or LOADS, mode or SWEPT, num_answers=answers, price=price, limits=limits
        )
    except LookaheadError as error:
        fail(error)
    page, note = as_markdown(found), f"{found.label}; {SHARING}"
    typer.echo(f"{page}\n{note}")
    if output is None:
        return
    whole = f"# {spec} on {system}, {workload}\n\n{page}\nPredicted on a virtual clock; {note}.\n"
    document = {"spec": spec, "system": system, "workload": workload, "price": price, **as_json(found)}
    write(output, whole)
    write(output.with_suffix(".json"), json.dumps(document, indent=1) + "\n")
