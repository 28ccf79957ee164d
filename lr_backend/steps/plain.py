"""Text that stays text: whatever it holds, no token of it is a control token.

Tokenizers look for their control tokens (``<|im_end|>``, ``<think>``) everywhere in what they encode. A question or a step could
so close its turn or end the reasoning. Here such text is cut inside each of them, and its pieces are encoded one by one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, Protocol

from lr_backend.errors import InvalidRequest

_PRIVATE = range(0xE000, 0xF900)
"""Characters that mean nothing; one that a text does not hold marks where it is cut."""


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that encodes text."""

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...


class PlainText:
    """Encodes for one vocabulary.

    Args:
        control: texts of its control tokens, those that a tokenizer finds whether they are called special or not.
    """

    def __init__(self, tokenizer: TextTokenizer, control: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        # One character cannot be cut; none that a model has means anything by itself.
        words = sorted((text for text in set(control) if len(text) > 1), key=len, reverse=True)
        self._found = re.compile(f"(?={'|'.join(map(re.escape, words))})" if words else r"(?!)")

    @classmethod
    def of(cls, tokenizer: Any, *, but: Container[str] = ()) -> PlainText:
        """With all tokens that a Hugging Face tokenizer has beside its vocabulary, ``but`` these."""
        added = [str(each) for each in tokenizer.added_tokens_decoder.values()]
        return cls(tokenizer, [text for text in added if text not in but])

    def num_cuts(self, texts: Iterable[str]) -> int:
        """How often :meth:`cut` cuts them, all together."""
        return sum(1 for text in texts for _ in self._found.finditer(text))

    def cut(self, text: str, mark: str) -> str:
        """The text with ``mark``, which it must not hold, inside each control token."""
        starts = [match.start() + 1 for match in self._found.finditer(text)]
        return mark.join(text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        mark = mark_for(text)
        return self.ids_of_cut(self.cut(text, mark), mark)

    def ids_of_cut(self, text: str, mark: str) -> list[int]:
        """Token ids of a text that holds cut ones; what is not cut counts as what it is."""
        return [token for piece in text.split(mark) for token in self._tokenizer.encode(piece, add_special_tokens=False)]


def mark_for(*texts: str) -> str:
    """A character that none of the texts holds.

    Raises:
        InvalidRequest: they hold them all.
    """
    held = set().union(*texts)
    for number in _PRIVATE:
        if chr(number) not in held:
            return chr(number)
    raise InvalidRequest("text_input", "", "holds every character of Unicode's private use area")
