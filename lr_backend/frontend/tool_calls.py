"""Calls of tools in an answer that comes in pieces: JSON between two marks, as Qwen's models and others write it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from lr_backend.request import MAX_NESTING, is_nested_deeper
from lr_backend.steps.rules import CALL_MARKS
from lr_backend.steps.text import overlap

OPENS, CLOSES = CALL_MARKS
BLANKS = " \t\r\n"
MAX_FALSE_STARTS = 64
"""After so many marks behind which no call was, the rest of an answer is text: each costs a look through all that follows."""
UNFINISHED = 16
"""A fault so near the end of what is there may be of a word or a number that goes on."""
Document = dict[str, Any]
Found = tuple[str, Sequence[Document]]
"""Text, and calls as OpenAI's API has them."""


class ToolCalls:
    """Takes the calls out of a text. What is no call that can be read stays text.

    Args:
        max_calls: further ones are left out; None: none is.

    Attributes:
        found: all calls so far, as OpenAI's API has them.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self.found: list[Document] = []
        self._held = self._blank = ""
        self._is_inside = False
        self._num_false_starts = 0

    def feed(self, text: str, *, is_last: bool = False) -> Found:
        """What is certain with this text. Blanks wait: before a call they say nothing.

        Args:
            is_last: no more follows, so that all is certain.
        """
        self._held += text
        told, num_before = "", len(self.found)
        while True:
            if self._is_inside:
                released = self._look(is_last=is_last)
                if released is None:
                    break
                told += released
                continue
            before, mark, rest = self._held.partition(OPENS)
            if self._num_false_starts == MAX_FALSE_STARTS:
                before, mark = self._held, ""
            ready = (before if mark else before[: len(before) - overlap(before, OPENS)]).rstrip()
            told += ready
            if not mark:
                self._held = before[len(ready) :]
                break
            self._held, self._blank, self._is_inside = rest, before[len(ready) :], True
        if is_last:
            told += self._held if self._held.strip() or not self.found else ""
            self._held = ""
        return told, self.found[num_before:]

    def _look(self, *, is_last: bool) -> str | None:
        """Behind a mark: take the call, or release the mark as text; None: wait. JSON says where a call ends: an argument may
        hold the mark. At the end of an answer the closing one may be missing."""
        text = self._held.lstrip(BLANKS)
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text)
        except json.JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated string") or error.pos > len(text) - UNFINISHED
            if not is_last and is_open and text[:1] in ("", "{"):
                return None
            return self._release()
        except (ValueError, RecursionError):  # a number of thousands of digits; far too deep
            return self._release()
        call, rest = _call_of(value), text[end:].lstrip(BLANKS)
        if call is not None and (rest.startswith(CLOSES) or (is_last and not rest)):
            self._take(call, rest.removeprefix(CLOSES))
            return ""
        return None if call is not None and not is_last and CLOSES.startswith(rest) else self._release()

    def _take(self, call: Document, rest: str) -> None:
        self._held, self._is_inside = rest, False
        if self._max_calls is None or len(self.found) < self._max_calls:
            self.found.append({"id": f"call_{token_hex(12)}", "type": "function", "function": call})

    def _release(self) -> str:
        self._is_inside = False
        self._num_false_starts += 1
        return self._blank + OPENS


def _call_of(value: object) -> Document | None:
    """The name, and the arguments as JSON text; None: it is no call, or none that could be sent back."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments") or {}
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or is_nested_deeper(arguments, MAX_NESTING):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return {"name": name, "arguments": text}
