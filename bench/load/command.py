"""Each mode under rising load, by NVIDIA's perf_analyzer.

A deployment on GPUs is emulated at its hardware's pace; the demo's models run at this machine's. Two sweeps: so many requests in
flight, and Poisson arrivals at shares of what ``ar`` can answer, or the first mode that is asked. ``ar`` and ``sd`` are asked
with ``stream=false``, one uninterrupted answer, which is their best; their streamed twins show first step and gaps only. The
other modes are streamed, which costs them nothing. Everything that perf_analyzer wrote stays in a folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from lr_client import Client, ClientError, Options
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import device_line, processor_line
from bench.kit.measure import LEARNS_FROM
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from bench.kit.served import code_hash, served_hash
from bench.kit.serving import LatenessSince, demo_spec, serving, short_texts
from bench.load import inputs, summary
from bench.load.errors import LoadError
from bench.load.export import Limits
from bench.load.perf_analyzer import PerfAnalyzer, obtain
from bench.load.plot import draw
from bench.load.sweep import BASELINE, SERIES, Point, Results, Series, Sweep, closed_points, open_points, rates_from, series_of
from lr_backend.build.emulated_spec import DEFAULT_WORKLOAD, EmulatedDeployment, emulated
from lr_backend.build.spec import DeploymentSpec
from lr_backend.errors import LookaheadError
from lr_backend.serve.server import TritonServer

DEPLOYMENT, SYSTEM = "qwen3-32b-apart", "h200_sxm"
PUBLISHED = PAGES / "load.json"
"""Its figures."""
CONCURRENCY = (1, 4, 8, 16)
RATE_SHARES = (0.5, 1.0)
TOOLS = Path("out/tools")
NUM_STEPS = 12
"""Of an answer of an emulated deployment: the published ones have hundreds."""
READY_TIMEOUT_S, WARM_UP_TIMEOUT_S = 60.0, 300.0
LEARN_ROUNDS = 3
"""Of requests of mode ``auto`` at each concurrency at least, before anything is measured."""


@dataclass(frozen=True)
class Subject:
    """What is put under load, and with which questions.

    Attributes:
        told: its name, for the record; of an emulated deployment also what its times are worth.
        served: None where it runs already.
        asked: where the questions are from, for the record.
    """

    told: str
    served: DeploymentSpec | None
    questions: inputs.Questions
    asked: str

    @property
    def hashes(self) -> dict[str, str]:
        """Of what is served, and of the server's code; of a server that runs already nobody knows them."""
        return {} if self.served is None else {"served_hash": served_hash(self.served), "code_hash": code_hash()}

    @classmethod
    def of(
        cls, url: str | None, spec: str, system: str, input_data: Path | None, folder: Path, slow_motion: float = 1.0
    ) -> Subject:
        """``folder`` holds what is written for it.

        Raises:
            LoadError, LookaheadError: there is no such thing.
        """
        if not url and spec != "demo":
            if input_data is not None:
                raise LoadError("--input-data goes with --spec demo or --url: an emulated deployment has questions of its own")
            served = emulated(spec, system, short_texts(DEFAULT_WORKLOAD, NUM_STEPS, folder), slow_motion=slow_motion)
            told, asked = f"{served.name}: {served.pace_label}", f"{DEFAULT_WORKLOAD}, {NUM_STEPS} steps an answer"
            return cls(told, served, inputs.scripted_anew(served.texts), asked)
        if slow_motion != 1.0:
            raise LoadError("--slow-motion goes with an emulated deployment: nothing else keeps a pace")
        path = input_data or inputs.INPUTS / "demo.json"
        rows = inputs.load(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        asked = f"{path.name}, sha256 {digest}"
        return cls(url or spec, None if url else DeploymentSpec.load(spec), lambda name, count: rows, asked)


def warm_up(
    url: str,
    questions: inputs.Questions,
    temperature: float,
    concurrency: Sequence[int],
    *,
    series: Sequence[Series] = SERIES,
    learns_from: int = 0,
    timeout_s: float = WARM_UP_TIMEOUT_S,
) -> None:
    """Every series once, and ``auto``, if it is one, at every concurrency: it learns at each load by itself.

    perf_analyzer's own warm-up would begin with the requests that it measures next.

    Args:
        learns_from: answers of ``auto`` at each concurrency at least.
        timeout_s: of one answer.

    Raises:
        LoadError: the server does not answer, or refuses a mode.
    """
    learning = [one for one in series if one.mode == "auto"]
    rounds = [(1, list(series)), *((places, learning * max(learns_from, LEARN_ROUNDS * places)) for places in concurrency)]
    with Client(url) as client:
        for number, (places, asked) in enumerate(rounds):
            rows = questions(f"warm-up {number}", len(asked))

            def ask(index: int, rows: Sequence[inputs.Fields] = rows, asked: Sequence[Series] = asked) -> None:
                row, one = rows[index % len(rows)], asked[index]
                options = Options(mode=one.mode, stream=one.stream, temperature=temperature, seed=index)
                most = row.get("max_tokens", [None])[0]
                options = replace(options, max_tokens=most) if most else options
                try:
                    client.ask(row.get("text_input", ["Why?"])[0], options, timeout_s=timeout_s)
                except ClientError as error:
                    raise LoadError(f"the server at {url} does not answer in mode {one.mode}: {error}") from error

            with ThreadPoolExecutor(places) as pool:
                list(pool.map(ask, range(len(asked))))


def show(console: Console, rows: Iterable[tuple[str, ...]], title: str) -> None:
    table = Table(title=title)
    for number, heading in enumerate(summary.HEADINGS):
        table.add_column(heading, justify="right" if number > 1 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@dataclass
class Session:
    """A sweep in progress: its points, and which of them failed.

    Attributes:
        baseline: whose capacity arrival rates are shares of.
    """

    results: Results
    limits: Limits
    console: Console
    baseline: Series = BASELINE
    points: list[Point] = field(default_factory=list)
    failed: dict[Point, str] = field(default_factory=dict)

    def measure(self, sweep: Sweep, more: list[Point]) -> None:
        """Measure more points."""
        self.points.extend(more)
        sweep.run(more, self._report)

    def rates(self) -> list[float]:
        """Arrival rates, from what the baseline could answer.

        Raises:
            LoadError: it was not measured by concurrency.
        """
        found = self.results.figures(self.points, self.limits)
        capacity = [one.requests_per_s for point, one in found.items() if point.series == self.baseline]
        if not capacity:
            name = self.baseline.name
            raise LoadError(f"no rate can be chosen, as {name} was not measured by concurrency: name some with --rate")
        return rates_from(max(capacity), RATE_SHARES)

    def _report(self, point: Point, what: str) -> None:
        if what not in ("kept", "measured"):
            self.failed[point] = what
        count = f"{self.points.index(point) + 1}/{len(self.points)}"
        self.console.print(f"[dim]{count}[/] {point.name}: {what}", highlight=False, soft_wrap=True)


# Each option is one axis of the sweep.
def main(
    url: Annotated[str | None, typer.Option(help="gRPC address of a running server; by default one is started.")] = None,
    spec: Annotated[
        str, typer.Option(help="What is served where no --url is given: demo, or a deployment on GPUs.")
    ] = DEPLOYMENT,
    system: Annotated[str, typer.Option(help="Whose pace a deployment on GPUs is emulated at.")] = SYSTEM,
    slow_motion: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="Of an emulated deployment: all takes so many times as long.")
    ] = 1.0,
    input_data: Annotated[
        Path | None,
        typer.Option(help="perf_analyzer input file, with --spec demo or --url; by default the demo's."),
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Ask in this mode alone; repeat it. By default all.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Requests in flight; repeat it.")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Arrivals a second; by default from the capacity of the first mode.")
    ] = None,
    rates: Annotated[bool, typer.Option(help="Sweep arrival rates too.")] = True,
    min_requests: Annotated[int, typer.Option(min=1, help="Of a point by concurrency, if four rounds are fewer.")] = 12,
    rate_requests: Annotated[int, typer.Option(min=1, help="Of a point by arrival rate.")] = 24,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    first_step_limit_s: Annotated[float, typer.Option("--first-step-limit", min=0.001, help="Goodput: seconds.")] = 1.0,
    latency_limit_s: Annotated[float, typer.Option("--latency-limit", min=0.001, help="Goodput: seconds to the end.")] = 4.0,
    point_timeout_s: Annotated[
        float, typer.Option("--point-timeout", min=1.0, help="Of one point, in seconds at the pace.")
    ] = 300.0,
    perf_analyzer: Annotated[
        Path | None, typer.Option(help="A binary of your own; by default the pinned release is downloaded once.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what was measured before.")] = False,
    folder: Annotated[Path, typer.Option(help="Where everything that was measured is kept.")] = Path("out/load"),
    output: Annotated[
        Path,
        typer.Option(
            help="Where the figures go, those of other runs stay, and the plot beside it. With --url or another --spec it is "
            "load.json in the folder of what was measured, unless another is given."
        ),
    ] = PUBLISHED,
) -> None:
    """Print a table and one JSON line; raw files, figures and a plot go to a folder."""
    errors = Console(stderr=True)
    session = Session(Results(folder, slow_motion), Limits(first_step_limit_s, latency_limit_s), console_of_any_width())
    settings: dict[str, object] = {}
    stopped: str | None = None
    try:
        with ExitStack() as stack:
            series = series_of(mode or ())
            session.baseline = series[0]
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-load-")))
            subject = Subject.of(url, spec, system, input_data, made, slow_motion)
            analyzer = PerfAnalyzer((str(perf_analyzer),)) if perf_analyzer is not None else obtain(TOOLS)
            settings |= {
                "perf_analyzer": analyzer.version(),
                "server": subject.told,
                **subject.hashes,
                "input": subject.asked,
                "temperature": temperature,
                "min_requests": min_requests,
                "rate_requests": rate_requests,
                "device": device_line(demo_spec().target.num_threads) if spec == "demo" and not url else processor_line(),
            }
            session.results.begin(settings, fresh=fresh)
            server = _starting(stack, subject.served, made, session.console) if subject.served is not None else None
            address = server.grpc_url if server is not None else str(url)
            client = stack.enter_context(Client(address))
            widths = concurrency or CONCURRENCY
            # A server that runs already has learned, or its next answers may take minutes each.
            learns_from, answer_s = LEARNS_FROM if server is not None else 0, slow_motion * WARM_UP_TIMEOUT_S
            # Arrivals meet loads of every size.
            left = [
                one for one in widths if rates or not all(map(session.results.has, closed_points([one], min_requests, series)))
            ]
            warm_up(address, subject.questions, temperature, left, series=series, learns_from=learns_from, timeout_s=answer_s)

            def is_ready() -> bool:
                return client.is_ready(timeout_s=READY_TIMEOUT_S)

            results, fields = session.results, {"temperature": temperature}
            lateness = LatenessSince(server) if server is not None and isinstance(subject.served, EmulatedDeployment) else None
            point_s = slow_motion * point_timeout_s
            sweep = Sweep(analyzer, address, subject.questions, fields, results, point_s, is_ready, lateness)
            session.measure(sweep, closed_points(widths, min_requests, series))
            if rates:
                session.measure(sweep, open_points(rate or session.rates(), rate_requests, series))
    except (LoadError, LookaheadError) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    asked = url or (spec if system == SYSTEM else f"{spec} on {system}")
    run = f"{asked}, {', '.join(map(str, concurrency or CONCURRENCY))} in flight, slow motion {slow_motion:g}"
    output = folder / PUBLISHED.name if output == PUBLISHED and (url or spec != DEPLOYMENT) else output
    _end(session, settings, stopped, (output, ", ".join([run, *(mode or ())])), errors)


def _starting(stack: ExitStack, served: DeploymentSpec, folder: Path, console: Console) -> TritonServer:
    with console.status("starting Triton with lookahead, target, draft and judge"):
        return stack.enter_context(serving(served, folder / "repository"))


def _end(session: Session, settings: dict[str, object], stopped: str | None, kept_as: tuple[Path, str], errors: Console) -> None:
    """Write what was measured, and say what is missing: the exit status is 1 if anything is. ``kept_as``: file and run."""
    try:
        found = session.results.figures(session.points, session.limits)
    except LoadError as error:
        errors.print(f"error: {error}; delete its folder to measure it again", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if found:
        _write(session, found, settings, *kept_as)
    for point, reason in session.failed.items():
        errors.print(f"failed: {point.name}: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None:
        kept = f"; {len(found)} points are kept in {session.results.folder}: run the same command again to go on" if found else ""
        errors.print(f"error: {stopped}{kept}", style="red", highlight=False, markup=False, soft_wrap=True)
    if stopped is not None or session.failed:
        raise typer.Exit(1)


def _write(session: Session, found: summary.Found, settings: dict[str, object], output: Path, run: str) -> None:
    """Table, plot, JSON and Markdown of what was measured; ends with the JSON line."""
    whole = summary.document(found, settings, session.limits, session.failed)
    keep_json(output, run, whole)
    (session.results.folder / "load.md").write_text(summary.markdown(found), encoding="utf-8")
    plot = output.with_suffix(".png")
    draw(found, session.limits, f"{settings['server']}, {settings['device']}", plot)
    good = f"good: first step within {session.limits.first_step_s:g} s, end within {session.limits.latency_s:g} s"
    show(session.console, summary.rows(found), good)
    told = f"written to {output} and {plot}; in {session.results.folder} load.md, and a folder a point"
    session.console.print(told, highlight=False, soft_wrap=True)
    print_line(session.console, summary.line(whole))
