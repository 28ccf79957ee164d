"""``lookahead eval`` and ``lookahead report``."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from lr_client import Client, ClientError
from lr_client.client import DEFAULT_TIMEOUT_S
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.evaluation import grading, workers
from bench.evaluation.asking import Plan, ask_all, warm_up
from bench.evaluation.errors import EndpointLost, EvaluationError
from bench.evaluation.records import (
    HARDWARE,
    LATENESS,
    OWN_SERVER,
    Key,
    LatenessRecord,
    RunDirectory,
    RunRecord,
    TaskRecord,
    TurnRecord,
)
from bench.evaluation.scoring import Outcome
from bench.evaluation.summary import BASELINE, DEFAULT_MARGIN, Run, Summary, summarise
from bench.evaluation.tasks import DATA_DIR_VARIABLE, NAMES, DataSet, load
from bench.evaluation.turns import Turn, option_fields, rounds, turns
from bench.kit.hardware import measure_hardware, processor_line
from bench.kit.output import console_of_any_width, print_line
from bench.kit.served import code_hash, served_hash
from bench.kit.serving import MAX_TOKENS, engines_alone, lateness_of, serving
from demo.problems import problems
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment
from lr_backend.serve.server import ServerError, TritonServer

MODES = "ar,sd,lr,lr_sd,auto"
DATA_SEED = 2025
PACKAGES = ("lookahead-server", "torch", "transformers", "tritonclient", "numpy", "math-verify")
LIMIT_HELP = f"Of each answer; by default the server's own limit with --url, and {MAX_TOKENS} without."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


# Each option is one axis of the evaluation.
@app.command(
    "eval", help=f"Ask a data set in several modes, keep every answer, and score them. Data sets: {', '.join(NAMES)}, or a path."
)
def evaluate(
    dataset: Annotated[str, typer.Option(help=f"{', '.join(NAMES)}, or a JSONL file (fields: question, answer).")] = "demo",
    modes: Annotated[str, typer.Option(help="Compared, taking turns; commas between.")] = MODES,
    verifiers: Annotated[str, typer.Option(help="Each makes a turn of lr and lr_sd, such as judge,exact.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Answers to each problem in each turn.")] = 1,
    start: Annotated[int, typer.Option(min=0, help="First problem.")] = 0,
    end: Annotated[int | None, typer.Option(help="One past the last problem; by default all, of a generated set 100.")] = None,
    url: Annotated[str | None, typer.Option(help="gRPC host:port of a running server; by default one is started.")] = None,
    spec: Annotated[str, typer.Option(help="What is served where no --url is given.")] = "demo",
    out: Annotated[
        Path | None, typer.Option(help="Run directory; by default out/eval-<dataset>. An earlier run goes on.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests in flight, all of one turn.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the requests; each has one of its own that derives from it.")] = 0,
    data_seed: Annotated[int, typer.Option(help="Of a generated data set.")] = DATA_SEED,
    max_tokens: Annotated[int | None, typer.Option(min=1, help=LIMIT_HELP)] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A request field for all turns, such as max_depth=8. Repeat it.")
    ] = None,
    trace: Annotated[bool, typer.Option(help="Keep each answer's trace. It costs a little time, in every turn.")] = True,
    timeout_s: Annotated[float, typer.Option(help="Seconds that a request may take; later it is wrong.")] = DEFAULT_TIMEOUT_S,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Ask no more after so many seconds; score and keep what is there.")
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="Follows each question, instead of the data set's own.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Where data sets lie that do not come with the package.")
    ] = None,
    scorers: Annotated[int, typer.Option(min=1, help="Processes that score, once everything is answered.")] = 2,
    scorer_timeout_s: Annotated[float, typer.Option(help="A scorer that takes longer is killed.")] = workers.DEFAULT_TIMEOUT_S,
    rescore: Annotated[bool, typer.Option("--rescore", help="Score all answers again.")] = False,
) -> None:
    """Ask, keep, score. See ``lookahead report`` for what came of it."""
    common = {**option_fields(option or ()), **answer_limit(max_tokens, url), "temperature": temperature}
    run_evaluation(
        Settings(
            load(dataset, data_dir=data_dir, seed=data_seed, start=start, end=end, instruction=instruction),
            turns(_split(modes), _split(verifiers), common),
            samples=samples,
            start=start,
            seed=seed,
            concurrency=concurrency,
            trace=trace,
            timeout_s=timeout_s,
        ),
        out or Path("out") / f"eval-{dataset if dataset in NAMES else Path(dataset).name.split('.')[0]}",
        url=url,
        deployment=None if url else deployment_of(spec),
        scoring=Scoring(scorers, scorer_timeout_s, rescore),
        time_limit_s=time_limit_s,
        console=console_of_any_width(),
    )


def answer_limit(max_tokens: int | None, url: str | None) -> dict[str, int]:
    """The request field, if any: what suffices for the demo's models would cut others inside their reasoning."""
    return {} if max_tokens is None and url else {"max_tokens": max_tokens or MAX_TOKENS}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Settings:
    """What a run measures; see the options of ``lookahead eval``."""

    data: DataSet
    turns: Sequence[Turn]
    samples: int = 1
    start: int = 0
    seed: int = 0
    concurrency: int = 1
    trace: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S

    def plan(self, endpoint: str = "") -> Plan:
        """What is asked of ``endpoint``."""
        ids = [task.id for task in self.data.tasks]
        return Plan(
            {task.id: task for task in self.data.tasks},
            {turn.name: turn for turn in self.turns},
            list(rounds(ids, [turn.name for turn in self.turns], self.samples, self.concurrency)),
            self.seed,
            self.trace,
            self.timeout_s,
            endpoint,
        )

    def record(self, endpoint: str, deployment: EmbeddedDeployment | None = None) -> RunRecord:
        """The settings as they are kept; the deployment is of a server of our own."""
        defaults = deployment.loop_config().defaults if deployment is not None else None
        return RunRecord(
            data_set=self.data.name,
            rule=self.data.rule,
            source=self.data.source,
            fingerprint=self.data.fingerprint,
            num_problems=len(self.data.tasks),
            start=self.start,
            turns=tuple(
                TurnRecord(
                    name=turn.name,
                    fields=dict(turn.fields),
                    request=None if defaults is None else turn.request(defaults).model_dump(mode="json"),
                )
                for turn in self.turns
            ),
            num_samples=self.samples,
            seed=self.seed,
            concurrency=self.concurrency,
            trace=self.trace,
            endpoint=endpoint,
            served_hash=served_hash(deployment) if deployment is not None else "",
            code_hash=code_hash() if deployment is not None else "",
            hardware=processor_line(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={name: found for name in PACKAGES if (found := _version(name))},
            tasks=tuple(TaskRecord(id=task.id, question=task.question, answer=task.answer) for task in self.data.tasks),
        )


@dataclass(frozen=True)
class Scoring:
    """How answers are scored, once everything is answered: processes, seconds that each may take, and whether all over again."""

    num_workers: int = 2
    timeout_s: float = workers.DEFAULT_TIMEOUT_S
    again: bool = False


def run_evaluation(
    settings: Settings,
    out: Path,
    *,
    url: str | None,
    deployment: EmbeddedDeployment | None,
    console: Console,
    scoring: Scoring = Scoring(),
    time_limit_s: float | None = None,
) -> RunDirectory:
    """Answer and score what ``out`` lacks.

    Raises:
        EvaluationError: other settings, no server, or requests that failed. What was measured is kept, and scored if it can be.
    """
    directory = RunDirectory(out)
    endpoint = url or f"{OWN_SERVER}{deployment.name if deployment else ''}"
    plan = settings.plan(endpoint)
    with directory.alone():
        resumed = directory.begin(settings.record(endpoint, deployment))
        num_wanted = sum(map(len, plan.rounds))
        num_there = len({answer.key for answer in directory.answers()})
        if resumed:
            console.print(f"going on with {out}: {num_there} of {num_wanted} answers are there", highlight=False)
        lost: EvaluationError | None = None
        if num_there < num_wanted:
            try:
                lost = _ask(settings, plan, directory, url, deployment, console, time_limit_s)
            except EndpointLost as error:
                lost = error
        _score(directory, settings, scoring, console)
    console.print(f"answers and scores are in {out}; read them with: lookahead report {out}", highlight=False)
    if lost is not None:
        raise lost
    return directory


def deployment_of(spec: str) -> EmbeddedDeployment:
    found = DeploymentSpec.load(spec)
    if not isinstance(found, EmbeddedDeployment):
        raise EvaluationError(f"the spec {found.name} is served from its own container: start it there, and give its --url")
    return found


def _ask(
    settings: Settings,
    plan: Plan,
    directory: RunDirectory,
    url: str | None,
    deployment: EmbeddedDeployment | None,
    console: Console,
    time_limit_s: float | None,
) -> EvaluationError | None:
    num_wanted, num_there = sum(map(len, plan.rounds)), len({answer.key for answer in directory.answers()})
    started = time.monotonic()
    with ExitStack() as stack:
        if url is None:
            assert deployment is not None
            client = stack.enter_context(_own_server(deployment, directory, console))
        else:
            client = stack.enter_context(_client(url))
        with console.status("warming up"):
            warm_up(client, plan, settings.data.tasks[0].id)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(f"{settings.data.name}: asking", total=num_wanted, completed=num_there)

            def advance(key: Key) -> None:
                progress.advance(bar)

            outcome = ask_all(
                client,
                plan,
                directory,
                concurrency=settings.concurrency,
                progress=advance,
                time_is_up=lambda: time_limit_s is not None and time.monotonic() - started > time_limit_s,
            )
    if outcome.time_is_up:
        console.print(f"[yellow]stopped after {time_limit_s:g} s; the same command goes on from here[/]", highlight=False)
    if outcome.num_failed:
        return EvaluationError(
            f"{outcome.num_failed} requests failed ({directory.path / 'failures.jsonl'} says why); "
            "the same command asks them again and keeps the rest"
        )
    return None


def _client(url: str) -> Client:
    try:
        return Client(url)
    except ClientError as error:
        raise EvaluationError(f"--url {url}: {error}") from None


@contextmanager
def _own_server(deployment: EmbeddedDeployment, directory: RunDirectory, console: Console) -> Iterator[Client]:
    """A server of this spec; before it its engines are timed, alone."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-eval-"))
        with console.status(f"starting Triton with the spec {deployment.name}"):
            if not (directory.path / HARDWARE).exists():
                with engines_alone(deployment, Path(folder) / "alone") as alone:
                    hardware = measure_hardware(alone, deployment, next(problems(DATA_SEED, "test")))
                (directory.path / HARDWARE).write_text(json.dumps(hardware.as_dict()) + "\n", encoding="utf-8")
            server = stack.enter_context(serving(deployment, Path(folder) / "repository"))
            client = stack.enter_context(Client(server.grpc_url))
        try:
            yield client
        finally:
            with suppress(ServerError):
                _keep_lateness(server, directory)


def _keep_lateness(server: TritonServer, directory: RunDirectory) -> None:
    """Note how late a server with a pace was, from its start on. Raises ServerError: it does not answer."""
    if not server.lateness():
        return
    found = lateness_of(server)
    with directory.appending(LATENESS) as late:
        late.add(LatenessRecord(paced_s=found.paced_s, late_s=found.late_s))


def _score(directory: RunDirectory, settings: Settings, scoring: Scoring, console: Console) -> None:
    with console.status("scoring"):
        counts = grading.grade_all(
            directory, settings.data, num_workers=scoring.num_workers, timeout_s=scoring.timeout_s, again=scoring.again
        )
    told = ", ".join(f"{count} {outcome.value.replace('_', ' ')}" for outcome, count in counts.items() if count)
    console.print(f"scored: {told or 'nothing'}", highlight=False)
    open_ones = sum(one.held is not None and "network" not in one.held for one in directory.scores().values())
    if open_ones:
        told = "this system permits no namespaces (unshare)"
        console.print(f"[yellow]{open_ones} programs could reach the network and write files: {told}[/]", highlight=False)
    if counts[Outcome.UNSCORED]:
        console.print(f"[yellow]why some are unscored: the notes in {directory.path / 'scores.jsonl'}[/]", highlight=False)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of lookahead eval; they are joined.")],
    out: Annotated[Path | None, typer.Option(help="Where report.md, .json and .html go; by default the first run's.")] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Loss of accuracy that counts as none, as a share.")
    ] = DEFAULT_MARGIN,
    baseline: Annotated[str, typer.Option(help="The turn that the others are compared with.")] = BASELINE,
) -> None:
    """Join runs into one table, as Markdown, JSON and a page with plots; the last line printed is JSON."""
    write_report(runs, out or runs[0], margin=margin, baseline=baseline, console=console_of_any_width())


def write_report(
    paths: Sequence[Path], out: Path, *, margin: float, baseline: str, console: Console, title: str = "Speed and quality"
) -> list[Summary]:
    """Write ``report.md``, ``report.json`` and ``report.html`` to ``out``, and say what they say."""
    from bench.evaluation.page import page
    from bench.evaluation.tables import json_line, markdown, terminal

    loaded = [Run.read(RunDirectory(path)) for path in paths]
    summaries = summarise(loaded, margin=margin, baseline=baseline)
    out.mkdir(parents=True, exist_ok=True)
    document = {"title": title, "data_sets": [one.as_dict() for one in summaries]}
    (out / "report.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(summaries, title), encoding="utf-8")
    (out / "report.html").write_text(page(summaries, loaded, title), encoding="utf-8")
    for summary in summaries:
        for table in terminal(summary):
            console.print(table)
        for note in summary.notes:
            console.print(f"[dim]{note}[/]", highlight=False)
    console.print(f"written: {out / 'report.html'}, report.md and report.json beside it", highlight=False)
    print_line(console, json_line(summaries))
    return summaries
