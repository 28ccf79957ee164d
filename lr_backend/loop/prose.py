"""Sentences, code and formulas in text that arrives a token at a time. Pure: no tokens, no clock, no engine.

:class:`Prose` is folded over the texts of tokens; how the text was split over them does not matter to it. It knows inside what
the text stands (a code fence, a formula ...) and its last few characters, which say whether a sentence has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

TAIL_CHARS = 64
"""Text that is remembered: enough for a number, an abbreviation or a list marker, and for any delimiter."""


class Span(StrEnum):
    """What the text stands inside."""

    TEXT = "text"
    FENCE = "fence"
    """Code between lines of three backticks: the only span that goes on past a blank line."""
    CODE = "code"
    """Code between single backticks; ends with the line at the latest."""
    DOLLAR = "dollar"
    """``$...$``; ends with the line at the latest, so that a price hides no more than its line."""
    DOLLARS = "dollars"
    """``$$...$$``."""
    ROUND = "round"
    r"""``\(...\)``."""
    SQUARE = "square"
    r"""``\[...\]``."""


_MARKS = re.compile(r"\\.?|`+|\$\$?|\n")
_CODE_MARKS = re.compile(r"`+|\n")
_IN_LINE = (Span.CODE, Span.DOLLAR)
_IN_PARAGRAPH = (Span.DOLLARS, Span.ROUND, Span.SQUARE)
_OPENING = {"$$": Span.DOLLARS, r"\(": Span.ROUND, r"\[": Span.SQUARE}
_CLOSING = {Span.DOLLARS: "$$", Span.ROUND: r"\)", Span.SQUARE: r"\]"}

_CLOSERS = "\"'”’)\\]*_"
"""May stand between a sentence's mark and the space after it; as a part of a character class."""
_ENDING = re.compile(rf"([.!?])([{_CLOSERS}]*)(\s*)$")
_LIST_MARKER = re.compile(r"\n[ \t>*#-]*[0-9]{1,3}$")
_ABBREVIATION = re.compile(r"(?<![^\W_])(?:e\.g|i\.e|Dr|Mr|Mrs|Ms|vs|cf|Fig|Eq)$")
_BEFORE_A_SURE_POINT = "\"'”’)]}%$`!?"


@dataclass(frozen=True, slots=True)
class Prose:
    """The text so far, as far as it matters for what follows.

    Attributes:
        span: inside what it stands, as far as that is known.
        pending: its end, where what follows decides what that means (two backticks of three, a lone backslash).
        tail: its last characters, ``pending`` included. Text begins at the beginning of a line.
    """

    span: Span = Span.TEXT
    pending: str = ""
    tail: str = "\n"

    @property
    def open(self) -> bool:
        """Outside of code and formulas, and surely so."""
        return self.span is Span.TEXT and not self.pending

    def after(self, text: str) -> Prose:
        """The state with ``text`` added."""
        if not text:
            return self
        span, pending = self._scan(self.pending + text)
        return Prose(span, pending, (self.tail + text)[-TAIL_CHARS:])

    def _scan(self, text: str) -> tuple[Span, str]:
        span, position = self.span, 0
        while (match := (_CODE_MARKS if span in (Span.FENCE, Span.CODE) else _MARKS).search(text, position)) is not None:
            mark, position = match.group(), match.end()
            if position == len(text) and (mark in ("\\", "$") or mark.startswith("`")):
                return span, mark
            # A pending mark is the first one, and no line end: then nothing before it is asked for.
            before = text[match.start() - 1] if match.start() else self.tail[-1:]
            span = _after_mark(span, mark, before=before, following=text[position : position + 1])
        return span, ""


def _after_mark(span: Span, mark: str, *, before: str, following: str) -> Span:
    if mark == "\n":
        closed = span in _IN_LINE or (span in _IN_PARAGRAPH and before == "\n")
        return Span.TEXT if closed else span
    if mark.startswith("`"):
        if span is Span.TEXT:
            return Span.FENCE if len(mark) >= 3 else Span.CODE
        closed = span is Span.CODE or (span is Span.FENCE and len(mark) >= 3)
        return Span.TEXT if closed else span
    if mark == "$" and span in (Span.TEXT, Span.DOLLAR):
        return Span.DOLLAR if span is Span.TEXT and not following.isspace() else Span.TEXT
    if span is Span.TEXT:
        return _OPENING.get(mark, span)
    return Span.TEXT if mark == _CLOSING.get(span) else span


def ends_sentence(tail: str) -> bool:
    """A sentence ends with the last token of ``tail``, whatever follows.

    Not after a number (``3.`` may become ``3.14``; see :func:`may_end_sentence`) unless white space follows it here, not in
    the marker of a list (``1.``), an ellipsis or a common abbreviation unless the line ends too.
    """
    match = _ENDING.search(tail)
    if match is None:
        return False
    mark, closers, space = match.groups()
    before = tail[: match.start()]
    last = before[-1:]
    if not last or last.isspace():
        return False  # ".5" may begin here
    if mark == "?":
        return True
    if mark == "." and _LIST_MARKER.search(before):
        return False
    if "\n" in space:
        return True
    if mark == "!":
        return bool(closers) or not last.isdigit()  # 5! is a number
    if last == "." or _ABBREVIATION.search(before):
        return False
    return bool(closers or space) or _is_sure(last)


def may_end_sentence(tail: str) -> bool:
    """A sentence ends with ``tail`` if white space follows: its last character is the point after a number or the like."""
    last = tail[-2:-1]
    return tail.endswith(".") and not (last.isspace() or last == "." or _is_sure(last) or _LIST_MARKER.search(tail[:-1]))


def _is_sure(last: str) -> bool:
    """No number goes on past a point after this character. (A point that belongs to a word is one token with its letters.)"""
    return last.isalpha() or last in _BEFORE_A_SURE_POINT


def token_may_end_sentence(text: str) -> bool:
    """Some text that ends with this token ends a sentence there."""
    return _ENDING.search(text) is not None


def token_may_close(span: Span, text: str) -> bool:
    """The token may hold the end of ``span``, or of one written over two tokens its last part."""
    closing = "`" if span is Span.FENCE else "$" if span is Span.DOLLARS else _CLOSING[span]
    return closing in text or text.startswith(closing[1:] or closing)
