"""Where the reasoning ends and the answer begins, in text that comes in pieces. Pure."""

from __future__ import annotations

from enum import Enum

from lr_backend.steps.text import overlap


class _At(Enum):
    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"


class Splitter:
    """Splits one answer at the deployment's markers, which are left out. A marker cut in two is held back until it is whole.

    Args:
        think_open, think_close: the markers; without a second one everything is content.
        inside: the prompt has opened the reasoning. Else an answer that does not begin with ``think_open`` has none.
    """

    def __init__(self, think_open: str | None, think_close: str | None, *, inside: bool) -> None:
        self._open, self._close = think_open or "", think_close or ""
        self._inside = inside
        self._at = _At.START if self._close else _At.CONTENT
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that ``text`` makes certain."""
        text, self._held = self._held + text, ""
        if self._at is _At.START:
            text = self._begun(text)
        if self._at is _At.REASONING:
            reasoning, marker, content = text.partition(self._close)
            if marker:
                self._at = _At.CONTENT
                return reasoning, content
            held = overlap(text, self._close)
            self._held = text[len(text) - held :]
            return text[: len(text) - held], ""
        return ("", text) if self._at is _At.CONTENT else ("", "")

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self._at is _At.REASONING or (self._at is _At.START and self._inside) else ("", held)

    def _begun(self, text: str) -> str:
        """Text after the opening marker; or held back while it may still become one."""
        begins = text.lstrip()
        if self._open and begins.startswith(self._open):
            self._at = _At.REASONING
            return begins[len(self._open) :]
        if not begins or (self._open and self._open.startswith(begins)):
            self._held = text
            return ""
        self._at = _At.REASONING if self._inside else _At.CONTENT
        return text
