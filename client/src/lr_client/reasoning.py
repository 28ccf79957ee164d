"""Where the reasoning ends and the answer begins. Pure."""

from __future__ import annotations

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Around the reasoning of the models that are served most."""


def split_reasoning(text: str, *, is_cut: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text, without marks and outer blanks.

    A text without an end of the reasoning was cut inside it if it opens with a mark, or if ``is_cut``: the
    server counted all of its tokens as reasoning (some chat templates put the opening mark into the
    prompt). Else all of it is the answer.
    """
    for opening, closing in MARKS:
        reasoning, mark, answer = text.partition(closing)
        if mark or reasoning.lstrip().startswith(opening):
            return reasoning.strip().removeprefix(opening).strip(), answer.strip()
    return (text.strip(), "") if is_cut else ("", text.strip())


class ReasoningSplitter:
    """``str.partition`` at a closing mark, for text in pieces: half a mark is held back until it is whole."""

    def __init__(self) -> None:
        self.in_answer = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What of ``text``, and of text held back before, belongs to the reasoning and to the answer."""
        if self.in_answer:
            return "", text
        text = self._held + text
        found = [(at, closing) for _, closing in MARKS if (at := text.find(closing)) >= 0]
        if found:
            at, closing = min(found)
            self.in_answer, self._held = True, ""
            return text[:at], text[at + len(closing) :]
        num_held = max(_overlap(text, closing) for _, closing in MARKS)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], ""

    def flush(self) -> str:
        """Reasoning still held back at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, closing: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``closing``."""
    lengths = range(min(len(text), len(closing) - 1), 0, -1)
    return next((length for length in lengths if closing.startswith(text[-length:])), 0)
