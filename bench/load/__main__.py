"""``make load`` (``python -m bench.load``): each mode under rising load, by NVIDIA's perf_analyzer.

Two sweeps: so many requests in flight (1 to 16), and Poisson arrivals at shares of what ``ar`` can answer. ``ar`` and ``sd`` are
asked with ``stream=false``, one uninterrupted answer, which is their best; their streamed twins show first step and gaps only.
``lr`` and ``lr_sd`` are streamed, which costs them nothing. Everything perf_analyzer wrote stays under ``out/load``.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from lr_client import Client, ClientError, Options
from rich.console import Console
from rich.table import Table

from bench.load import inputs, summary
from bench.load.errors import LoadError
from bench.load.export import Limits
from bench.load.perf_analyzer import PerfAnalyzer, obtain
from bench.load.sweep import BASELINE, SERIES, Point, Results, Sweep, closed_points, open_points, rates_from
from lr_backend.errors import LookaheadError

CONCURRENCY = (1, 2, 4, 8, 16)
RATE_SHARES = (0.25, 0.5, 0.75, 1.0)
TOOLS = Path("out/tools")
READY_TIMEOUT_S = 60.0
WARM_UP_ROUNDS = 2
WIDTH = 150


def machine() -> str:
    """What it runs on."""
    from bench.engine import device_line  # torch, which takes seconds to load
    from demo.asking import demo_spec
    from lr_backend.embedded.config import EngineConfig
    from lr_backend.engine import Role

    spec = demo_spec()
    return device_line(EngineConfig(spec.checkpoint_dir(Role.TARGET), num_threads=spec.target.num_threads))


def warm_up(client: Client, questions: list[inputs.Fields], temperature: float) -> None:
    """Every series a few times: perf_analyzer's own warm-up would begin with the requests that it measures next.

    Raises:
        LoadError: the server does not answer.
    """
    for index in range(WARM_UP_ROUNDS):
        for series in SERIES:
            question = questions[index % len(questions)]
            try:
                options = Options(mode=series.mode, stream=series.stream, temperature=temperature, max_tokens=64, seed=index)
                client.ask(question.get("text_input", ["Why?"])[0], options, timeout_s=READY_TIMEOUT_S)
            except ClientError as error:
                raise LoadError(f"the server at {client.url} does not answer: {error}") from error


def show(console: Console, rows: Iterable[tuple[str, ...]], title: str) -> None:
    table = Table(title=title)
    for number, heading in enumerate(summary.HEADINGS):
        table.add_column(heading, justify="right" if number > 1 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(
    url: Annotated[str | None, typer.Option(help="gRPC address of a running server; by default the demo is served.")] = None,
    input_data: Annotated[Path, typer.Option("--input-data", help="perf_analyzer input file.")] = inputs.INPUTS / "demo.json",
    concurrency: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Requests in flight; repeat it.")] = None,
    rate: Annotated[list[float] | None, typer.Option(min=0.001, help="Arrivals a second; by default from ar's capacity.")] = None,
    rates: Annotated[bool, typer.Option(help="Sweep arrival rates too.")] = True,
    min_requests: Annotated[int, typer.Option(min=1, help="Of a point by concurrency, if four rounds are fewer.")] = 12,
    rate_requests: Annotated[int, typer.Option(min=1, help="Of a point by arrival rate.")] = 24,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    first_step_limit_s: Annotated[float, typer.Option("--first-step-limit", min=0.001, help="Goodput: seconds.")] = 1.0,
    latency_limit_s: Annotated[float, typer.Option("--latency-limit", min=0.001, help="Goodput: seconds to the end.")] = 4.0,
    point_timeout_s: Annotated[float, typer.Option("--point-timeout", min=1.0, help="Of one point, in seconds.")] = 300.0,
    perf_analyzer: Annotated[
        Path | None, typer.Option(help="A binary of your own; by default the pinned release is downloaded once.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what was measured before.")] = False,
    output: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/load"),
) -> None:
    """Print a table and one JSON line; plot and raw files under the output folder."""
    console, errors = Console(width=WIDTH), Console(stderr=True)
    limits = Limits(first_step_limit_s, latency_limit_s)
    points: list[Point] = []
    failed: dict[Point, str] = {}
    settings: dict[str, object] = {}
    results = Results(output)
    stopped: str | None = None
    try:
        questions = inputs.load(input_data)
        analyzer = PerfAnalyzer((str(perf_analyzer),)) if perf_analyzer is not None else obtain(TOOLS)
        settings |= {
            "perf_analyzer": analyzer.version(),
            "server": url or "demo",
            "input_sha256": hashlib.sha256(input_data.read_bytes()).hexdigest()[:16],
            "temperature": temperature,
            "min_requests": min_requests,
            "rate_requests": rate_requests,
            "device": machine() if url is None else f"a client with {os.cpu_count()} cores",
        }
        results.begin(settings, fresh=fresh)
        with ExitStack() as stack:
            address = url or _demo_server(stack, console)
            client = stack.enter_context(Client(address))
            warm_up(client, questions, temperature)
            fields = {"temperature": temperature}

            def is_ready() -> bool:
                return client.is_ready(timeout_s=READY_TIMEOUT_S)

            sweep = Sweep(analyzer, address, questions, fields, results, point_timeout_s, is_ready)

            def measure(more: list[Point]) -> None:
                points.extend(more)

                def report(point: Point, what: str) -> None:
                    if what not in ("kept", "measured"):
                        failed[point] = what
                    count = f"{points.index(point) + 1}/{len(points)}"
                    console.print(f"[dim]{count}[/] {point.name}: {what}", highlight=False, soft_wrap=True)

                sweep.run(more, report)

            measure(closed_points(concurrency or CONCURRENCY, min_requests))
            if rates:
                capacity = [
                    one.requests_per_s for point, one in results.figures(points, limits).items() if point.series == BASELINE
                ]
                if not rate and not capacity:
                    raise LoadError("no rate can be chosen, as ar was not measured by concurrency: name some with --rate")
                measure(open_points(rate or rates_from(max(capacity), RATE_SHARES), rate_requests))
    except (LoadError, LookaheadError) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    try:
        found = results.figures(points, limits)
    except LoadError as error:
        errors.print(f"error: {error}; delete its folder to measure it again", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if found:
        _write(console, found, settings, limits, failed, output)
    for point, reason in failed.items():
        errors.print(f"failed: {point.name}: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None:
        kept = f"; {len(found)} points are kept in {output}: run the same command again to go on" if found else ""
        errors.print(f"error: {stopped}{kept}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None or failed:
        raise typer.Exit(1)


def _demo_server(stack: ExitStack, console: Console) -> str:
    from demo.asking import demo_spec, serving

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-load-"))
    with console.status("starting Triton with lookahead, target, draft and judge"):
        return stack.enter_context(serving(demo_spec(), Path(folder) / "repository")).grpc_url


def _write(
    console: Console,
    found: summary.Found,
    settings: dict[str, object],
    limits: Limits,
    failed: dict[Point, str],
    output: Path,
) -> None:
    """Table, plot, JSON and Markdown of what was measured; ends with the JSON line."""
    from bench.load.plot import draw

    whole = summary.document(found, settings, limits, failed)
    (output / "load.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (output / "load.md").write_text(summary.markdown(found), encoding="utf-8")
    draw(found, limits, f"{settings['server']}, {settings['device']}", output / "load.png")
    show(console, summary.rows(found), f"good: first step within {limits.first_step_s:g} s, end within {limits.latency_s:g} s")
    console.print(f"written to {output}: load.png, load.json, load.md, and a folder a point", highlight=False, soft_wrap=True)
    console.print(json.dumps(summary.line(whole)), soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
