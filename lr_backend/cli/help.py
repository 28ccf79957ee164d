"""Help pages that say what an option takes in words that people write: TEXT, NUMBER, PATH; nothing for a switch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lr_backend.engine import Role

SpecOption = Annotated[str, typer.Option("--spec", metavar="SPEC", help="Name of a spec in engines/, or a path to a TOML file.")]
TritonOption = Annotated[Path | None, typer.Option(metavar="FILE", help="By default the one on PATH, then the wheel's.")]
RolesOption = Annotated[
    list[Role] | None,
    typer.Option("--role", help="This role alone, for a step loop elsewhere; the spec has a url for it. May be repeated."),
]

_WORDS = {"bool": "", "str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "file": "FILE", "directory": "FOLDER"}
_RANGE = re.compile(r"(?:(?P<least>[^<>=]+)<=)?x(?:<=(?P<most>.+)|>=(?P<from>.+))?")


class Command(TyperCommand):
    """A command whose help page is written so."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _written(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """The same for the command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _written(super().get_params(ctx), ctx)


def _written(parameters: Iterable[Any], ctx: Any) -> list[Any]:
    """Typer's later releases write ``<str>`` and ``0<=x<=9``; the earlier ones have none of these methods and need no help."""
    parameters = list(parameters)
    for each in parameters:
        shown, bounds = getattr(each, "display_type", None), getattr(each, "_get_number_range_help_str", None)
        if shown is not None and each.metavar is None:
            each.display_type_rich = _constant(in_words(shown(ctx)))
        elif shown is not None and each.param_type_name == "argument":  # what it takes is its name
            each.display_type_rich = _constant("")
        if bounds is not None and (said := bounds()):
            each._get_number_range_help_str = _constant(range_in_words(said))
    return parameters


def _constant(text: str) -> Callable[..., str]:
    return lambda *_, **__: text


def in_words(shown: str) -> str:
    """``<list[int]>`` is NUMBER, ``<a|b>`` is a|b."""
    inner = shown.strip("<>").removesuffix(" range")
    if inner.startswith("list[") and inner.endswith("]"):
        inner = inner[len("list[") : -1]
    return _WORDS.get(inner.lower(), inner)


def range_in_words(shown: str) -> str:
    """``0<=x<=9`` is ``0 to 9``."""
    match = _RANGE.fullmatch(shown)
    if match is None:
        return shown
    least, most = match["least"] or match["from"], match["most"]
    if least and most:
        return f"{least} to {most}"
    return f"{least} or more" if least else f"{most} or less"
