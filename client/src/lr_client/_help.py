"""Help pages that say what an option takes in plain words: TEXT, NUMBER, PATH; nothing for a switch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

_WORDS = {"bool": "", "str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH"}


class Command(TyperCommand):
    """A command whose help page is written so."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with what their help shows of their types."""
        return _written(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """The same for the command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with what their help shows of their types."""
        return _written(super().get_params(ctx), ctx)


def _written(parameters: Iterable[Any], ctx: Any) -> list[Any]:
    """Typer's later releases write ``<str>``; the earlier ones write such words themselves."""
    parameters = list(parameters)
    for each in parameters:
        shown = getattr(each, "display_type", None)
        if shown is not None and each.metavar is None:
            word = "" if each.param_type_name == "argument" else _in_words(shown(ctx))
            each.display_type_rich = lambda ctx, word=word: word
    return parameters


def _in_words(shown: str) -> str:
    inner = shown.strip("<>").removesuffix(" range")
    if inner.startswith("list["):
        inner = inner[len("list[") :].removesuffix("]")
    return _WORDS.get(inner.lower(), inner)
