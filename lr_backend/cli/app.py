"""The ``lookahead`` command: build a model repository, serve it, look at a trace, say the version."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import lr_backend
from lr_backend.build.emulated_spec import emulated
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.pace import pace_of, system_of
from lr_backend.build.paced import paced
from lr_backend.build.report import BuildReport, memory_table
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment, EmulatedDeployment, GpuDeployment
from lr_backend.build.trtllm_commands import NGC_TOOLS, Toolchain
from lr_backend.cli.errors import fail, refuse
from lr_backend.cli.plan import plan
from lr_backend.cli.workload import workload
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.hardware.lateness import Lateness
from lr_backend.hardware.profile import find, label_of
from lr_backend.plan.equal_gpus import measure, uses, uses_table
from lr_backend.serve.backend_dir import find_tritonserver
from lr_backend.serve.health import DEFAULT_URL, why_not_ready
from lr_backend.serve.launch import launch_plan
from lr_backend.serve.restrictions import admin_key
from lr_backend.serve.server import ServerError, ServerOptions, TritonServer, useful_lines
from lr_backend.serve.startup_check import Finding, Level, Machine, check, missing, probe, require_ready
from lr_backend.serve.warmup import QUESTION, WarmupAnswer, warm_up
from lr_backend.trace.analysis import analyse
from lr_backend.trace.chrome import chrome_json
from lr_backend.trace.html import page
from lr_backend.trace.report import report
from lr_backend.trace.schema import Trace

app = typer.Typer(
    name="lookahead",
    help="Lookahead Reasoning behind Triton: build, serve, trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SpecOption = Annotated[str, typer.Option("--spec", help="Name of a spec in engines/, or a path to a TOML file.")]

PIPED_WIDTH = 120
"""Columns of a table that goes to no terminal, which would say how wide it is."""
USES_TEXTS = Workload(
    0.6, token_agreement=0.75, word_agreement=0.5, prompt_tokens=1000, step_tokens=25, step_spread=0.9, num_steps=24
)
"""What a dry run compares the uses of cards for."""
_WAKE_S = 0.5
"""A blocking wait is cut into pieces this long, so that a signal is acted upon promptly."""


@app.command()
def build(
    spec: SpecOption = "demo",
    role: Annotated[Role | None, typer.Option(help="Build this engine alone; keep the rest of an earlier build.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to; by default engines/built/<name>.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan only. Engines on GPUs: render the repository if --output is given.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a failed build of engines stopped.")] = False,
    examples: Annotated[Path, typer.Option(help="TensorRT-LLM's examples: its converters.")] = NGC_TOOLS.examples,
) -> None:
    """Check a spec's checkpoints, compile its engines where it has any, and render its Triton model repository."""
    console = Console()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    try:
        deployment = DeploymentSpec.load(spec)
        if isinstance(deployment, GpuDeployment):
            report = build_gpu_deployment(
                deployment,
                output,
                role=role,
                dry_run=dry_run,
                resume=resume,
                command=command,
                console=console,
                announce=lambda planned: _print_plan(console, planned),
                tools=Toolchain(examples=examples),
            )
        else:
            report = build_repository(deployment, output, role=role, dry_run=dry_run, command=command)
    except LookaheadError as error:
        fail(error)
    if dry_run and isinstance(deployment, GpuDeployment):
        _print_uses(console, deployment)
    for line in report.checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    for name in report.files:
        console.print(f"{'wrote' if report.written else 'would write'} {name}", highlight=False, soft_wrap=True)
    for line in report.waiting:
        console.print(f"[yellow]waits[/] {line}", highlight=False, soft_wrap=True)
    state = "" if report.written else " left as it was"
    console.print(f"[bold]{report.output}[/]{state}", highlight=False, soft_wrap=True)


def _print_uses(console: Console, deployment: GpuDeployment) -> None:
    """What else the deployment's cards could be used for, and what each use comes to."""
    cards, system = deployment.hardware.num_gpus, system_of(deployment.hardware.gpu)
    try:
        if system is None:
            raise ConfigError(f"there are no kernel tables of {deployment.hardware.gpu}")
        chosen = uses(deployment, system, cards)
        rows = [measure(deployment, use, USES_TEXTS, 1) for use in chosen.found]
    except ConfigError as error:
        console.print(f"[yellow]other uses of its cards are not compared:[/] {escape(error.message)}", soft_wrap=True)
        return
    wide = Console(width=max(console.width, 140)) if not console.is_terminal else console
    wide.print(uses_table(rows, f"{cards} x {deployment.hardware.gpu}: one request, acceptance {USES_TEXTS.acceptance_rate:g}"))
    for name, why in chosen.left_out.items():
        console.print(f"[yellow]left out[/] {name}: {escape(why)}", highlight=False, soft_wrap=True)
    profiles = [find(pace_of(deployment, role, system).profile) for role in Role]
    console.print(f"[dim]predicted by the step loop over scripted texts; {label_of(profiles)}[/]", soft_wrap=True)


def _print_plan(console: Console, report: BuildReport) -> None:
    """What engines on GPUs need, and the commands that make them."""
    if report.memory:
        wide = Console(width=max(console.width, 140)) if not console.is_terminal else console
        wide.print(memory_table(report.memory), highlight=False)
        for role, origin in report.origins.items():
            console.print(f"sizes of {role}: {origin}", highlight=False, soft_wrap=True)
    for step in report.steps:
        console.print(f"[bold]{step.role}: {step.name}[/]", highlight=False)
        console.print(step.command.shell(), highlight=False, markup=False, soft_wrap=True)


app.command()(plan)
app.command()(workload)


@app.command()
def serve(
    spec: SpecOption = "demo",
    host: Annotated[str, typer.Option(help="Address to listen on. Triton has no authentication.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8002,
    repository: Annotated[Path | None, typer.Option(help="Where the model repository is rendered.")] = None,
    tritonserver: Annotated[Path | None, typer.Option(help="By default the one on PATH, then the wheel's.")] = None,
    log_file: Annotated[Path | None, typer.Option(help="By default beside the repository.")] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            help="Serve at the pace of engines on this system: h100_sxm, h200_sxm, b200_sxm, l40s. "
            "A deployment on GPUs is emulated, with scripted texts and no model."
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="With --pace and a deployment on GPUs: how its texts behave, by name or file (.toml).")
    ] = None,
    paced_as: Annotated[
        str | None, typer.Option(help="With --pace: the deployment whose engines they stand for; by default the spec's own.")
    ] = None,
    slow_motion: Annotated[
        float,
        typer.Option(
            help="With --pace: everything takes so many times as long, where this machine falls behind.", min=1, max=100
        ),
    ] = 1.0,
) -> None:
    """Build what is stale, start Triton, wait for a real answer, and serve until Ctrl-C or SIGTERM."""
    if pace is None and (paced_as is not None or workload is not None or slow_motion != 1.0):
        refuse("--paced-as, --workload and --slow-motion go with --pace")
    console = Console()
    try:
        deployment = DeploymentSpec.load(spec)
        if pace is not None:
            deployment = _paced(deployment, pace, paced_as, workload, slow_motion)
        machine = _ready_machine(deployment, tritonserver)
        report = build_repository(deployment, repository, only_if_stale=True, command="lookahead serve")
        _say_built(console, report)
        options = ServerOptions(
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            thread_pool_size=deployment.server.thread_pool_size,
            exit_timeout_s=deployment.server.exit_timeout_s,
            tritonserver=tritonserver,
            log_file=log_file or report.output.with_name(f"{report.output.name}.log"),
            plan=launch_plan(deployment.placements, num_gpus=len(machine.visible_gpus) or None),
            admin_key=admin_key(os.environ),
        )
        status = _run(console, TritonServer(report.output, options), deployment)
    except LookaheadError as error:
        fail(error)
    raise typer.Exit(status)


def _paced(
    deployment: DeploymentSpec, system: str, like: str | None, workload: str | None, slow_motion: float
) -> EmbeddedDeployment | EmulatedDeployment:
    """A deployment on GPUs is emulated, one of our own models stands for such a one.

    Raises:
        ConfigError: there is no profile or workload, or an option goes with the other kind.
    """
    if isinstance(deployment, GpuDeployment):
        if like is not None:
            raise ConfigError(f"--paced-as: {deployment.name} is emulated as what it is")
        return emulated(str(deployment.path), system, workload, slow_motion=slow_motion)
    if not isinstance(deployment, EmbeddedDeployment):
        raise ConfigError(f"--pace: {deployment.name} has one already")
    if workload is not None:
        raise ConfigError(
            f"--workload: {deployment.name} has models that write its texts; a deployment on GPUs is emulated with it"
        )
    return paced(deployment, system, like, slow_motion=slow_motion)


def _ready_machine(deployment: DeploymentSpec, tritonserver: Path | None) -> Machine:
    """This machine, if it can serve the deployment. Nothing is asked of it for the embedded engine.

    Raises:
        ConfigError: all that is missing.
    """
    if not deployment.placements:
        return Machine()
    machine = probe(tritonserver)
    require_ready(check(machine, deployment.placements))
    return machine


@app.command()
def doctor(
    spec: SpecOption = "demo",
    tritonserver: Annotated[Path | None, typer.Option(help="By default the one on PATH, then the wheel's.")] = None,
) -> None:
    """Check whether this machine has what a deployment needs, and say what to do where it has not."""
    try:
        deployment = DeploymentSpec.load(spec)
    except LookaheadError as error:
        fail(error)
    findings = check(probe(tritonserver), deployment.placements)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(_findings_table(deployment.name, findings))
    raise typer.Exit(1 if missing(findings) else 0)


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.MISSING: "red"}


def _findings_table(name: str, findings: tuple[Finding, ...]) -> Table:
    table = Table("", title=f"this machine for {name}")
    for heading in ("needed", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for each in findings:
        table.add_row(f"[{_COLOURS[each.level]}]{each.level}[/]", escape(each.what), escape(each.found), escape(each.remedy))
    return table


_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command whose options are read elsewhere."""


@app.command("eval", context_settings=_HANDED_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Ask a data set in several modes, keep every answer, and score them (needs the extra bench)."""
    _hand_on("bench.evaluation.command", "evaluate", context)


@app.command("report", context_settings=_HANDED_ON, add_help_option=False)
def report_runs(context: typer.Context) -> None:
    """Join runs of eval: accuracy, speed and acceptance as tables and a page with plots (needs the extra bench)."""
    _hand_on("bench.evaluation.command", "report", context)


@app.command("bench-systems", context_settings=_HANDED_ON, add_help_option=False)
def bench_systems(context: typer.Context) -> None:
    """Random models of real shapes with scripted acceptance: what the server makes of them (needs the extra bench)."""
    _hand_on("bench.systems", "main", context)


def _hand_on(module: str, function: str, context: typer.Context) -> None:
    """Run a command whose libraries a server does without."""
    try:
        command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        refuse(f"{error.name} is not installed: pip install 'lookahead-server[bench]'")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(command)
    try:
        single(list(context.args), prog_name=f"lookahead {context.info_name}")
    except LookaheadError as error:
        fail(error)


@app.command()
def version() -> None:
    """Versions of the server, Python, and the tritonserver that would be run."""
    console = Console()
    console.print(f"lookahead {lr_backend.__version__}, Python {platform.python_version()}", highlight=False)
    try:
        console.print(f"tritonserver {find_tritonserver().binary}", highlight=False, soft_wrap=True)
    except LookaheadError as error:
        console.print(error.message, highlight=False)


@app.command()
def health(url: Annotated[str, typer.Option(help="HTTP address of the server.")] = DEFAULT_URL) -> None:
    """Say whether a server has every model ready; exit status 0 if so, else 1."""
    reason = why_not_ready(url)
    if reason is not None:
        fail(LookaheadError(reason))
    Console().print(f"{url} is ready", highlight=False, markup=False)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="A trace, as `lookahead-client ask --trace-file` saves it.")],
    html: Annotated[Path | None, typer.Option(help="Draw the timeline into this file; any browser opens it.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write Chrome's trace-event format; Perfetto opens it.")] = None,
) -> None:
    """Say where the time of one request went, and what went wrong, if anything did."""
    try:
        loaded = Trace.load(file)
    except LookaheadError as error:
        fail(error)
    analysis = analyse(loaded)
    console = Console()
    console.print(report(loaded, analysis))
    for path, text in ((html, page(loaded, analysis) if html else ""), (chrome, chrome_json(loaded) if chrome else "")):
        if path is not None:
            _write(path, text)
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(LookaheadError(f"cannot write {path}: {error.strerror}"))


class _StopRequest:
    """SIGINT or SIGTERM, seen once: the second one no longer waits for requests in flight."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.impatient = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._seen)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        self.impatient = self.event.is_set()
        self.event.set()


def _run(console: Console, server: TritonServer, deployment: DeploymentSpec) -> int:
    """Serve until asked to stop; the server's exit status.

    A signal ends every phase: while the models load as well as later.
    """
    stop = _StopRequest()
    try:
        server.start()
        with console.status(f"starting {deployment.name} ..."):
            server.wait_ready(deployment.server.load_timeout_s, give_up=stop.event)
            answer = None if stop.event.is_set() else warm_up(server.http_url)
        if answer is not None:
            console.print(_panel(server, deployment, answer))
            if label := deployment.loop_config().pace:
                console.print(f"[yellow]{label}[/]", highlight=False, soft_wrap=True)
        while not stop.event.wait(_WAKE_S):
            if not server.running:
                raise ServerError(f"the server died with status {server.wait()}", useful_lines(server.log_text()))
        if deployment.loop_config().pace:
            console.print(str(sum(server.lateness().values(), Lateness())), highlight=False, soft_wrap=True)
        console.print("stopping: requests in flight may finish")
        return _drain(server, stop)
    finally:
        server.stop(0.0)


def _drain(server: TritonServer, stop: _StopRequest) -> int:
    """Ask the server to end and wait; a second signal stops the waiting."""
    server.terminate()
    while not stop.impatient and server.running:
        server.wait(_WAKE_S)
    return server.stop(0.0) or 0


def _panel(server: TritonServer, deployment: DeploymentSpec, answer: WarmupAnswer) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_row("HTTP", f"http://{server.http_url}")
    table.add_row("gRPC", server.grpc_url)
    table.add_row("metrics", f"http://{server.metrics_url}/metrics")
    table.add_row("log", str(server.log_file))
    usage = answer.usage
    calls = ", ".join(f"{usage.get(f'num_{role}_calls', 0)} {role}" for role in Role)
    table.add_row("warm-up", f"{usage.get('completion_tokens', 0)} tokens, calls: {calls}")
    body = json.dumps({"text_input": QUESTION, "stream": False})
    table.add_row("try", f"curl -s http://{server.http_url}/v2/models/lookahead/generate -d {shlex.quote(body)}")
    return Panel(table, title=f"lookahead serves {deployment.name}", subtitle="Ctrl-C stops", expand=False)


def _say_built(console: Console, report: BuildReport) -> None:
    for line in report.checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    console.print(f"{'built' if report.written else 'up to date'}: {report.output}", highlight=False, soft_wrap=True)
