"""The ``lookahead`` command: one module a command, put together here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console

import lr_backend
from lr_backend.cli import checkout
from lr_backend.cli.build import build
from lr_backend.cli.doctor import doctor
from lr_backend.cli.emulate import emulate
from lr_backend.cli.errors import fail
from lr_backend.cli.help import Command, Group
from lr_backend.cli.init import init
from lr_backend.cli.node import node
from lr_backend.cli.plan import plan
from lr_backend.cli.serve import serve
from lr_backend.cli.trace import trace
from lr_backend.cli.workload import workload
from lr_backend.errors import LookaheadError
from lr_backend.serve.backend_dir import find_tritonserver
from lr_backend.serve.health import DEFAULT_URL, why_not_ready

app = typer.Typer(
    name="lookahead",
    cls=Group,
    help="Lookahead Reasoning behind Triton: build, serve, trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Versions of the server, Python, and the tritonserver that would be run."""
    console = Console()
    console.print(f"lookahead {lr_backend.__version__}, Python {platform.python_version()}", highlight=False)
    try:
        console.print(f"tritonserver {find_tritonserver().binary}", highlight=False, soft_wrap=True)
    except LookaheadError as error:
        console.print(error.message, highlight=False)


def health(
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="What to ask. http://HOST:PORT alone asks a Triton for all its models."),
    ] = DEFAULT_URL,
) -> None:
    """Say whether a server is ready to answer; exit status 0 if so, else 1."""
    reason = why_not_ready(url)
    if reason is not None:
        fail(LookaheadError(reason))
    Console().print(f"{url} is ready", highlight=False, markup=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lookahead {lr_backend.__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not every encoding has all that is said
            stream.reconfigure(errors="replace")
    # The parts of a deployment call one another by gRPC, which would go through a proxy that is there for the web: an empty
    # value says none. An operator who wants one names it here.
    os.environ.setdefault("grpc_proxy", "")


_COMMANDS: tuple[Callable[..., None], ...] = (init, build, plan, emulate, workload, serve, node, doctor, health, trace, version)
for _command in _COMMANDS:
    app.command(cls=Command)(_command)
checkout.add_to(app)
