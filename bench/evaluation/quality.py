"""Whether the default mode keeps the target's quality.

The target alone (``ar``) and mode ``auto`` answer the same problems, each with seeds of its own. A loss over the margin is
excluded where the whole 95 % interval of the paired difference lies above minus the margin. A run of ``lookahead eval``: it goes
on where it was stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench.evaluation.command import DATA_SEED, LIMIT_HELP, Settings, answer_limit, deployment_of, run_evaluation, write_report
from bench.evaluation.errors import EvaluationError
from bench.evaluation.records import RunDirectory
from bench.evaluation.statistics import NonInferiority
from bench.evaluation.summary import BASELINE, DEFAULT_MARGIN, Summary
from bench.evaluation.tasks import load
from bench.evaluation.turns import option_fields, turns
from bench.kit.intervals import Estimate
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from lr_backend.build.paced import paced

DEFAULT_SPEC = "demo"
DEFAULT_CONCURRENCY = 8


def line(summary: Summary, mode: str) -> dict[str, Any]:
    """What came of it: shares as (value, low, high), the difference in points.

    Raises:
        EvaluationError: no problem was scored in both modes.
    """
    base, ours = (next((row for row in summary.rows if row.name == name), None) for name in (BASELINE, mode))
    if base is None or ours is None or base.accuracy is None or ours.accuracy is None or ours.difference is None:
        raise EvaluationError(f"no problem was scored in both {BASELINE} and {mode}")
    wrong = ours.checked.wrong if ours.checked is not None else None
    alpha = ours.step_acceptance_rate
    return {
        "data_set": summary.data_set,
        "num_problems": summary.num_problems,
        BASELINE: _figures(base.accuracy),
        mode: _figures(ours.accuracy),
        "difference_points": _figures(ours.difference.scaled(100.0), 2),
        "margin_points": round(100.0 * summary.margin, 4),
        "loss_over_margin_excluded": ours.verdict == NonInferiority.SHOWN,
        "alpha": None if alpha is None else round(alpha, 4),
        "num_decided": ours.num_decided,
        "num_accepted": ours.num_accepted,
        "wrongly_accepted": _figures(Estimate(wrong.value, *wrong.interval())) if wrong is not None and wrong.total else None,
    }


def _figures(one: Estimate, digits: int = 4) -> list[float]:
    return [round(value, digits) for value in (one.value, one.low, one.high)]


def _unusual(samples: int, concurrency: int, max_tokens: int | None, seed: int) -> list[str]:
    """What sets a run apart from one of the published kind."""
    return [
        *([f"{samples} samples"] if samples > 1 else []),
        *([f"{concurrency} in flight"] if concurrency != DEFAULT_CONCURRENCY else []),
        *([f"max_tokens {max_tokens}"] if max_tokens is not None else []),
        *([f"seed {seed}"] if seed else []),
    ]


# Each option is one axis of the comparison.
def main(
    dataset: Annotated[str, typer.Option(help="As of lookahead eval.")] = "demo",
    num_problems: Annotated[int, typer.Option("--problems", min=1)] = 2000,
    mode: Annotated[str, typer.Option(help=f"Compared with {BASELINE}.")] = "auto",
    margin: Annotated[float, typer.Option(min=0.0, max=100.0, help="Points whose loss is to be excluded.")] = 100
    * DEFAULT_MARGIN,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each problem in each mode.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests in flight, all of one mode.")] = DEFAULT_CONCURRENCY,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    max_tokens: Annotated[int | None, typer.Option(min=1, help=LIMIT_HELP)] = None,
    option: Annotated[list[str] | None, typer.Option(help="A request field for both modes. Repeat it.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    url: Annotated[str | None, typer.Option(help="gRPC host:port of a running server; by default one is started.")] = None,
    spec: Annotated[str, typer.Option(help="What is served where no --url is given.")] = DEFAULT_SPEC,
    pace: Annotated[
        str | None, typer.Option(help="Serve it at the pace of this system, where auto looks ahead: h200_sxm and so on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory and report; by default one for each question of this kind, in out.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go; those of other runs stay.")] = PAGES / "quality.json",
) -> None:
    """Print the tables, write a page, and end with one JSON line."""
    console = console_of_any_width()
    if url and pace:
        raise typer.BadParameter("a server that runs already has its own", param_hint="--pace")
    asked = [Path(dataset).name.split(".")[0], mode, *([pace] if pace else []), str(num_problems)]
    out = out or Path("out") / "-".join(["quality", *asked])
    common = {**option_fields(option or ()), **answer_limit(max_tokens, url), "temperature": temperature}
    data = load(dataset, seed=DATA_SEED, end=num_problems)
    settings = Settings(data, turns((BASELINE, mode), (), common), samples=samples, seed=seed, concurrency=concurrency)
    deployment = None if url else deployment_of(spec)
    if deployment is not None and pace is not None:
        deployment = paced(deployment, pace)
    run_evaluation(settings, out, url=url, deployment=deployment, console=console)
    title = f"Quality of mode {mode}"
    (summary,) = write_report([out], out, margin=margin / 100.0, baseline=BASELINE, console=console, title=title)
    found = line(summary, mode)
    if (lateness := RunDirectory(out).lateness()).paced_s:
        console.print(f"{lateness}. That is of speeds; who is right depends on time only by how often steps were drafted.")
        found["late_share"] = round(lateness.share, 4)
    where = url or (f"spec {spec}" if spec != DEFAULT_SPEC else "")
    unusual = _unusual(samples, concurrency, max_tokens, seed)
    what = (f"at the pace of {pace}" if pace else "", where, *(option or ()), *unusual)
    asked = [summary.data_set, mode, f"{summary.num_problems} problems", f"temperature {temperature:g}"]
    keep_json(output, ", ".join([*asked, *filter(None, what)]), found)
    print_line(console, found)
