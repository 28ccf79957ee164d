"""``lookahead serve``: build what is stale, start Triton, and serve until asked to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from lr_backend.build.emulated_spec import emulated
from lr_backend.build.paced import paced
from lr_backend.build.render import LOOKAHEAD_MODEL
from lr_backend.build.report import BuildReport
from lr_backend.build.repository import build_repository
from lr_backend.build.runner import ended_by_signals
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment, EmulatedDeployment, GpuDeployment
from lr_backend.cli.errors import fail, refuse
from lr_backend.cli.help import RolesOption, SpecOption, TritonOption
from lr_backend.cli.ports import (
    OPENAI_PORT,
    PORTS,
    HostOption,
    OpenaiHostOption,
    OpenaiKeysOption,
    OpenaiSettingsOption,
    PortOption,
    by_option,
)
from lr_backend.cli.stop import StopRequest
from lr_backend.engine import Role
from lr_backend.engine.address import ENGINE_KEY_VARIABLE, key_from
from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.frontend import examples
from lr_backend.frontend.process import FrontendProcess
from lr_backend.frontend.settings import Deployed, Settings
from lr_backend.hardware.lateness import Lateness
from lr_backend.serve import mps
from lr_backend.serve.ending import Idleness
from lr_backend.serve.keeper import StubKeeper, told_dead
from lr_backend.serve.launch import launch_plan
from lr_backend.serve.mps import Mps
from lr_backend.serve.nodes import Nodes, group_of, private_key
from lr_backend.serve.remotes import wait_for_roles
from lr_backend.serve.restrictions import admin_key, is_loopback, tls_arguments
from lr_backend.serve.server import Ports, ServerError, ServerOptions, TritonServer, useful_lines
from lr_backend.serve.startup_check import Level, Machine, Needs, check, check_files, probe, require_ready, shared_cards
from lr_backend.serve.warmup import QUESTION, WARM_UP_S, WarmupAnswer, curl_line, warm_engines, warm_loops

Result = TypeVar("Result")
_LOOK_S = 0.05
_AFTER_DRAIN_S = 2.0
"""For Triton to end once nothing is in flight; connections that nobody uses hold it no longer."""
_FRONT_READY_S = 30.0
_WAKE_S = 0.5
"""A blocking wait is cut into pieces this long, so that a signal is acted upon promptly."""


# Long: its parameters are the command's options.
def serve(
    spec: SpecOption = "demo",
    host: HostOption = "127.0.0.1",
    http_port: PortOption = PORTS.http,
    grpc_port: PortOption = PORTS.grpc,
    metrics_port: PortOption = PORTS.metrics,
    openai_port: PortOption = OPENAI_PORT,
    openai_host: OpenaiHostOption = "127.0.0.1",
    openai_keys: OpenaiKeysOption = None,
    openai_settings: OpenaiSettingsOption = None,
    repository: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the model repository is rendered; by default engines/built/<name>."),
    ] = None,
    tritonserver: TritonOption = None,
    role: RolesOption = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="gRPC by TLS, with this certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="And its private key.")] = None,
    log_file: Annotated[Path | None, typer.Option(metavar="FILE", help="By default beside the repository.")] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM",
            help="Serve at the pace of engines on this system: h100_sxm, h200_sxm, b200_sxm, l40s. "
            "A deployment on GPUs is emulated, with scripted texts and no model.",
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="With --pace and a deployment on GPUs: how its texts behave, by name or file (.toml).")
    ] = None,
    start_mps: Annotated[
        bool,
        typer.Option(
            "--start-mps",
            help="Where engines share a card and CUDA MPS does not run: start its daemon, and end it with the server.",
        ),
    ] = False,
    paced_as: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="With --pace: the deployment whose engines they stand for; by default the spec's own."),
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
    if (tls_cert is None) != (tls_key is None):
        refuse("--tls-cert and --tls-key go together")
    console = Console()
    try:
        deployment = DeploymentSpec.load(spec)
        if pace is not None:
            deployment = _paced(deployment, pace, paced_as, workload, slow_motion)
        if role:
            deployment = deployment.only(role)
        if deployment.remotes and deployment.runs_loop:
            key_from(os.environ, ENGINE_KEY_VARIABLE)  # the loop reads it with its first request
        settings = Settings.load(openai_settings, host=openai_host, port=openai_port, keys_file=openai_keys)
        settings.places(deployment.loop_config().limits.max_in_flight_requests)
        with ended_by_signals(), ExitStack() as ended:
            machine = _ready_machine(
                console,
                deployment,
                by_option(
                    host,
                    Ports(http_port, grpc_port, metrics_port),
                    (settings.host, settings.port) if deployment.runs_loop else None,
                ),
                tritonserver,
                ended if start_mps else None,
            )
            nodes = _nodes(deployment, ended)
            report = build_repository(deployment, repository, only_if_stale=True, command="lookahead serve")
            _say_built(console, report)
            usual = (repository or deployment.built_dir).absolute()
            if report.output != usual:  # a temporary folder
                ended.callback(rmtree, report.output.parent, ignore_errors=True)
            logs = usual.parent if report.output == usual else Path(gettempdir())
            plan = launch_plan(deployment.placements, num_gpus=len(machine.visible_gpus) or None)
            options = ServerOptions(
                host=host,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                thread_pool_size=deployment.server.threads_a_loop,
                exit_timeout_s=deployment.server.exit_timeout_s,
                tritonserver=tritonserver,
                log_file=log_file or logs / f"{usual.name}.log",
                plan=plan if nodes is None else plan.across(nodes),
                admin_key=admin_key(os.environ),
                engine_key="" if deployment.runs_loop else _engine_key(deployment, host),
                closes_engines=deployment.runs_loop,
                arguments=tls_arguments(tls_cert, tls_key),
            )
            with FrontendProcess(settings, tls_cert) if deployment.runs_loop else nullcontext() as front:
                status = _run(console, TritonServer(report.output, options), deployment, front, nodes)
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
    assert isinstance(deployment, EmbeddedDeployment), deployment.runtime
    if workload is not None:
        raise ConfigError(
            f"--workload: {deployment.name} has models that write its texts; a deployment on GPUs is emulated with it"
        )
    return paced(deployment, system, like, slow_motion=slow_motion)


def _nodes(deployment: DeploymentSpec, ended: ExitStack) -> Nodes | None:
    """The machines of a role whose engine spans several, which this server leads; None: there are none.

    Raises:
        ConfigError: the group is not the spec's, or its key is missing.
    """
    group = group_of(deployment.placements, os.environ)
    if group is None:
        return None
    (engine,) = deployment.placements
    folder = ended.enter_context(TemporaryDirectory(prefix="lookahead-nodes-"))
    return Nodes.prepare(group.others, len(engine.gpu_device_ids), private_key(os.environ), Path(folder))


def _engine_key(deployment: DeploymentSpec, host: str) -> str:
    """What opens engines that are there for a step loop elsewhere.

    Raises:
        ConfigError: there is none, and others than this machine could call them.
    """
    key = key_from(os.environ, ENGINE_KEY_VARIABLE)
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: anybody could call the engines of {deployment.name}; give {ENGINE_KEY_VARIABLE}_FILE, as to "
            "the step loop's server"
        )
    return key


def _ready_machine(
    console: Console,
    deployment: DeploymentSpec,
    addresses: Mapping[str, tuple[str, int]],
    tritonserver: Path | None,
    ended: ExitStack | None = None,
) -> Machine:
    """This machine, if it can serve the deployment; says what it serves worse for.

    Args:
        ended: is told what ends with the server, if CUDA MPS may be started; None: it may not.

    Raises:
        ConfigError: all that is missing. Of a deployment on GPUs the build that follows checks the files.
    """
    needs = Needs.of(deployment, addresses)
    machine = probe(tritonserver, needs)
    if ended is not None and machine.mps is Mps.STOPPED and machine.visible_gpus and shared_cards(needs.placements):
        ended.callback(mps.stop, os.environ)
        machine = replace(machine, mps=mps.start(os.environ))
        if machine.mps is Mps.RUNNING:
            console.print("CUDA MPS started", highlight=False)
    files = () if isinstance(deployment, GpuDeployment) else check_files(deployment)
    findings = (*check(machine, needs), *files)
    require_ready(findings)
    for each in findings:
        if each.level is Level.WARNING:
            line = f"[yellow]{escape(each.what)}[/] {escape(each.found)}; {escape(each.remedy)}"
            console.print(line, highlight=False, soft_wrap=True)
    return machine


def _run(
    console: Console,
    server: TritonServer,
    deployment: DeploymentSpec,
    front: FrontendProcess | None,
    nodes: Nodes | None = None,
) -> int:
    """Serve until asked to stop; the server's exit status. ``front``: None where there is no step loop to stand before.

    A signal ends every phase: while the models load as well as later.
    """
    stop = StopRequest()
    load_s = deployment.server.load_timeout_s
    keeper = StubKeeper(server, partial(_tell, console), load_s)
    try:
        if nodes is not None:
            console.print(f"waiting for {', '.join(nodes.others)}", highlight=False, soft_wrap=True)
            nodes.wait(load_s, stop.event)
            if stop.event.is_set():
                return 0
        server.start()
        loaded_by_s = time.monotonic() + load_s
        with console.status(f"starting {deployment.name} ..."):
            deployed = None if front is None else _deployed(deployment)  # while the models load
            server.wait_ready(load_s, give_up=stop.event)
            keeper.start()
            if front is not None:
                front.start(server.log_file)
            answer = _unless_lost(
                server, keeper, stop, partial(_warm_up, console, server, deployment, stop, loaded_by_s + WARM_UP_S)
            )
            if front is not None and deployed is not None and not stop.event.is_set():
                addresses, drain_s = (server.grpc_url, server.metrics_url), server.options.exit_timeout_s
                front.open(deployed, *addresses, drain_s=drain_s, timeout_s=_FRONT_READY_S, notice_file=server.notice_file)
        is_warm = not stop.event.is_set()
        if is_warm:
            _say_served(console, server, deployment, answer, front)
        while not stop.event.wait(_WAKE_S):
            if not server.running:
                raise ServerError(f"the server died with status {server.wait()}", useful_lines(server.log_text()))
            if keeper.lost.is_set():
                if keeper.can_drain:  # without draft or judge the target still answers what is in flight
                    _drain(server, deployment, keeper, stop, front)
                raise ServerError(f"{keeper.why}: the server ends, to be started anew")
            if front is not None:
                front.check()
        if not is_warm:  # the front end let nobody in
            server.stop(_AFTER_DRAIN_S)
            return 0
        with suppress(ServerError, OSError):  # a server that is busy or ending may not say it
            if deployment.loop_config().pace:
                _tell(console, str(sum(server.lateness().values(), Lateness())))
        _tell(console, "stopping: requests in flight may finish")
        return _drain(server, deployment, keeper, stop, front)
    finally:
        keeper.stop()
        server.stop(0.0)


def _tell(console: Console, line: str) -> None:
    """What happens while a server runs. It goes on where nobody can read that: a full disk, a terminal or a pipe that is gone."""
    with suppress(OSError, SystemExit):  # rich leaves the program where a pipe is broken
        console.print(line, highlight=False, soft_wrap=True)


def _deployed(deployment: DeploymentSpec) -> Deployed:
    """What the front end has to know."""
    config = deployment.loop_config()
    needs = (LOOKAHEAD_MODEL, *(role.value for role in deployment.models_here if role is Role.TARGET))
    return Deployed.of(deployment.name, config, needs=needs)


def _unless_lost(server: TritonServer, keeper: StubKeeper, stop: StopRequest, work: Callable[[], Result]) -> Result | None:
    """What the work returns or raises; None once the server is to stop: a model that hangs is not waited for.

    Raises:
        ServerError: a process has died meanwhile. A call that it was to answer is never answered.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    if not stop.event.is_set():
        threading.Thread(target=run, daemon=True).start()
    while not stop.event.is_set():
        if wait((done,), _LOOK_S).done:
            return done.result()
        if keeper.lost.is_set() or keeper.dead:
            why = keeper.why or told_dead(keeper.dead)
            raise ServerError(f"{why}, asked for a first answer", useful_lines(server.log_text()))
    return None


def _warm_up(
    console: Console, server: TritonServer, deployment: DeploymentSpec, stop: StopRequest, until_s: float
) -> WarmupAnswer | None:
    """Ask all that this server has; None where it has no step loop, or is to stop.

    Args:
        until_s: by :func:`time.monotonic`, when all should have answered. Who is asked then has :data:`WARM_UP_S` at least.

    Raises:
        RemoteError: the target lives elsewhere, and is not there.
        WarmupError: something did not answer as it should.
    """

    def left_s() -> float:
        return max(WARM_UP_S, until_s - time.monotonic())

    for role in deployment.models_here:
        warm_engines(server.http_url, [role], key=server.options.engine_key, loop_key=server.loop_key, timeout_s=left_s())
    if not deployment.runs_loop:
        return None
    missing = wait_for_roles(deployment.remotes, deployment.remotes_load_s, stop.event)
    for role, why in missing.items():
        console.print(f"[yellow]without {role}:[/] {escape(why)}", highlight=False, soft_wrap=True)
    if stop.event.is_set():
        return None
    # A draft or judge elsewhere that is there and fails is its own server's affair, as one that is away.
    spared = [role for role in deployment.remotes if role is not Role.TARGET]
    answer = warm_loops(server, deployment.server.num_loops, without=spared, timeout_s=left_s())
    for failed in answer.without.difference(missing):
        console.print(f"[yellow]without {failed}:[/] it is there, and fails", highlight=False, soft_wrap=True)
    return answer


def _drain(
    server: TritonServer, deployment: DeploymentSpec, keeper: StubKeeper, stop: StopRequest, front: FrontendProcess | None
) -> int:
    """Let the step loop answer what it has, and only then tell Triton to end: it refuses the loop's calls from then on.

    A second signal stops the waiting. Returns the exit status: 0 where nothing was left unanswered.
    """
    if front is None:
        return _end_engines(server, deployment.models_here, keeper, stop)
    front.terminate()
    keeper.drain()
    deadline = time.monotonic() + server.options.exit_timeout_s
    while not (stop.impatient or keeper.drained) and server.running and time.monotonic() < deadline:
        if keeper.lost.is_set() and not keeper.can_drain:  # what that process was answering never ends
            break
        time.sleep(_LOOK_S)
    drained = keeper.drained
    keeper.stop()
    # What the loop has answered may still be on its way to slow readers; what it has not will never be.
    until_s = max(time.monotonic() + _AFTER_DRAIN_S, deadline if drained else 0.0)
    while not stop.impatient and front.wait(_LOOK_S) is None and time.monotonic() < until_s:
        pass
    is_cut = front.stop(0.0) == -signal.SIGKILL
    server.stop(0.0 if stop.impatient else _AFTER_DRAIN_S)
    return 0 if drained and not is_cut else 1


def _end_engines(server: TritonServer, models: Sequence[Role], keeper: StubKeeper, stop: StopRequest) -> int:
    """The end of a server without a step loop: by Triton itself, or where it would wait for nothing, by the engines' counts."""
    keeper.stop()
    dead = keeper.dead
    idle = Idleness([role for role in models if role.value not in dead], time.monotonic())
    idle.lasts(server, time.monotonic())  # while all that it has is there to be counted
    server.terminate()
    idle.still_since_s = look_s = time.monotonic()
    while server.running and not stop.impatient:
        time.sleep(_LOOK_S)
        if time.monotonic() < look_s + _WAKE_S:
            continue
        look_s = time.monotonic()
        if idle.lasts(server, look_s) and (dead or idle.iterations):
            server.stop(0.0)
            return 0
    return server.stop(0.0) or 0


def _say_served(
    console: Console,
    server: TritonServer,
    deployment: DeploymentSpec,
    answer: WarmupAnswer | None,
    front: FrontendProcess | None = None,
) -> None:
    """Where the server listens, and a line to try that can be copied: in no box, and wrapped by nobody."""
    console.print(_panel(server, deployment, answer, front))
    if answer is None:
        return
    lines = [curl_line(server.http_url)]
    if front is not None:
        asked = (front.url, deployment.name, QUESTION)
        keyed = front.settings.keys_file is not None
        timeout_s = deployment.loop_config().timeouts.request_s + 30.0  # longer than the front end itself waits
        by_python = examples.python_line(*asked, keyed=keyed, timeout_s=timeout_s)
        lines = [examples.curl_line(*asked, keyed=keyed), by_python, *lines]
    console.print("ask it something, by OpenAI's API or by Triton's:", highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if label := deployment.loop_config().pace:
        console.print(f"[yellow]{label}[/]", highlight=False, soft_wrap=True)


def _panel(server: TritonServer, deployment: DeploymentSpec, answer: WarmupAnswer | None, front: FrontendProcess | None) -> Panel:
    table = Table.grid(padding=(0, 2))
    if front is not None:
        keyed = " (by key)" if front.settings.keys_file else ""
        table.add_row("OpenAI API", f"{front.url}{keyed}")
        table.add_row("metrics", f"{front.url.removesuffix('/v1')}/metrics{keyed}")
    table.add_row("HTTP", f"http://{server.http_url}")
    table.add_row("gRPC", server.grpc_url)
    table.add_row("Triton's metrics" if front is not None else "metrics", f"http://{server.metrics_url}/metrics")
    table.add_row("log", str(server.log_file))
    title = f"lookahead serves {deployment.name}"
    if answer is not None:
        usage = answer.usage
        calls = ", ".join(f"{usage.get(f'num_{role}_calls', 0)} {role}" for role in Role)
        table.add_row("warm-up", f"{usage.get('completion_tokens', 0)} tokens, calls: {calls}")
    else:
        title = f"{' and '.join(deployment.roles_here)} of {deployment.name}"
        table.add_row("open to", "whoever has the engine key" if server.options.engine_key else "everybody on this machine")
    for role, urls in deployment.remotes.items() if deployment.runs_loop else ():
        table.add_row(role, ", ".join(urls))
    return Panel(table, title=title, subtitle="Ctrl-C stops", expand=False)


def _say_built(console: Console, report: BuildReport) -> None:
    for line in report.checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    console.print(f"{'built' if report.written else 'up to date'}: {report.output}", highlight=False, soft_wrap=True)
