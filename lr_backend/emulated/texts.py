"""Texts that follow a workload: every prefix goes on the same way, whoever asks, in whatever pieces.

What the target writes at a place depends on the question and the place alone. The draft follows it word for word until, by the
workload's chances, it takes another word; from there on it is on a way of its own, which means the same as the target's or does
not. Tokens say which: the target's own words, words of a draft that means the same, words of one that does not. All are functions
of the text so far, and of the seed where the draft draws: a further candidate is another one wherever it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, islice, repeat
from typing import Protocol, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from lr_backend.contract import IntArray
from lr_backend.emulated.feed import Feed, Pass
from lr_backend.emulated.vocabulary import (
    ALIGNED,
    ASSISTANT,
    BREAK,
    CLOSE,
    END,
    FIRST_WORD,
    LIKE,
    NUM_WORDS,
    THINK,
    UNALIGNED,
    UNLIKE,
    USER,
    VOCABULARY,
)
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.engine.request import EngineRequest
from lr_backend.errors import ConfigError, EngineError, first_error
from lr_backend.propose.ngram import lookup_ngram
from lr_backend.verify.judge_prompt import VERDICT_PREFILL


class Writer(Protocol):
    """Who writes what: tokens that follow a text; at least one, unless it only drafts."""

    def __call__(self, context: IntArray, request: EngineRequest) -> Sequence[int]: ...


_VERDICT = VOCABULARY.encode(VERDICT_PREFILL)
"""What a prompt that asks for a verdict ends with."""
(_MARK,) = VOCABULARY.encode("?")
"""Of a word that means something else, where it is read by its characters: a judge's steps begin without a space."""
DRAFT_TEMPERATURE = 2.0**-10
"""Of first candidates in every loop over scripted texts, or below: above it a draft writes another candidate for each seed. It is
not 0, at which a drafted step serves as draft tokens: the shipped deployments on GPUs draw theirs."""
PIECE = 64
"""Tokens of an answer that are worked out at a time."""
RUN = 12
"""Words that a text repeats at a time, where it repeats any; the last of a step are more."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text ends.

    Attributes:
        story: names the question, hence its answer.
        start: where the step begins that it is in, in tokens of all that is written; the answer after the reasoning is one.
        written: of that step.
        num_steps: that lie behind it.
        is_over: the reasoning is.
    """

    story: int
    start: int
    written: tuple[int, ...]
    num_steps: int
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """Words that are repeated: their places in the step that begins at ``start``."""

    start: int
    words: range


class Texts:
    """The texts of target, draft and judge for one workload and seed."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload, self._seed = workload, seed
        self._own = lru_cache(1 << 16)(self._own_word)
        self._source = lru_cache(1 << 12)(self._source_of_run)
        self._starts = lru_cache(1 << 8)(self._starts_of_steps)
        self._agrees = lru_cache(1 << 16)(self._agreement)

    def prompt(self, number: int) -> IntArray:
        """Token ids of the ``number``-th question with its template; they differ from their second token on."""
        chosen = np.random.default_rng([self._seed, number]).integers(NUM_WORDS, size=self.workload.prompt_tokens - 2)
        return np.concatenate([[USER], FIRST_WORD + chosen, [ASSISTANT]]).astype(np.int32)

    def question(self, number: int) -> str:
        """The same question as a user writes it."""
        return VOCABULARY.decode(self.prompt(number)[1:-1].tolist())

    def target(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        if context[-1:].tolist() == _VERDICT:
            return self.judge(context, request)
        return self._rest(self._place(context))

    def draft(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        place = self._place(context)
        rest, written, workload = self._rest(place), place.written, self.workload
        way = next((LIKE if token < UNLIKE else UNLIKE for token in written if LIKE <= token < UNLIKE + NUM_WORDS), 0)
        if place.is_over:
            way = LIKE  # nobody compares what an answer means
        sampling = request.sampling
        is_first = sampling.greedy or sampling.temperature <= DRAFT_TEMPERATURE  # a greedy call says no temperature to Triton
        step = (place.story, place.start, 0 if is_first else request.seed)
        chance = _chance(self._seed, "like", *step)
        if not way:
            further = workload.sibling_acceptance_rate
            # The first candidate is the draft's likeliest token, the others are drawn.
            rate = workload.acceptance_rate if is_first or further is None else further
            longer = self._length(place.story, place.start) / workload.step_tokens - 1.0
            way = LIKE if chance < rate - workload.length_bias * longer else UNLIKE
            if way == LIKE and chance < workload.exact_rate:
                return rest
        is_own = not any(token >= LIKE for token in written)
        found = []
        for index, token in enumerate(rest):
            at = (place.story, place.start + len(written) + index, step[2])
            agrees = self._agrees(*at, is_own) < (workload.token_agreement if is_own else workload.word_agreement)
            if agrees and is_own and index == len(rest) - 2 and not place.is_over:
                agrees = self._differs_somewhere(place, len(written) + index, step[2])  # what is not the target's own differs
            if token < FIRST_WORD or agrees:
                found.append(token)
            else:
                found.append(way + token - FIRST_WORD)
                is_own = False
        return found

    def looked_up(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        """What an engine that drafts by itself finds in the text so far, behind the last two tokens; it may be nothing."""
        return lookup_ngram(context, 2, request.num_draft_tokens, 2)

    def judge(self, context: IntArray, request: EngineRequest) -> Sequence[int]:
        """A verdict."""
        differs = bool((((context >= UNLIKE) & (context < UNLIKE + NUM_WORDS)) | (context == _MARK)).any())
        return (UNALIGNED if differs else ALIGNED,)

    def _place(self, context: IntArray) -> _Place:
        """A prompt without the template's end is its first token."""
        asked = np.flatnonzero(context == ASSISTANT)
        length = int(asked[-1]) + 1 if len(asked) else 1
        answer = context[length:]
        story = int.from_bytes(blake2b(context[:length].astype(np.int32).tobytes(), digest_size=7).digest(), "big")
        closed = np.flatnonzero(answer == CLOSE)
        if len(closed):
            start = int(closed[0]) + 1
            return _Place(story, start, tuple(answer[start:].tolist()), self.workload.num_steps, is_over=True)
        breaks = np.flatnonzero(answer == BREAK)
        start = int(breaks[-1]) + 1 if len(breaks) else 0
        return _Place(story, start, tuple(answer[start:].tolist()), len(breaks))

    def _rest(self, place: _Place) -> Sequence[int]:
        """The rest of the step that a text is in, in the target's words; the last one of the reasoning closes it.

        Of an answer it is a piece.
        """
        num_written, story, start = len(place.written), place.story, place.start
        if place.is_over:
            num_words = self.workload.answer_tokens
            words = range(num_written, min(num_words, num_written + PIECE))
            return [*(self._own(story, start, index) for index in words), *([END] if words.stop >= num_words else [])]
        opening = [] if start else [THINK]
        words = range(max(len(opening), num_written), self._length(story, start) - 1)
        end = BREAK if place.num_steps + 1 < self.workload.num_steps else CLOSE
        return [*opening[num_written:], *(self._own(story, start, index) for index in words), end]

    def _length(self, story: int, start: int) -> int:
        """Of the step that begins there."""
        spread, mean = self.workload.step_spread, self.workload.step_tokens
        return max(2, round(mean * (1.0 + spread * (2.0 * _chance(self._seed, "length", story, start) - 1.0))))

    def _differs_somewhere(self, place: _Place, num_tokens: int, sibling: int) -> bool:
        """Whether the draft takes another word than the target somewhere in a step, behind the target's own."""
        places = range(place.start, place.start + num_tokens)
        return any(self._agrees(place.story, one, sibling, True) >= self.workload.token_agreement for one in places)

    def _own_word(self, story: int, start: int, index: int) -> int:
        """The target's word at a place of the step that begins at ``start``; it may be one that stood earlier in the text."""
        if self.workload.ngram_hit_rate:
            run = _run(index, self._num_words(story, start))
            source = self._source(story, start, run)
            if source is not None and index - run.start < len(source.words):
                return int(self._own(story, source.start, source.words[index - run.start]))
        return FIRST_WORD + _number(self._seed, "word", story, start + index) % NUM_WORDS

    def _source_of_run(self, story: int, start: int, run: range) -> _Source | None:
        """Where a run of words stood earlier, if it did: so often that as many of all tokens are found as are to be."""
        starts, run_at = self._starts(story), (story, start, run.start)
        earlier = starts[: bisect_left(starts, start)]
        if not earlier:
            return None
        found = earlier[int(_chance(self._seed, "source", *run_at) * len(earlier))]
        num_there, num_here = (self._num_words(story, one) for one in (found, start))
        there = _run(int(_chance(self._seed, "run", *run_at) * num_there), num_there)
        num_found = min(len(run), len(there)) - 2  # a lookup wants two words
        if run.start == there.start == 0:
            num_found += 1  # the break before them is one
        ends_both = (run.stop, there.stop) == (num_here, num_there)
        if ends_both and len(run) == len(there):
            num_found += 1  # and the break behind them is found
        num_tokens = len(run) + (run.stop == num_here)
        if _chance(self._seed, "repeats", *run_at) * num_found >= self.workload.ngram_hit_rate * num_tokens:
            return None
        return _Source(found, there)

    def _num_words(self, story: int, start: int) -> int:
        """Of the step that begins there, or of the answer."""
        return self.workload.answer_tokens if start > self._starts(story)[-1] else self._length(story, start) - 1

    def _starts_of_steps(self, story: int) -> list[int]:
        """Where each step of the reasoning begins."""
        lengths = accumulate(range(self.workload.num_steps - 1), lambda start, _: start + self._length(story, start), initial=0)
        return list(lengths)

    def _agreement(self, story: int, place: int, sibling: int, is_own: bool) -> float:
        return _chance(self._seed, "agrees", story, place, sibling, is_own)


@dataclass(frozen=True)
class Script:
    """What one engine writes: the texts of a role."""

    role: Role
    workload: Workload
    seed: int = 0

    def source(self) -> ScriptedSource:
        texts = Texts(self.workload, self.seed)
        write = {Role.TARGET: texts.target, Role.DRAFT: texts.draft, Role.JUDGE: texts.judge}[self.role]
        return ScriptedSource(write, texts.draft if self.role is Role.TARGET else None)

    def as_json(self) -> str:
        return _SCRIPT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises: ConfigError: it is none."""
        try:
            script = _SCRIPT.validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"script: {first_error(error)}") from error
        assert isinstance(script, cls)
        return script


class _Script(Feed):
    """A feed whose passes are written as they are looked for, a few ahead."""

    AHEAD = 32

    def __init__(self, passes: Iterator[Pass], stops: Collection[int]) -> None:
        """``stops``: behind one of these nobody may read on."""
        super().__init__()
        self._coming, self._stops = passes, stops

    @property
    def num_ready(self) -> int:
        if not super().num_ready:
            found: list[Pass] = []
            for one in islice(self._coming, self.AHEAD):
                found.append(one)
                if one.token_ids[-1] in self._stops:
                    break
            self.add(found)
        return super().num_ready


class ScriptedSource:
    """Texts by a writer; what the engine would draft by itself, by a second one."""

    def __init__(self, write: Writer, draft_writer: Writer | None = None) -> None:
        self._write, self._draft_writer = write, draft_writer

    def begin(self, request: EngineRequest) -> Feed:
        ends = () if request.end_id is None else (request.end_id,)
        feed = _Script(self._passes(request), {*request.stop_words.last_tokens, *ends})
        feed.end(EngineError("its text has ended"))
        return feed

    def cancel(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass

    def _passes(self, request: EngineRequest) -> Iterator[Pass]:
        text, num_left = np.asarray(request.input_ids, dtype=np.int32), request.max_new_tokens
        if request.draft_ids:
            passed = self._passed(self._written(text, request), request.draft_ids)
            yield Pass(tuple(passed))
            text, num_left = _grown(text, passed), max(0, num_left - len(passed))
        coming = islice(self._written(text, request), num_left)
        if not request.num_draft_tokens or self._draft_writer is None:
            yield from (Pass((token,)) for token in coming)
            return
        num_written = 0
        drafted: list[int] = []
        while passed := self._passed(coming, drafted):
            yield Pass(tuple(passed), num_proposed=len(drafted))
            text, num_written = _grown(text, passed), num_written + len(passed)
            drafted = self._drafted(text, request, min(request.num_draft_tokens, num_left - num_written - 1))

    @staticmethod
    def _passed(coming: Iterator[int], drafted: Sequence[int]) -> list[int]:
        """The draft tokens that are right, and one token more."""
        passed: list[int] = []
        for token in coming:
            passed.append(token)
            if len(passed) > len(drafted) or token != drafted[len(passed) - 1]:
                break
        return passed

    def _drafted(self, context: IntArray, request: EngineRequest, most: int) -> list[int]:
        """Draft tokens behind a text, beyond the end of its step as well."""
        assert self._draft_writer is not None
        drafted: list[int] = []
        while len(drafted) < most and (not drafted or drafted[-1] != END):
            more = self._draft_writer(_grown(context, drafted), request)
            if not more:
                break
            drafted += islice(more, most - len(drafted))
        return drafted

    def _written(self, text: IntArray, request: EngineRequest) -> Iterator[int]:
        """What follows a text; where it ends is the engine's to say. Behind its end there is nothing but the end."""
        while True:
            more = self._write(text, request)
            for token in more:
                yield token
                if token == END:
                    yield from repeat(END)
            text = _grown(text, more)


def _grown(text: IntArray, tokens: Sequence[int]) -> IntArray:
    return np.concatenate([text, np.asarray(tokens, dtype=np.int32)]) if len(tokens) else text


_SCRIPT = TypeAdapter(Script)


def _run(index: int, num_words: int) -> range:
    """The run of a word among those of its step."""
    number = min(index // RUN, max(0, num_words // RUN - 1))
    is_last = (number + 2) * RUN > num_words
    return range(number * RUN, num_words if is_last else (number + 1) * RUN)


def _number(*parts: object) -> int:
    """A whole number of 56 bits that depends on the parts alone."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return _number(*parts) / 2**56
