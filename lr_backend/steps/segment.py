"""Where a step of the reasoning ends, said of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Segmenter(Protocol):
    """Cuts reasoning into steps.

    The end of a step follows from the step's own text. A boundary that the token after it decided would mean to drop that token
    and draw it again; at T > 0 the next one would then not be distributed as the target alone has it.
    """

    @property
    def delimiters(self) -> Sequence[str]:
        """Texts with which a step may end. Engines stop there."""
        ...

    def ends(self, text: str) -> bool:
        """Whether a step that reads ``text`` is over; asked where its last token has just completed a delimiter."""
        ...


@dataclass(frozen=True)
class Delimiter:
    """A step ends with this text (paper: a blank line)."""

    text: str = "\n\n"

    @property
    def delimiters(self) -> Sequence[str]:
        return (self.text,)

    def ends(self, text: str) -> bool:
        return True


BLANK_LINE = Delimiter()
