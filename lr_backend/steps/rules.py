"""What a step is, on token ids.

A step ends at the first token with which its text holds a delimiter (:mod:`~lr_backend.steps.segment`), at an end token, at the
end of the reasoning, or at a cap. The delimiter hides inside many tokens (``".\\n\\n"``) and across two (``"\\n" + "\\n"``), so
the rule is about text. It is worked out once for the vocabulary, and then needs token ids alone. Pure: no clock, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any

from lr_backend.contract import IntArray, encode_stop_words
from lr_backend.errors import ConfigError
from lr_backend.steps.segment import BLANK_LINE, Delimiter, Segmenter
from lr_backend.steps.step import Step, StepEnd, StepTokenizer

MAX_PAIRS = 256
"""Stop words for a delimiter split over two tokens."""
_OTHER_TEXT = "\x00"
"""Stands for a token without any character of the delimiter."""

Cut = Callable[[Sequence[int], int], Step | None]
"""(tokens so far, most tokens) -> the first step in them, or None if they hold no end and are fewer."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a stretch of text ends.

    Attributes:
        stop_words: of engine calls that write it (``stop_words_list`` of the contract, shape [2, L]).
    """

    cut: Cut
    stop_words: IntArray


CALL_MARKS = ("<tool_call>", "</tool_call>")
"""Around a call of a tool, by Qwen and others."""
THINK_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Around the reasoning, by the models that there are."""


def special_ids(tokenizer: StepTokenizer) -> frozenset[int]:
    """Tokens that ``skip_special_tokens`` leaves out. Those without a role of their own may be missing in ``all_special_ids``."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, one in added.items() if getattr(one, "special", False)}


@dataclass(frozen=True)
class StepRules:
    """Where steps end, for one vocabulary.

    Attributes:
        pieces: text of the tokens that hold a character of a delimiter; all others count as other text. Of all tokens, where the
            segmenter is more than a delimiter.
        end_ids: tokens that end the answer.
        think_open_id, think_close_id: tokens around the reasoning, or None.
        closing_ids: tokens below which nothing is speculated: ends, think-close, tool markers.
        marker_ids: tokens on which a drafted and a target step must agree exactly: those, think-open and all special ones.
        answer_ids: tokens that close the reasoning and lead to the answer, as templates write them: think-close and a blank line.
        tool_ids: tokens around a tool call, which is never taken for its meaning.
        stop_words: for engine calls that write a step (delimiter tokens and pairs, end ids, think-close).
        end_words: for engine calls that run to the end of the answer.
        hidden_ids: tokens that have no place in the text; None: all special ones, of which no mark of reasoning or call is one.
        num_ids: one more than the vocabulary's highest. A model's logits may be wider. An id beyond has no text, and another may
            refuse it. So it is a marker below which nothing is speculated.
    """

    segmenter: Segmenter
    pieces: Mapping[int, str]
    end_ids: frozenset[int]
    think_open_id: int | None
    think_close_id: int | None
    closing_ids: frozenset[int]
    marker_ids: frozenset[int]
    tool_ids: frozenset[int]
    stop_words: IntArray
    end_words: IntArray
    answer_ids: tuple[int, ...] = ()
    hidden_ids: frozenset[int] | None = None
    num_ids: int | None = None

    @classmethod
    def build(
        cls,
        segmenter: Segmenter,
        pieces: Mapping[int, str],
        end_ids: Iterable[int],
        think_open_id: int | None = None,
        think_close_id: int | None = None,
        tool_ids: Iterable[int] = (),
    ) -> StepRules:
        """Work out the stop lists.

        Pairs cover a delimiter split over two tokens. They are bounded by :data:`MAX_PAIRS`, shortest texts first; whatever slips
        through is cut by :meth:`cut`, at the price of the tokens that were written behind it.
        """
        ends = frozenset(end_ids)
        if not ends:
            raise ConfigError("the tokenizer names no end token")
        close = frozenset() if think_close_id is None else frozenset({think_close_id})
        delimiters = segmenter.delimiters
        relevant = {token: text for token, text in pieces.items() if set(text) & set("".join(delimiters))}
        whole = sorted(token for token, text in relevant.items() if _holds(text, delimiters))
        parts = {token: text for token, text in relevant.items() if not _holds(text, delimiters)}
        always = _singles([*sorted(ends), *sorted(close)])
        words = [*always, *_singles(whole), *_split_pairs(delimiters, parts)]
        tools = frozenset(tool_ids)
        closing = tools | ends | close
        return cls(
            segmenter=segmenter,
            pieces=relevant if isinstance(segmenter, Delimiter) else dict(pieces),
            end_ids=ends,
            think_open_id=think_open_id,
            think_close_id=think_close_id,
            closing_ids=closing,
            marker_ids=closing | (frozenset() if think_open_id is None else {think_open_id}),
            answer_ids=() if think_close_id is None else (think_close_id,),
            tool_ids=tools,
            stop_words=encode_stop_words(words),
            end_words=encode_stop_words(_singles(sorted(ends))),
        )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: StepTokenizer,
        end_ids: Iterable[int],
        *,
        segmenter: Segmenter = BLANK_LINE,
        think_open: str | None = "<think>",
        think_close: str | None = "</think>",
        markers: Sequence[str] = (),
    ) -> StepRules:
        """Read the pieces of a whole vocabulary (one pass at start-up)."""
        special = special_ids(tokenizer)
        vocabulary: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        num_ids = 1 + max((len(tokenizer) - 1, *vocabulary.values(), *special))  # there may be gaps
        texts = tokenizer.batch_decode([[token] for token in range(num_ids)], skip_special_tokens=False)
        open_id = single_token(tokenizer, think_open) if think_open else None
        close_id = single_token(tokenizer, think_close) if think_close else None
        tool_ids = [token for text in markers if (token := single_token(tokenizer, text)) is not None]
        rules = cls.build(segmenter, dict(enumerate(texts)), end_ids, open_id, close_id, tool_ids)
        marks = {open_id, close_id, *(single_token(tokenizer, text) for text in CALL_MARKS if text in markers)}
        hidden = (special | set(end_ids)) - marks if special & marks or not special.issuperset(end_ids) else None
        # Nobody reads special tokens, so nobody could say that two steps that differ in them mean the same.
        led = tuple(tokenizer.encode(f"{think_close}\n\n", add_special_tokens=False)) if close_id is not None else ()
        return replace(
            rules,
            marker_ids=rules.marker_ids | special,
            answer_ids=led if led[:1] == (close_id,) else rules.answer_ids,
            hidden_ids=hidden,
            num_ids=num_ids,
        )

    @property
    def of_step(self) -> Ending:
        return Ending(self.cut, self.stop_words)

    @property
    def of_answer(self) -> Ending:
        """Only the end of the answer matters."""
        return Ending(self.cut_answer, self.end_words)

    def cut(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        """The first step in ``ids``, or None if they hold no end and are fewer than ``max_tokens``."""
        delimiters = self.segmenter.delimiters
        text = ""
        for count, token in enumerate(ids[:max_tokens], start=1):
            if token in self.end_ids:
                return self.step(ids[:count], StepEnd.END)
            if token == self.think_close_id:
                return self.step(ids[:count], StepEnd.THINK_CLOSE)
            piece = self.pieces.get(token, _OTHER_TEXT)
            is_candidate = _completes(text, piece, delimiters)
            text += piece
            if is_candidate and self.segmenter.ends(text):
                return self.step(ids[:count], StepEnd.DELIMITER)
        return self.step(ids[:max_tokens], StepEnd.CAP) if len(ids) >= max_tokens else None

    def cut_answer(self, ids: Sequence[int], max_tokens: int) -> Step | None:
        """Like :meth:`cut` for text in which only the end of the answer matters."""
        within = ids[:max_tokens]
        # Asked again with every call of an answer, which may be long: its tokens are not walked through one by one.
        if not self.end_ids.isdisjoint(within):
            last = next(index for index, token in enumerate(within) if token in self.end_ids)
            return self.step(ids[: last + 1], StepEnd.END)
        return self.step(within, StepEnd.CAP) if len(ids) >= max_tokens else None

    def step(self, ids: Sequence[int], end: StepEnd) -> Step:
        """These tokens as a step."""
        markers, num_ids = self.marker_ids.intersection(ids), self.num_ids
        unknown = frozenset() if num_ids is None else frozenset(token for token in ids if token >= num_ids)
        return Step(tuple(ids), end, markers | unknown, closes=bool(unknown or markers & self.closing_ids))


def single_token(tokenizer: StepTokenizer, text: str) -> int | None:
    """The id of a text that is one token of the vocabulary, else None."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _holds(text: str, delimiters: Sequence[str]) -> bool:
    return any(delimiter in text for delimiter in delimiters)


def _completes(text: str, piece: str, delimiters: Sequence[str]) -> bool:
    """``piece`` brings the end of a delimiter, which may have begun in the ``text`` before it."""
    return any(delimiter in text[max(0, len(text) + 1 - len(delimiter)) :] + piece for delimiter in delimiters)


def _singles(tokens: Iterable[int]) -> list[tuple[int, ...]]:
    """Stop words of one token each."""
    return [(token,) for token in tokens]


def _split_pairs(delimiters: Sequence[str], parts: Mapping[int, str]) -> list[tuple[int, int]]:
    """Pairs of tokens, neither of which holds a delimiter, whose joined text does: the :data:`MAX_PAIRS` of shortest text."""
    found: set[tuple[int, int, int]] = set()
    for delimiter in delimiters:
        for cut in range(1, len(delimiter)):
            # Whatever is among the shortest pairs has both its tokens among the shortest ones. All pairs may be millions.
            starts = _shortest((token, text) for token, text in parts.items() if text.endswith(delimiter[:cut]))
            ends = _shortest((token, text) for token, text in parts.items() if text.startswith(delimiter[cut:]))
            found |= {(len(left) + len(right), first, second) for first, left in starts for second, right in ends}
    return [(first, second) for _, first, second in nsmallest(MAX_PAIRS, found)]


def _shortest(tokens: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return nsmallest(MAX_PAIRS, tokens, key=lambda one: (len(one[1]), one[0]))
