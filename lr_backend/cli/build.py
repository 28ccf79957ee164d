"""``lookahead build``: a spec becomes a model repository, with its engines where it has any."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.pace import pace_of, system_of
from lr_backend.build.report import BuildReport, admission_table, memory_table
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.build.trtllm_commands import NGC_TOOLS, Toolchain
from lr_backend.cli.errors import fail
from lr_backend.cli.help import SpecOption
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.hardware.profile import find, label_of
from lr_backend.plan.both_placements import both_placements, placements_table
from lr_backend.plan.equal_gpus import measure, uses, uses_table
from lr_backend.request import Mode
from lr_backend.serve.startup_check import Level, Needs, check_decoder, probe_decoder, require_ready

USES_TEXTS = Workload(
    0.6, token_agreement=0.75, word_agreement=0.5, prompt_tokens=1000, step_tokens=25, step_spread=0.9, num_steps=24
)
"""What a dry run compares the uses of cards for."""


def build(
    spec: SpecOption = "demo",
    role: Annotated[
        list[Role] | None,
        typer.Option(
            help="Build this engine alone; keep the rest of an earlier build. If the spec has a url for it, "
            "it is built for a server of its own, and the option may be repeated, as for serve."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to; by default engines/built/<name>.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan only. Engines on GPUs: render the repository if --output is given.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a failed build of engines stopped.")] = False,
    examples: Annotated[
        Path, typer.Option(metavar="FOLDER", help="TensorRT-LLM's examples: its converters.")
    ] = NGC_TOOLS.examples,
) -> None:
    """Check a spec's checkpoints, compile its engines where it has any, and render its Triton model repository."""
    console = Console()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    try:
        deployment = DeploymentSpec.load(spec)
        deployment, alone = _part(deployment, role or [])
        _check_decoder(console, deployment, dry_run)
        if isinstance(deployment, GpuDeployment):
            report = build_gpu_deployment(
                deployment,
                output,
                role=alone,
                dry_run=dry_run,
                resume=resume,
                command=command,
                console=console,
                announce=lambda planned: _print_plan(console, planned),
                tools=Toolchain(examples=examples),
            )
        else:
            report = build_repository(deployment, output, role=alone, dry_run=dry_run, command=command)
    except LookaheadError as error:
        fail(error)
    if dry_run and isinstance(deployment, GpuDeployment):
        _print_uses(console, deployment)
    _print_report(console, report)


def _part(deployment: DeploymentSpec, roles: Sequence[Role]) -> tuple[DeploymentSpec, Role | None]:
    """What is built, and of that the one engine, if it is not all.

    Raises:
        ConfigError: several roles, and one of them is the step loop's own server's.
    """
    if len(set(roles)) == 1 and not deployment.engine(roles[0]).url:
        return deployment, roles[0]
    return (deployment.only(roles), None) if roles else (deployment, None)  # a server of roles has a repository of its own


def _check_decoder(console: Console, deployment: DeploymentSpec, dry_run: bool) -> None:
    """Raises: ConfigError: the deployment needs the decoder in C, and it is not there. A dry run warns."""
    needs = Needs.of(deployment)
    findings = check_decoder(probe_decoder(needs), needs.decoder)
    if not dry_run:
        require_ready(findings)
    for each in findings:
        if each.level is not Level.OK:
            console.print(f"[yellow]{each.what}[/] {escape(f'{each.found}; {each.remedy}')}", highlight=False, soft_wrap=True)


def _print_report(console: Console, report: BuildReport) -> None:
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
        both = both_placements(deployment, system, USES_TEXTS)
    except ConfigError as error:
        console.print(f"[yellow]other uses of its cards are not compared:[/] {escape(error.message)}", soft_wrap=True)
        return
    wide = _wide(console)
    alone_ms = min((row.ms_a_token for row in rows if row.mode == Mode.AR), default=nan)
    wide.print(placements_table(both.found, alone_ms))
    wide.print(uses_table(rows, f"{cards} x {deployment.hardware.gpu}: one request, acceptance {USES_TEXTS.acceptance_rate:g}"))
    for name, why in (*both.left_out.items(), *chosen.left_out.items()):
        console.print(f"[yellow]left out[/] {name}: {escape(why)}", highlight=False, soft_wrap=True)
    profiles = [find(pace_of(deployment, role, system).profile) for role in Role]
    console.print(f"[dim]predicted by the step loop over scripted texts; {label_of(profiles)}[/]", soft_wrap=True)


def _wide(console: Console) -> Console:
    """A table is not folded where nobody looks at it as it is printed."""
    return Console(width=max(console.width, 150)) if not console.is_terminal else console


def _print_plan(console: Console, report: BuildReport) -> None:
    """What engines on GPUs need, and the commands that make them."""
    if report.memory:
        _wide(console).print(memory_table(report.memory), highlight=False)
        for role, origin in report.origins.items():
            console.print(f"sizes of {role}: {origin}", highlight=False, soft_wrap=True)
    if report.admission:
        _wide(console).print(admission_table(report.admission), highlight=False)
    for line in report.notes:
        console.print(line, highlight=False, soft_wrap=True)
    for line in report.warnings:
        console.print(f"[yellow]warning[/] {escape(line)}", highlight=False, soft_wrap=True)
    for step in report.steps:
        console.print(f"[bold]{step.role}: {step.name}[/]", highlight=False)
        console.print(step.command.shell(), highlight=False, markup=False, soft_wrap=True)
