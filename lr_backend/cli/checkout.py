"""``lookahead eval`` and ``report``: commands of ``bench/``, which a checkout has and a wheel has not."""

from __future__ import annotations

import importlib
import sys

import typer

from lr_backend.cli.errors import fail, refuse
from lr_backend.cli.help import Command
from lr_backend.errors import LookaheadError
from lr_backend.resources import is_checkout, resource_root

_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command whose options are read elsewhere."""


def evaluate(context: typer.Context) -> None:
    """Ask a data set in several modes, keep every answer, and score them (from a checkout, with the extra bench)."""
    _hand_on("bench.evaluation.command", "evaluate", context)


def report_runs(context: typer.Context) -> None:
    """Join runs of eval: accuracy, speed and acceptance as tables and a page with plots (likewise)."""
    _hand_on("bench.evaluation.command", "report", context)


def add_to(app: typer.Typer) -> None:
    """The two commands, by the names that people type."""
    for name, command in (("eval", evaluate), ("report", report_runs)):
        app.command(name, cls=Command, context_settings=_HANDED_ON, add_help_option=False)(command)


def _hand_on(module: str, function: str, context: typer.Context) -> None:
    """Run a command whose libraries a server does without."""
    if not is_checkout():
        refuse(
            f"lookahead {context.info_name} is not in an installed wheel: clone the project, run `make venv` in it, "
            f"and there .venv/bin/lookahead {context.info_name}"
        )
    root = str(resource_root())
    if root not in sys.path:  # an installation from a checkout makes lr_backend alone importable
        sys.path.append(root)
    try:
        command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        refuse(f"{error.name} is not installed: pip install -e '{root}[bench]' '{root}/client'")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(cls=Command)(command)
    try:
        single(list(context.args), prog_name=f"lookahead {context.info_name}")
    except LookaheadError as error:
        fail(error)
