"""How a command ends that cannot do what it was asked for: one line on stderr, and an exit status."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from lr_backend.errors import LookaheadError


def refuse(message: str) -> NoReturn:
    """Options that cannot be: exit status 2."""
    _say(message)
    raise typer.Exit(2) from None


def fail(error: LookaheadError) -> NoReturn:
    """A failure (a server's reasons may follow on their own lines): exit status 1."""
    _say(error.message)
    raise typer.Exit(1)


def write(path: Path, text: str) -> None:
    """Write a file that was asked for; exit status 1 where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(LookaheadError(f"cannot write {path}: {error.strerror}"))


def _say(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
