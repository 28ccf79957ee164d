"""Each mode under rising load, by NVIDIA's perf_analyzer.

Two sweeps: so many requests in flight (1 to 16), and Poisson arrivals at shares of what ``ar`` can answer. ``ar`` and ``sd`` are
asked with ``stream=false``, one uninterrupted answer, which is their best; their streamed twins show first step and gaps only.
``lr`` and ``lr_sd`` are streamed, which costs them nothing. Everything that perf_analyzer wrote stays in a folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from lr_client import Client, ClientError, Options
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import device_line
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import demo_spec, serving
from bench.load import inputs, summary
from bench.load.errors import LoadError
from bench.load.export import Limits
from bench.load.perf_analyzer import PerfAnalyzer, obtain
from bench.load.plot import draw
from bench.load.sweep import BASELINE, SERIES, Point, Results, Sweep, closed_points, open_points, rates_from
from lr_backend.errors import LookaheadError

CONCURRENCY = (1, 2, 4, 8, 16)
RATE_SHARES = (0.25, 0.5, 0.75, 1.0)
TOOLS = Path("out/tools")
READY_TIMEOUT_S = 60.0
WARM_UP_ROUNDS = 2


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


@dataclass
class Session:
    """A sweep in progress: its points, and which of them failed."""

    results: Results
    limits: Limits
    console: Console
    points: list[Point] = field(default_factory=list)
    failed: dict[Point, str] = field(default_factory=dict)

    def measure(self, sweep: Sweep, more: list[Point]) -> None:
        """Measure more points."""
        self.points.extend(more)
        sweep.run(more, self._report)

    def rates(self) -> list[float]:
        """Arrival rates, from what ``ar`` could answer.

        Raises:
            LoadError: ``ar`` was not measured by concurrency.
        """
        found = self.results.figures(self.points, self.limits)
        capacity = [one.requests_per_s for point, one in found.items() if point.series == BASELINE]
        if not capacity:
            raise LoadError("no rate can be chosen, as ar was not measured by concurrency: name some with --rate")
        return rates_from(max(capacity), RATE_SHARES)

    def _report(self, point: Point, what: str) -> None:
        if what not in ("kept", "measured"):
            self.failed[point] = what
        count = f"{self.points.index(point) + 1}/{len(self.points)}"
        self.console.print(f"[dim]{count}[/] {point.name}: {what}", highlight=False, soft_wrap=True)


# Each option is one axis of the sweep.
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
    folder: Annotated[Path, typer.Option(help="Where everything that was measured is kept.")] = Path("out/load"),
    output: Annotated[Path, typer.Option(help="Where the figures go; the plot beside it.")] = PAGES / "load.json",
) -> None:
    """Print a table and one JSON line; plot and figures beside the page, raw files in a folder."""
    errors = Console(stderr=True)
    session = Session(Results(folder), Limits(first_step_limit_s, latency_limit_s), console_of_any_width())
    settings: dict[str, object] = {}
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
            "device": device_line(demo_spec().target.num_threads) if url is None else f"a client with {os.cpu_count()} cores",
        }
        session.results.begin(settings, fresh=fresh)
        with ExitStack() as stack:
            address = url or _demo_server(stack, session.console)
            client = stack.enter_context(Client(address))
            warm_up(client, questions, temperature)

            def is_ready() -> bool:
                return client.is_ready(timeout_s=READY_TIMEOUT_S)

            fields = {"temperature": temperature}
            sweep = Sweep(analyzer, address, questions, fields, session.results, point_timeout_s, is_ready)
            session.measure(sweep, closed_points(concurrency or CONCURRENCY, min_requests))
            if rates:
                session.measure(sweep, open_points(rate or session.rates(), rate_requests))
    except (LoadError, LookaheadError) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    _end(session, settings, stopped, output, errors)


def _demo_server(stack: ExitStack, console: Console) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-load-"))
    with console.status("starting Triton with lookahead, target, draft and judge"):
        return stack.enter_context(serving(demo_spec(), Path(folder) / "repository")).grpc_url


def _end(session: Session, settings: dict[str, object], stopped: str | None, output: Path, errors: Console) -> None:
    """Write what was measured, and say what is missing: the exit status is 1 if anything is."""
    try:
        found = session.results.figures(session.points, session.limits)
    except LoadError as error:
        errors.print(f"error: {error}; delete its folder to measure it again", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if found:
        _write(session, found, settings, output)
    for point, reason in session.failed.items():
        errors.print(f"failed: {point.name}: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None:
        kept = f"; {len(found)} points are kept in {session.results.folder}: run the same command again to go on" if found else ""
        errors.print(f"error: {stopped}{kept}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None or session.failed:
        raise typer.Exit(1)


def _write(session: Session, found: summary.Found, settings: dict[str, object], output: Path) -> None:
    """Table, plot, JSON and Markdown of what was measured; ends with the JSON line."""
    whole = summary.document(found, settings, session.limits, session.failed)
    write_json(output, whole)
    (session.results.folder / "load.md").write_text(summary.markdown(found), encoding="utf-8")
    plot = output.with_suffix(".png")
    draw(found, session.limits, f"{settings['server']}, {settings['device']}", plot)
    good = f"good: first step within {session.limits.first_step_s:g} s, end within {session.limits.latency_s:g} s"
    show(session.console, summary.rows(found), good)
    told = f"written to {output} and {plot}; in {session.results.folder} load.md, and a folder a point"
    session.console.print(told, highlight=False, soft_wrap=True)
    print_line(session.console, summary.line(whole))


if __name__ == "__main__":
    typer.run(main)
