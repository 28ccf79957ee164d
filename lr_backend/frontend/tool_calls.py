"""Calls of tools in an answer that comes in pieces: JSON between two marks, as Qwen's models and others write it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from lr_backend.steps.text import overlap

OPENS, CLOSES = "<tool_call>", "</tool_call>"
Document = dict[str, Any]


class ToolCalls:
    """Takes the calls out of a text. What is no call that can be read stays text.

    Args:
        most: further ones are left out.

    Attributes:
        found: as OpenAI's API has them.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.found: list[Document] = []
        self._held = self._blank = ""
        self._is_inside = False

    def feed(self, text: str) -> tuple[str, Sequence[Document]]:
        """(text, calls) that are certain with this text. Blanks wait: before a call they say nothing."""
        self._held += text
        told, num_before = "", len(self.found)
        while True:
            if self._is_inside:
                if not self._close():
                    break
            else:
                before, mark, rest = self._held.partition(OPENS)
                ready = (before if mark else before[: len(before) - overlap(before, OPENS)]).rstrip()
                told += ready
                if not mark:
                    self._held = before[len(ready) :]
                    break
                self._held, self._blank, self._is_inside = rest, before[len(ready) :], True
        return told, self.found[num_before:]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = (self._blank + OPENS if self._is_inside else "") + self._held, ""
        return held if held.strip() or not self.found else ""

    def _close(self) -> bool:
        """Whether the call has come to its end, and is taken. An argument may hold the mark itself."""
        end = -1
        while (end := self._held.find(CLOSES, end + 1)) >= 0:
            if (call := _read(self._held[:end])) is not None:
                self._held, self._is_inside = self._held[end + len(CLOSES) :], False
                if self._most is None or len(self.found) < self._most:
                    self.found.append({"id": f"call_{token_hex(12)}", "type": "function", "function": call})
                return True
        return False


def _read(text: str) -> Document | None:
    """The name, and the arguments as JSON text; None: it is no call."""
    try:
        call = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else None


def _no_number(name: str) -> object:
    raise ValueError(name)
