"""Where the steps of one request end: at blank lines, at sentences, or at either by length.

A :class:`Segmenter` hands out a :class:`Segment` for every step that is to be written; draft and target share it, so that both
cut alike. Two rules hold for each of them:

*The end of a step follows from the step's own tokens* (and from the prefix). A boundary that the token after it decided would
mean to drop that token and draw it again; at T > 0 the next one would then not be distributed as the target alone has it: a
number of which the target writes more with probability q would go on with q + (1 - q)q. So where only the next token can
tell ("12" "." and then " So", or "5"), that token stays in the step.

*A false stop costs a call.* The engine stops on token ids, which say little: the point of "3.14" stops it as that of a sentence
does. The segment then finds no end and the writer goes on with another call (about a millisecond of the engine's time, and
whatever a request costs in front of it). What keeps this low: stop words for sentences are sent only where sentences may end a
step; inside code and displayed formulas only what closes them is sent; after a number's point the next call asks for one token,
instead of writing a sentence to be thrown away. So a decimal costs two calls, a sentence that ends in a number one; tokens of a
verification need neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.loop.prose import Prose, ends_sentence, may_end_sentence
from lr_backend.loop.steps import StepRules
from lr_backend.request import SegmenterName
from lr_backend.step import Step, StepEnd

_OTHER_TEXT = "\x00"
"""Stands for a token whose text is not known."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """What ends the next engine call of a step.

    Attributes:
        stop_words: ``stop_words_list`` of the contract, shape [2, L].
        max_tokens: new tokens of the call; after them other stop words are due.
    """

    stop_words: IntArray
    max_tokens: int = sys.maxsize


class Segment(Protocol):
    """One step while it is written."""

    def cut(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        """The first step in ``ids``, or None if they hold no end and are fewer than ``max_tokens``.

        A function of the prefix and of the step's own tokens: what ``ids`` holds past the end changes nothing.
        """

    def call_rules(self, written: Sequence[int]) -> CallRules:
        """For the call that continues the step after ``written``."""


class Segmenter(Protocol):
    """Where the steps of one request end. Not thread-safe; it may remember what it has seen."""

    def begin(self, prefix: IntArray) -> Segment:
        """The step after ``prefix``, shape [N]."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All the rest of an answer as one step."""

    rules: StepRules

    def cut(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        return self.rules.cut_answer(ids, max_tokens)

    def call_rules(self, written: Sequence[int]) -> CallRules:
        return CallRules(self.rules.end_words)


@dataclass(frozen=True, slots=True)
class BlankLines:
    """Steps end at the delimiter. Nothing of the prefix matters, so this is its own segment."""

    rules: StepRules

    def begin(self, prefix: IntArray) -> Segment:
        return self

    def cut(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        return self.rules.cut(ids, max_tokens)

    def call_rules(self, written: Sequence[int]) -> CallRules:
        return CallRules(self.rules.stop_words)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Which boundaries of prose end a step.

    Attributes:
        min_tokens: a step that would be shorter goes on to the next boundary.
        soft_tokens: the end of a sentence counts in a step that is longer; the delimiter always does.
    """

    min_tokens: int = 1
    soft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """After one token of a step: the text so far, whether the step has any words yet, and whether it ends here."""

    prose: Prose
    has_words: bool = False
    end: StepEnd | None = None


class ProseSegmenter:
    """Steps end at the delimiter or at the end of a sentence, never inside a number, code or a formula.

    White space alone is no step. Text is followed from ``start`` on: each step begins with the state in which the step before
    it ended, so a prefix is read once, and only a prefix that no step of this request led to is read from ``start``.

    Args:
        start: tokens of the prompt; code or formulas that it leaves open are closed.
    """

    def __init__(self, rules: StepRules, lengths: Lengths, start: int) -> None:
        self._rules = rules
        self._lengths = lengths
        self._start = start
        self._known: dict[bytes, Prose] = {}

    def begin(self, prefix: IntArray) -> Segment:
        # Hashing the prefix takes about as long as copying it into a call.
        digest = blake2b(_bytes(prefix), digest_size=16)
        prose = self._known.get(digest.digest())
        if prose is None:
            prose = Prose()
            for token in prefix[self._start :].tolist():
                prose = follow(prose, token, self._rules)

        def ended(step: Step, prose: Prose) -> None:
            longer = digest.copy()
            longer.update(_bytes(step.ids))
            self._known[longer.digest()] = prose

        return _ProseSegment(self._rules, self._lengths, _Place(prose), ended)


class _Ended(Protocol):
    def __call__(self, step: Step, prose: Prose) -> None: ...


@dataclass
class _ProseSegment:
    """Follows the ids that it is asked about, and keeps what is known of them: those of one step mostly grow."""

    rules: StepRules
    lengths: Lengths
    before: _Place
    ended: _Ended
    _ids: list[int] = field(default_factory=list)
    _places: list[_Place] = field(default_factory=list)

    def cut(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        self._follow(ids[:max_tokens])
        num_tokens = len(self._places)
        last = self._places[-1] if self._places else self.before
        end = last.end or (StepEnd.CAP if num_tokens >= max_tokens else None)
        if end is None:
            return None
        step = self.rules.step(ids[:num_tokens], end)
        self.ended(step, last.prose)
        return step

    def call_rules(self, written: Sequence[int]) -> CallRules:
        self._follow(written)
        prose = (self._places[-1] if self._places else self.before).prose
        if not prose.pending and (words := self.rules.span_words.get(prose.span)) is not None:
            return CallRules(words)
        num_hard = self.lengths.soft_tokens - len(written)
        if num_hard > 0:
            return CallRules(self.rules.stop_words, num_hard)
        undecided = prose.open and may_end_sentence(prose.tail)
        return CallRules(self.rules.sentence_words, 1 if undecided else sys.maxsize)

    def _follow(self, ids: Sequence[int]) -> None:
        """Places up to the first end in ``ids``, or to the last of them."""
        same = next((at for at, (old, new) in enumerate(zip(self._ids, ids, strict=False)) if old != new), None)
        del self._ids[len(ids) if same is None else same :]
        del self._places[len(self._ids) :]
        place = self._places[-1] if self._places else self.before
        for token in ids[len(self._ids) :]:
            if place.end is not None:
                return
            place = self._next(place, token, len(self._ids) + 1)
            self._ids.append(token)
            self._places.append(place)

    def _next(self, place: _Place, token: int, num_tokens: int) -> _Place:
        rules, text = self.rules, self.rules.texts.get(token, _OTHER_TEXT)
        prose = follow(place.prose, token, rules)
        if token in rules.end_ids:
            return _Place(prose, end=StepEnd.END)
        if token == rules.think_close_id:
            return _Place(prose, end=StepEnd.THINK_CLOSE)
        has_words = place.has_words or bool(text.strip())
        if not has_words or not prose.open or num_tokens < self.lengths.min_tokens:
            return _Place(prose, has_words)
        if _holds_delimiter(rules.delimiter, place, text):
            return _Place(prose, has_words, StepEnd.DELIMITER)
        if num_tokens > self.lengths.soft_tokens and self._ends_sentence(place.prose, token, text, prose):
            return _Place(prose, has_words, StepEnd.SENTENCE)
        return _Place(prose, has_words)

    def _ends_sentence(self, before: Prose, token: int, text: str, prose: Prose) -> bool:
        if before.open and may_end_sentence(before.tail) and text[:1].isspace():
            # Not where a number may begin: it would be cut in two.
            return text.isspace() or text[-1].isalpha()
        return token in self.rules.sentence_ids and ends_sentence(prose.tail)


def _holds_delimiter(delimiter: str, place: _Place, text: str) -> bool:
    """With ``text`` added, the step's words are followed by the delimiter; one in front of all words ends nothing."""
    if not place.has_words:
        head, found, _ = text.partition(delimiter)
        return bool(found and head.strip())
    return bool(text) and delimiter in (place.prose.tail + text)[-len(text) - len(delimiter) + 1 :]


def follow(prose: Prose, token: int, rules: StepRules) -> Prose:
    """The text with one token more; nothing that the reasoning left open reaches into the answer."""
    return Prose() if token == rules.think_close_id else prose.after(rules.texts.get(token, _OTHER_TEXT))


def _bytes(ids: Sequence[int] | IntArray) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def make_segmenter(name: SegmenterName, rules: StepRules, adaptive: Lengths, start: int) -> Segmenter:
    """The segmenter of a request whose prompt has ``start`` tokens."""
    if name is SegmenterName.BLANK_LINE:
        return BlankLines(rules)
    return ProseSegmenter(rules, adaptive if name is SegmenterName.ADAPTIVE else Lengths(), start)
