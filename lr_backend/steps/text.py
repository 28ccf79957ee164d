"""Committed tokens become text that is never withdrawn.

Two things force text to be held back: a character whose bytes are split over tokens, and the beginning of what may become a
stop string. Both are released with the text that settles them, or at the end.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from lr_backend.steps.step import StepTokenizer

_INCOMPLETE = "\ufffd"
CONTEXT_TOKENS = 8
"""Of the text before, with which new tokens are decoded: some tokenizers drop a blank at the beginning of what they decode."""


def text_of(tokenizer: StepTokenizer, ids: Iterable[int], hidden_ids: Container[int] | None = None) -> str:
    """The text of tokens without special ones, or only without ``hidden_ids``: a mark of the reasoning may be a special token."""
    if hidden_ids is None:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return str(tokenizer.decode([one for one in ids if one not in hidden_ids], skip_special_tokens=False))


class TextStream:
    """Incremental detokenizer of one answer with stop strings. Not thread-safe; owned by one request.

    Attributes:
        stopped: a stop string is complete.
        num_last: tokens of the last push, up to the one that completes a stop string.
        num_held: characters that are held back, since a stop string may have begun.
    """

    def __init__(
        self,
        tokenizer: StepTokenizer,
        stop: Sequence[str] = (),
        hidden_ids: Container[int] | None = None,
        *,
        goes_on: Sequence[int] = (),
    ) -> None:
        """
        Args:
            hidden_ids: as in :func:`text_of`.
            goes_on: tokens whose text the answer goes on with.
        """
        self._tokenizer, self._hidden_ids = tokenizer, hidden_ids
        self._stop = tuple(stop)
        self._context_ids: list[int] = []
        self._remember(goes_on)
        self._pending_ids: list[int] = []
        self._held = ""
        self.stopped = False
        self.num_last = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, ids: Sequence[int]) -> str:
        """Text that ``ids`` makes final. Sets ``stopped`` when a stop string is complete; text before it is returned."""
        if self.stopped or not ids:
            self.num_last = 0
            return ""
        before = [*self._context_ids], [*self._pending_ids], self._held
        self.num_last, text = len(ids), self._push(ids)
        return self._push_singly(ids, *before) if self.stopped else text

    def _push_singly(self, ids: Sequence[int], context_ids: list[int], pending_ids: list[int], held: str) -> str:
        """The same from before that push: which token completes a stop string, and the first of several, does not depend on what
        is pushed together."""
        self._context_ids, self._pending_ids, self._held, self.stopped = context_ids, pending_ids, held, False
        texts: list[str] = []
        while not self.stopped and len(texts) < len(ids):
            texts.append(self._push([ids[len(texts)]]))
        self.num_last = len(texts)
        return "".join(texts)

    def _push(self, ids: Sequence[int]) -> str:
        self._pending_ids.extend(ids)
        text = self._pending_text()
        # At the end of the answer it may stay incomplete: a stop string before it must be seen now, to be what ends the answer.
        if text.endswith(_INCOMPLETE) and not any(stop in self._held + text for stop in self._stop):
            return ""
        self._remember(self._pending_ids)
        self._pending_ids.clear()
        return self._release(text)

    def flush(self) -> str:
        """What was still held back; call once, when the answer has ended."""
        if self.stopped:
            return ""
        text = self._release(self._pending_text())
        self._pending_ids.clear()
        held, self._held = self._held, ""
        return text + ("" if self.stopped else held)

    def _remember(self, ids: Sequence[int]) -> None:
        self._context_ids = [*self._context_ids, *ids][-CONTEXT_TOKENS:]
        while _INCOMPLETE in self._decode(self._context_ids):  # it begins inside a character
            del self._context_ids[0]

    def _pending_text(self) -> str:
        before, whole = self._decode(self._context_ids), self._decode([*self._context_ids, *self._pending_ids])
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending_ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return text_of(self._tokenizer, ids, self._hidden_ids) if ids else ""

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [index for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
