"""``lookahead doctor``: what a machine lacks for a deployment."""

from __future__ import annotations

import os
from functools import partial

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli.errors import fail
from lr_backend.cli.help import RolesOption, SpecOption, TritonOption
from lr_backend.cli.ports import OPENAI_PORT, PORTS, HostOption, PortOption, by_option
from lr_backend.engine.address import ENGINE_KEY_VARIABLE, key_from
from lr_backend.errors import LookaheadError
from lr_backend.serve.remotes import check_remotes, why_refused
from lr_backend.serve.server import Ports
from lr_backend.serve.startup_check import Finding, Level, Needs, check, check_files, check_spawns, missing, probe

PIPED_WIDTH = 120
"""Columns of a table that goes to no terminal, which would say how wide it is."""
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.MISSING: "red"}


def doctor(
    spec: SpecOption = "demo",
    host: HostOption = "127.0.0.1",
    http_port: PortOption = PORTS.http,
    grpc_port: PortOption = PORTS.grpc,
    metrics_port: PortOption = PORTS.metrics,
    openai_port: PortOption = OPENAI_PORT,
    tritonserver: TritonOption = None,
    role: RolesOption = None,
) -> None:
    """Check whether this machine has what a deployment needs, and say what to do where it has not."""
    try:
        deployment = DeploymentSpec.load(spec)
        deployment = deployment.only(role) if role else deployment
    except LookaheadError as error:
        fail(error)
    openai = ("127.0.0.1", openai_port) if deployment.runs_loop else None
    needs = Needs.of(deployment, by_option(host, Ports(http_port, grpc_port, metrics_port), openai))
    findings = (*check(probe(tritonserver, needs), needs), *check_spawns(needs.placements), *check_files(deployment))
    if deployment.runs_loop:
        findings += _remote_findings(deployment)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(_findings_table(deployment.name, findings))
    raise typer.Exit(1 if missing(findings) else 0)


def _remote_findings(deployment: DeploymentSpec) -> tuple[Finding, ...]:
    """Of servers elsewhere, asked with the key that the loop's server would say."""
    if not deployment.remotes:
        return ()
    try:
        key = key_from(os.environ, ENGINE_KEY_VARIABLE)
    except LookaheadError as error:
        fail(error)
    return check_remotes(deployment.remotes, refuses=partial(why_refused, key=key))


def _findings_table(name: str, findings: tuple[Finding, ...]) -> Table:
    table = Table("", title=f"this machine for {name}")
    for heading in ("needed", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for each in findings:
        table.add_row(f"[{_COLOURS[each.level]}]{each.level}[/]", escape(each.what), escape(each.found), escape(each.remedy))
    return table
