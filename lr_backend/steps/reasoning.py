"""Where the reasoning of an answer begins and ends, by tokens: a text may quote its marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lr_backend.contract import IntArray
from lr_backend.steps.rules import StepRules

TAIL_TOKENS = 8
"""A chat template that opens or skips the reasoning does so in the last few tokens of the prompt."""


class Reasoning:
    """The reasoning of one answer, whose tokens come step by step.

    Args:
        prompt_ids: the rendered prompt, shape [N].
        text_of: the text of tokens, marks included.

    Attributes:
        goes_on: it has not ended, and may have to begin first. Always true for a model that marks no end.
        is_inside: it has begun, and has a mark that will end it.
    """

    def __init__(self, prompt_ids: IntArray, rules: StepRules, text_of: Callable[[Sequence[int]], str]) -> None:
        self._opening, self._close, self._text_of = rules.think_open_id, rules.think_close_id, text_of
        # What stands before the end of a turn is another answer's.
        tail = prompt_ids[-TAIL_TOKENS:].tolist()
        ends = [index for index, token in enumerate(tail, 1) if token in rules.end_ids]
        self._begins = len(prompt_ids) - len(tail) + max(ends, default=0)
        self._has_begun = self.has_begun(prompt_ids)
        self.goes_on = self._close is None or self._close not in prompt_ids[self._begins :]

    @property
    def is_inside(self) -> bool:
        return self._has_begun and self.goes_on and self._close is not None

    def has_begun(self, prefix: IntArray) -> bool:
        """Whether it has with these tokens, shape [N], prompt included; always true for a model that marks no beginning."""
        return self._opening is None or self._opening in prefix[self._begins :]

    def take(self, ids: Sequence[int]) -> tuple[int, int]:
        """Go on by the next tokens: (begin, end) of the reasoning among them, its marks included.

        Without marks nobody can tell reasoning from answer. A model with marks may answer without any; blank lines say nothing.
        """
        if self._close is None or not self.goes_on:
            return 0, 0
        begin = 0
        if not self._has_begun:
            begin = ids.index(self._opening) if self._opening in ids else len(ids)
            self.goes_on = not self._text_of(ids[:begin]).strip()
            self._has_begun = self.goes_on and begin < len(ids)
            if not self._has_begun:
                return 0, 0
        end = ids.index(self._close, begin) + 1 if self._close in ids[begin:] else len(ids)
        self.goes_on = self._close not in ids[begin:end]
        return begin, end
