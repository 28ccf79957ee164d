"""Where the reasoning ends and the answer begins. Pure."""

from __future__ import annotations

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Around the reasoning of the models that are served most."""


_LONGEST = max(len(opening) for opening, _ in MARKS)


def split_reasoning(text: str, *, is_cut: bool = False, has_none: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text, without marks and outer blanks.

    A text without an end of the reasoning was cut inside it if it opens with a mark, or if ``is_cut``: the
    server counted all of its tokens as reasoning (some chat templates put the opening mark into the
    prompt). Else all of it is the answer. So it is with ``has_none``, whatever it holds, where no mark opens
    it: the server counted none of its tokens as reasoning.
    """
    opening, closings = _marks_of(text)
    if has_none and not opening:
        reasoning, answer = "", text
    elif end := _first_end(text, closings):
        reasoning, answer = text[: end[0]], text[end[1] :]
    elif is_cut or opening:
        reasoning, answer = text, ""
    else:
        reasoning, answer = "", text
    return reasoning.strip().removeprefix(opening).strip(), answer.strip()


class ReasoningSplitter:
    """``str.partition`` at a closing mark, for text in pieces: half a mark is held back until it is whole."""

    def __init__(self) -> None:
        self.in_answer = False
        self._begin = ""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What of ``text``, and of text held back before, belongs to the reasoning and to the answer."""
        if self.in_answer:
            return "", text
        self._begin = (self._begin + text).lstrip()[:_LONGEST]
        _, closings = _marks_of(self._begin)
        text = self._held + text
        if end := _first_end(text, closings):
            self.in_answer, self._held = True, ""
            return text[: end[0]], text[end[1] :]
        num_held = max(_overlap(text, closing) for closing in closings)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], ""

    def flush(self) -> str:
        """Reasoning still held back at the end of the text."""
        held, self._held = self._held, ""
        return held


def _marks_of(text: str) -> tuple[str, tuple[str, ...]]:
    """The mark that opens a text, and those that may close its reasoning: all where none opens it."""
    for opening, closing in MARKS:
        if text.lstrip().startswith(opening):
            return opening, (closing,)
    return "", tuple(closing for _, closing in MARKS)


def _first_end(text: str, closings: tuple[str, ...]) -> tuple[int, int] | None:
    """Where the first closing mark begins and ends."""
    found = [(at, at + len(closing)) for closing in closings if (at := text.find(closing)) >= 0]
    return min(found, default=None)


def _overlap(text: str, closing: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``closing``."""
    lengths = range(min(len(text), len(closing) - 1), 0, -1)
    return next((length for length in lengths if closing.startswith(text[-length:])), 0)
