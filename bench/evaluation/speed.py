"""Speed and quality of the modes over demo problems: a run of ``lookahead eval`` and its report.

It goes on where it was stopped.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from bench.evaluation.command import DATA_SEED, MODES, Settings, deployment_of, run_evaluation, write_report
from bench.evaluation.summary import BASELINE, DEFAULT_MARGIN
from bench.evaluation.tasks import load
from bench.evaluation.turns import turns
from bench.kit.output import PAGES, console_of_any_width
from bench.kit.serving import MAX_TOKENS


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    time_limit_s: Annotated[float, typer.Option(help="Ask no more after so many seconds.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(help="Run directory and report; by default out/eval-demo-<problems>.")] = None,
    output: Annotated[Path, typer.Option(help="Where the report's figures go too.")] = PAGES / "evaluation.json",
) -> None:
    """Print the tables, write a page, and end with one JSON line."""
    console = console_of_any_width()
    out = out or Path("out") / f"eval-demo-{num_problems}"
    common = {"max_tokens": MAX_TOKENS, "temperature": temperature}
    settings = Settings(load("demo", seed=DATA_SEED, end=num_problems), turns(MODES.split(","), (), common))
    run_evaluation(settings, out, url=None, deployment=deployment_of("demo"), console=console, time_limit_s=time_limit_s)
    write_report([out], out, margin=DEFAULT_MARGIN, baseline=BASELINE, console=console)
    shutil.copy(out / "report.json", output)
