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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import lr_backend
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.report import BuildReport, memory_table
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.build.trtllm_commands import NGC_TOOLS, Toolchain
from lr_backend.engine import Role
from lr_backend.errors import LookaheadError
from lr_backend.plan.fitting import fit_by_verifier
from lr_backend.plan.losses import losses
from lr_backend.plan.overrides import Overrides
from lr_backend.plan.simulation import Scenario
from lr_backend.plan.table import plan as make_plan
from lr_backend.trace.analysis import analyse
from lr_backend.trace.chrome import chrome_json
from lr_backend.trace.html import page
from lr_backend.trace.report import report
from lr_backend.trace.schema import Trace
from lr_backend.triton.backend_dir import find_tritonserver
from lr_backend.triton.health import DEFAULT_URL, why_not_ready
from lr_backend.triton.launch import launch_plan
from lr_backend.triton.restrictions import admin_key
from lr_backend.triton.server import ServerError, ServerOptions, TritonServer, useful_lines
from lr_backend.triton.startup_check import Finding, Level, Machine, check, missing, probe, require_ready
from lr_backend.triton.warmup import QUESTION, WarmupAnswer, warm_up

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
        _fail(error)
    for line in report.checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    for name in report.files:
        console.print(f"{'wrote' if report.written else 'would write'} {name}", highlight=False, soft_wrap=True)
    for line in report.waiting:
        console.print(f"[yellow]waits[/] {line}", highlight=False, soft_wrap=True)
    state = "" if report.written else " left as it was"
    console.print(f"[bold]{report.output}[/]{state}", highlight=False, soft_wrap=True)


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


@app.command()
def plan(
    alpha: Annotated[float | None, typer.Option(help="Share of drafted steps that are accepted.")] = None,
    c: Annotated[float | None, typer.Option(help="Time of a drafted step over that of a target step, each model alone.")] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="A recorded trace, to fit all that is not given to; repeat it for more of them."),
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Depths to predict; by default 1 to 8.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Widths to predict; by default 1.")] = None,
    verdict: Annotated[float | None, typer.Option(help="Time of a verdict over that of a target step; by default 0.")] = None,
    call: Annotated[float | None, typer.Option(help="Hand-over of an engine call over a target step; by default 0.")] = None,
    crowding: Annotated[
        float | None, typer.Option(help="Share by which a further sequence lengthens an iteration; by default 0.")
    ] = None,
    cores: Annotated[
        float | None, typer.Option(help="Cores that the three models share; by default each has its own. Never fitted.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    step_tokens: Annotated[int | None, typer.Option(help="Mean length of a step; by default 24.")] = None,
    step_spread: Annotated[float | None, typer.Option(help="Steps vary by this share around it; by default 0.3.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of an answer; by default 60.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Tokens after the reasoning; by default none.")] = None,
    costs: Annotated[bool, typer.Option("--costs", help="Also the best row with each cost taken away, and all of them.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON line a row instead of a table.")] = False,
) -> None:
    """Predict speedups by running the real step loop on a virtual clock, over engines that only take time.

    Give --alpha and --c, or traces from which they and all the rest are fitted. What is given counts more than what is fitted.
    """
    if not traces and (alpha is None or c is None):
        _refuse("--alpha and --c are needed where there is no --trace")
    given = Overrides(alpha, c, verdict, call, crowding, cores, step_tokens, step_spread, steps, answer_tokens)
    try:
        found = _scenarios([Trace.load(path) for path in traces or ()], cores)
        scenarios = {name: given.applied_to(scenario) for name, scenario in found.items()}
        plans = {name: make_plan(one, k or range(1, 9), width or (1,), requests) for name, one in scenarios.items()}
        best = {name: max(rows, key=lambda row: row.speedup) for name, rows in plans.items()}
        lost = {name: losses(scenarios[name], row.max_depth, row.width, requests) for name, row in best.items() if costs}
    except ValueError as error:
        _refuse(str(error))
    except LookaheadError as error:
        _fail(error)
    if json_lines:
        for name, rows in plans.items():
            for row in rows:
                line: dict[str, object] = {key: round(value, 4) for key, value in asdict(row).items()}
                typer.echo(json.dumps({"verifier": name, **line} if traces else line))
            for one in lost.get(name, ()):
                shape = {"max_depth": best[name].max_depth, "width": best[name].width}
                line = {**shape, "without": one.without, "speedup": round(one.speedup, 4)}
                typer.echo(json.dumps({"verifier": name, **line} if traces else line))
        return
    console = Console()
    for name, scenario in scenarios.items():
        if traces:
            console.print(_fitted_line(name, scenario, len(traces)), highlight=False, soft_wrap=True)
        ratio = scenario.draft_token_s / scenario.target_token_s
        title = f"alpha {scenario.acceptance_rate:.3g}, c {ratio:.3g}, {requests} at a time"
        table = Table("width", "depth", "speedup (range)", "formula", "target batch", title=f"{name}: {title}" if name else title)
        for row in plans[name]:
            gain = f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})"
            table.add_row(f"{row.width}", f"{row.max_depth}", gain, f"{row.ceiling:.2f}", f"{row.target_batch:.2f}")
        console.print(table)
        if name in lost:
            table = Table("without", "speedup", title=f"depth {best[name].max_depth}, width {best[name].width}")
            for one in lost[name]:
                table.add_row(one.without, f"{one.speedup:.2f}")
            console.print(table)


def _scenarios(traces: list[Trace], cores: float | None) -> dict[str, Scenario]:
    """What to start from, by verifier: the traces' scenarios; without traces one of no name."""
    if not traces:
        return {"": Scenario(1.0, step_spread=0.3)}
    return {name.value: scenario for name, scenario in fit_by_verifier(traces, cores).items()}


def _fitted_line(name: str, scenario: Scenario, num_traces: int) -> str:
    target, draft, verdict, call, loop = (
        f"{1e3 * seconds:.3g} ms"
        for seconds in (scenario.target_token_s, scenario.draft_token_s, scenario.verdict_s, scenario.call_s, scenario.loop_s)
    )
    prompts = " and ".join(f"{1e3 * seconds:.3g}" for seconds in (scenario.target_prompt_s, scenario.draft_prompt_s))
    return (
        f"fitted to {num_traces} traces, verifier {name}: a target token {target} (each further sequence "
        f"{scenario.crowding:+.0%}), a draft token {draft}, new prompt tokens {prompts} ms, a verdict {verdict}, "
        f"a call {call}, the loop {loop}; "
        f"{scenario.num_steps} steps of {scenario.step_tokens} tokens, give or take {scenario.step_spread:.0%}, "
        f"and {scenario.answer_tokens} tokens of answer"
    )


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
) -> None:
    """Build what is stale, start Triton, wait for a real answer, and serve until Ctrl-C or SIGTERM."""
    console = Console()
    try:
        deployment = DeploymentSpec.load(spec)
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
        _fail(error)
    raise typer.Exit(status)


def _ready_machine(deployment: DeploymentSpec, tritonserver: Path | None) -> Machine:
    """This machine, if it can serve the deployment. Nothing is asked of it for the torch engine.

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
        _fail(error)
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
        _refuse(f"{error.name} is not installed: pip install 'lookahead-server[bench]'")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(command)
    try:
        single(list(context.args), prog_name=f"lookahead {context.info_name}")
    except LookaheadError as error:
        _fail(error)


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
        _fail(LookaheadError(reason))
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
        _fail(error)
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
        _fail(LookaheadError(f"cannot write {path}: {error.strerror}"))


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
        while not stop.event.wait(_WAKE_S):
            if not server.running:
                raise ServerError(f"the server died with status {server.wait()}", useful_lines(server.log_text()))
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


def _refuse(message: str) -> NoReturn:
    """One line on stderr about options that cannot be, and exit status 2."""
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2) from None


def _fail(error: LookaheadError) -> NoReturn:
    """One line on stderr (a server's reasons may follow on their own), and exit status 1."""
    Console(stderr=True).print(f"error: {error.message}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1)
