"""Where the reasoning ends and the answer begins. Pure."""

from __future__ import annotations

THINK = "<think>"
END_THINK = "</think>"


def split_reasoning(text: str, *, num_reasoning_tokens: int = 0) -> tuple[str, str]:
    """The reasoning and the answer of a whole text, without tags and outer blanks.

    A text with no ``</think>`` was cut while reasoning if it opens with ``<think>`` or the server counted
    reasoning tokens (some chat templates put the opening tag into the prompt); else all of it is the answer.
    """
    reasoning, tag, answer = text.partition(END_THINK)
    if not tag and not reasoning.lstrip().startswith(THINK) and num_reasoning_tokens == 0:
        return "", text.strip()
    return reasoning.strip().removeprefix(THINK).strip(), answer.strip()


class ReasoningSplitter:
    """``str.partition("</think>")`` for text in pieces; a tag cut in two is held back until it is whole."""

    def __init__(self) -> None:
        self.in_answer = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What of ``text``, and of text held back before, belongs to the reasoning and to the answer."""
        if self.in_answer:
            return "", text
        reasoning, tag, answer = (self._held + text).partition(END_THINK)
        if tag:
            self.in_answer, self._held = True, ""
            return reasoning, answer
        num_held = _overlap(reasoning)
        self._held = reasoning[len(reasoning) - num_held :]
        return reasoning[: len(reasoning) - num_held], ""

    def flush(self) -> str:
        """Reasoning still held back at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a tag."""
    lengths = range(min(len(text), len(END_THINK) - 1), 0, -1)
    return next((length for length in lengths if END_THINK.startswith(text[-length:])), 0)
