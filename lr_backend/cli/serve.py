"""``lookahead serve``: build what is stale, start Triton, and serve until asked to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lr_backend.build.emulated_spec import emulated
from lr_backend.build.paced import paced
from lr_backend.build.report import BuildReport
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment, EmulatedDeployment, GpuDeployment
from lr_backend.cli.errors import fail, refuse
from lr_backend.cli.help import SpecOption, TritonOption
from lr_backend.cli.ports import PORTS, HostOption, PortOption, by_option
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.hardware.lateness import Lateness
from lr_backend.serve.launch import launch_plan
from lr_backend.serve.restrictions import admin_key
from lr_backend.serve.server import ServerError, ServerOptions, TritonServer, useful_lines
from lr_backend.serve.startup_check import Machine, Needs, check, check_files, probe, require_ready
from lr_backend.serve.warmup import WarmupAnswer, curl_line, warm_up

_WAKE_S = 0.5
"""A blocking wait is cut into pieces this long, so that a signal is acted upon promptly."""


# Long: its parameters are the command's options.
def serve(
    spec: SpecOption = "demo",
    host: HostOption = "127.0.0.1",
    http_port: PortOption = PORTS.http,
    grpc_port: PortOption = PORTS.grpc,
    metrics_port: PortOption = PORTS.metrics,
    repository: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the model repository is rendered; by default engines/built/<name>."),
    ] = None,
    tritonserver: TritonOption = None,
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
    console = Console()
    try:
        deployment = DeploymentSpec.load(spec)
        if pace is not None:
            deployment = _paced(deployment, pace, paced_as, workload, slow_motion)
        machine = _ready_machine(deployment, host, by_option(http_port, grpc_port, metrics_port), tritonserver)
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


def _ready_machine(deployment: DeploymentSpec, host: str, ports: Mapping[str, int], tritonserver: Path | None) -> Machine:
    """This machine, if it can serve the deployment.

    Raises:
        ConfigError: all that is missing. Of a deployment on GPUs the build that follows checks the files.
    """
    needs = Needs.of(deployment, host, ports)
    machine = probe(tritonserver, needs)
    files = () if isinstance(deployment, GpuDeployment) else check_files(deployment)
    require_ready((*check(machine, needs), *files))
    return machine


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
            _say_served(console, server, deployment, answer)
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


def _say_served(console: Console, server: TritonServer, deployment: DeploymentSpec, answer: WarmupAnswer) -> None:
    """Where the server listens, and a line to try that can be copied: in no box, and wrapped by nobody."""
    console.print(_panel(server, deployment, answer))
    console.print("ask it something:", highlight=False)
    console.print(curl_line(server.http_url), markup=False, highlight=False, soft_wrap=True)
    if label := deployment.loop_config().pace:
        console.print(f"[yellow]{label}[/]", highlight=False, soft_wrap=True)


def _panel(server: TritonServer, deployment: DeploymentSpec, answer: WarmupAnswer) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_row("HTTP", f"http://{server.http_url}")
    table.add_row("gRPC", server.grpc_url)
    table.add_row("metrics", f"http://{server.metrics_url}/metrics")
    table.add_row("log", str(server.log_file))
    usage = answer.usage
    calls = ", ".join(f"{usage.get(f'num_{role}_calls', 0)} {role}" for role in Role)
    table.add_row("warm-up", f"{usage.get('completion_tokens', 0)} tokens, calls: {calls}")
    return Panel(table, title=f"lookahead serves {deployment.name}", subtitle="Ctrl-C stops", expand=False)


def _say_built(console: Console, report: BuildReport) -> None:
    for line in report.checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    console.print(f"{'built' if report.written else 'up to date'}: {report.output}", highlight=False, soft_wrap=True)
