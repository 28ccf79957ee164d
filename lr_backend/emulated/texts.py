"""Texts that follow a workload: every prefix goes on the same way, whoever asks, in whatever pieces.

What the target writes at a place depends on the place alone. The draft follows it word for word until, by the workload's
chances, it takes another word; from there on it is on a way of its own, which means the same as the target's or does not. Tokens
say which: the target's own words, words of a draft that means the same, words of one that does not. All are functions of the text
so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Protocol

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.emulated.feed import Feed, Pass
from lr_backend.emulated.workload import Workload
from lr_backend.errors import EngineError
from lr_backend.tokens import num_equal
from lr_backend.torch_engine.request import EngineRequest

END, THINK, CLOSE, BREAK = range(4)
FIRST_WORD = 4
NUM_WORDS = 997
"""Of each kind: so many that no text repeats itself by chance."""
LIKE, UNLIKE = FIRST_WORD + NUM_WORDS, FIRST_WORD + 2 * NUM_WORDS
WORDS = ("<end>", "<think>", "</think>", "\n\n", *"①" * NUM_WORDS, *"②" * NUM_WORDS, *"③" * NUM_WORDS)
"""What each token says: the target's own words, those of a draft that means the same, those of one that does not."""
JUDGE_WORDS = ("unaligned", "aligned", "①", "②", "③")
JUDGE_UNLIKE = 4


class Writer(Protocol):
    """Who writes what: tokens that follow a text, at least one."""

    def __call__(self, context: IntArray, request: EngineRequest) -> Sequence[int]: ...


class Texts:
    """The texts of target, draft and judge for one workload and seed."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed
        self._own = lru_cache(1 << 16)(self._own_word)
        self._agrees = lru_cache(1 << 16)(self._agreement)

    def prompt(self, number: int) -> IntArray:
        """The ``number``-th question; they differ from their first token on, and so do the answers."""
        length = self._workload.prompt_tokens + number
        words = [FIRST_WORD + _number(self._seed, "prompt", number, place) % NUM_WORDS for place in range(length - 1)]
        return np.asarray([*words, BREAK], dtype=np.int32)

    def target(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        closed = np.flatnonzero(context == CLOSE)
        if not len(closed):
            return self._rest(context)
        num_written = len(context) - 1 - int(closed[0])
        return (*[FIRST_WORD] * (self._workload.answer_tokens - num_written), END)

    def draft(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        if (context == CLOSE).any():
            return self.target(context, request)
        start = self._start_of_step(context)
        rest, written = self._rest(context), context[start:].tolist()
        way = next((LIKE if token < UNLIKE else UNLIKE for token in written if token >= LIKE), 0)
        step = (start, 0 if request.sampling.greedy else request.seed)
        chance = _chance(self._seed, "like", *step)
        if not way:
            further, workload = self._workload.sibling_acceptance_rate, self._workload
            # The first candidate is the draft's best guess, the others are drawn.
            rate = workload.acceptance_rate if request.sampling.greedy or further is None else further
            longer = self._length(start) / workload.step_tokens - 1.0
            way = LIKE if chance < rate - workload.length_bias * longer else UNLIKE
            if way == LIKE and chance < workload.exact_rate:
                return rest
        is_own = not any(token >= LIKE for token in written)
        found = []
        for index, token in enumerate(rest[:-1]):
            place = len(context) + index
            agreement = self._workload.token_agreement if is_own else self._workload.word_agreement
            agrees = self._agrees(place, step[1], is_own) < agreement
            if agrees and is_own and index == len(rest) - 2:
                agrees = self._differs_somewhere(start, place, step[1])  # a step that is not the target's own differs from it
            if token < FIRST_WORD or agrees:
                found.append(token)
            else:
                found.append(way + token - FIRST_WORD)
                is_own = False
        return (*found, rest[-1])

    def judge(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        return (int(JUDGE_UNLIKE not in context),)

    def _start_of_step(self, context: IntArray) -> int:
        return int(np.flatnonzero(context == BREAK)[-1]) + 1

    def _rest(self, context: IntArray) -> Sequence[int]:
        """The rest of the step that ``context`` is in, in the target's words; the last step closes the reasoning."""
        num_breaks = int((context == BREAK).sum())
        end = BREAK if num_breaks < self._workload.num_steps else CLOSE
        start = self._start_of_step(context)
        length = self._length(start)
        opening = [THINK] if num_breaks == 1 else []
        step = [*opening, *(self._own(start + index) for index in range(len(opening), length - 1)), end]
        return step[len(context) - start :] or (end,)

    def _length(self, start: int) -> int:
        spread, mean = self._workload.step_spread, self._workload.step_tokens
        return max(2, round(mean * (1.0 + spread * (2.0 * _chance(self._seed, "length", start) - 1.0))))

    def _differs_somewhere(self, start: int, end: int, sibling: int) -> bool:
        """Whether the draft takes another word than the target somewhere in a step, behind the target's own."""
        return any(self._agrees(place, sibling, True) >= self._workload.token_agreement for place in range(start, end))

    def _own_word(self, place: int) -> int:
        return FIRST_WORD + _number(self._seed, "word", place) % NUM_WORDS

    def _agreement(self, place: int, sibling: int, is_own: bool) -> float:
        return _chance(self._seed, "agrees", place, sibling, is_own)


class ScriptedSource:
    """Texts by a writer; what the engine would draft by itself, by a second one."""

    def __init__(self, write: Writer, guess: Writer | None = None) -> None:
        self._write, self._guess = write, guess

    def begin(self, request: EngineRequest) -> Feed:
        feed = Feed()
        feed.add(self._passes(request))
        feed.end(EngineError("its text has ended"))
        return feed

    def cancel(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass

    def _passes(self, request: EngineRequest) -> list[Pass]:
        context = np.asarray(request.input_ids, dtype=np.int32)
        if request.draft_ids:
            written = self._written(context, request, len(request.draft_ids) + 1)
            return [Pass(tuple(written[: num_equal(written, request.draft_ids) + 1]))]
        written = self._written(context, request, request.max_new_tokens)
        if not request.num_draft_tokens or self._guess is None:
            return [Pass((token,)) for token in written]
        passes, at = [Pass((written[0],))], 1
        while at < len(written):
            text = np.concatenate([context, np.asarray(written[:at], dtype=np.int32)])
            wanted = min(request.num_draft_tokens, request.max_new_tokens - at - 1)
            guessed = self._guessed(self._guess, text, request, wanted)
            end = min(at + num_equal(written[at:], guessed) + 1, len(written))
            passes.append(Pass(tuple(written[at:end]), num_proposed=len(guessed)))
            at = end
        return passes

    @staticmethod
    def _guessed(guess: Writer, context: IntArray, request: EngineRequest, most: int) -> list[int]:
        """Draft tokens behind a text, beyond the end of its step as well."""
        guessed: list[int] = []
        while len(guessed) < most and (not guessed or guessed[-1] != END):
            text = np.concatenate([context, np.asarray(guessed, dtype=np.int32)])
            guessed += islice(guess(text, request), most - len(guessed))
        return guessed

    def _written(self, context: IntArray, request: EngineRequest, most: int) -> list[int]:
        """All that the call brings: up to a stop word or its budget."""
        written: list[int] = []
        stops = request.stop_words.last_tokens
        while len(written) < most:
            text = np.concatenate([context, np.asarray(written, dtype=np.int32)]) if written else context
            for token in self._write(text, request):
                written.append(token)
                if token in stops or len(written) == most:
                    return written
        return written


def _number(*parts: object) -> int:
    """A whole number of 56 bits that depends on the parts alone."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return _number(*parts) / 2**56
