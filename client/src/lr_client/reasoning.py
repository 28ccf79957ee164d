"""The reasoning and the answer of a text, which the server tells apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Around the reasoning of the models that are served most."""


class ReasoningSplitter:
    """Takes text as it comes, and leaves out the marks. What may be a mark is held back until it is certain.

    Args:
        marks: around the reasoning, in pairs; the first of a pair may be empty. A text may quote them.

    Attributes:
        in_answer: the answer has begun.
    """

    def __init__(self, marks: Iterable[tuple[str, str]] = MARKS) -> None:
        marks = tuple(marks)
        self._openings = [opening for opening, _ in marks if opening]
        self._closings = [closing for _, closing in marks]
        self._has_opened = self.in_answer = False
        self._held = self._blank = ""

    def feed(self, text: str, num_reasoning_chars: int) -> tuple[str, str]:
        """(reasoning, answer) that ``text`` makes certain.

        Args:
            num_reasoning_chars: so many of its characters, from the first on, are reasoning.
        """
        reasoning, answer = text[:num_reasoning_chars], text[num_reasoning_chars:]
        told = self._reasoning(reasoning) if reasoning else ""
        if not answer or self.in_answer:
            return told, answer
        # Blank lines before either say nothing yet.
        if not (self._held or self._has_opened or answer.strip()):
            self._blank += answer
            return told, ""
        told += self._last()
        answer, self._blank = self._blank + answer, ""
        self.in_answer = True
        return told, answer

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        answer, self._blank = self._blank, ""
        return self._last(), answer

    def _reasoning(self, text: str) -> str:
        text, self._held, self._blank = self._held + text, "", ""
        if not self._has_opened:
            begins = text.lstrip()
            if not begins or any(one.startswith(begins) and one != begins for one in self._openings):
                self._held = text
                return ""
            self._has_opened = True
            text = next((begins[len(one) :] for one in self._openings if begins.startswith(one)), text)
        num_held = max((_overlap(text, one) for one in self._closings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _last(self) -> str:
        held, self._held = self._held, ""
        return "" if held in self._closings else held


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that may be ``mark`` or its beginning."""
    lengths = range(min(len(text), len(mark)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)
