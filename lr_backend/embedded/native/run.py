"""Decoding without Python between the passes (``native/run.c``): many tokens a call, and several a pass behind draft tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lr_backend.embedded.native.drafter import Drafter
from lr_backend.embedded.native.model import NativeModel, NativePool, one_after_another
from lr_backend.embedded.sampler import SamplingStruct
from lr_backend.embedded.sequence import NewTokens, Sequence

MAX_UNSEEN = 64
"""Tokens that a draft model catches up with in its first pass. Of more it reads all but the last beforehand."""

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


class _Sequence(ctypes.Structure):
    _fields_ = (
        ("tokens", _Pointer),
        *((name, _Size) for name in ("count", "seen", "start", "room", "max_drafts", "first_block")),
        ("sampling", SamplingStruct),
        *((name, _Pointer) for name in ("ends", "log_probs")),
        *((name, _Size) for name in ("num_proposed", "num_accepted", "is_broken")),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, _Size) for name in ("num_sequences", "max_passes", "num_ids")),
        *((name, _Pointer) for name in ("draft", "draft_pool")),
        ("min_chance", ctypes.c_double),
        *((name, _Pointer) for name in ("sequences", "blocks", "work", "logits", "scratch", "candidates", "interrupt")),
    )


class _Memory:
    """Places of eight bytes, kept from call to call: allocating costs a small model as much as a product."""

    def __init__(self) -> None:
        self.places = np.empty(0, dtype=np.int64)
        self.address = 0

    def reserve(self, count: int) -> None:
        """Make room for ``count`` places; if it has to grow, what was there is lost."""
        if count > len(self.places):
            self.places = np.empty(2 * count, dtype=np.int64)
            self.address = self.places.ctypes.data

    def at(self, place: int) -> int:
        return self.address + 8 * place


class RunAhead:
    """Decodes with one model, and with the draft model that drafts for it if there is one. For the engine's thread."""

    def __init__(self, model: NativeModel, pool: NativePool, num_ids: int, drafter: Drafter | None) -> None:
        """``num_ids``: token ids that there are, of the logits' width at most."""
        self._model, self._pool, self._num_ids, self._drafter = model, pool, num_ids, drafter
        self._draft = (drafter.model.address, ctypes.addressof(drafter.pool.struct)) if drafter else (None, None)
        self._integers, self._logits, self._scores = _Memory(), _Memory(), _Memory()

    def __call__(
        self, sequences: Items[Sequence], rooms: list[int], max_passes: int, interrupt: ctypes.c_int32
    ) -> tuple[list[NewTokens], int]:
        """Decode sequences of which only the last token is left to compute, at most ``max_passes`` times.

        It ends with the pass in which a sequence draws a token that may end it or has no more room, or in which ``interrupt``
        is set. Returns what each sequence has gained, and the number of passes. One whose logits are not finite gains nothing.

        Args:
            rooms: how many tokens each may gain, at least one: its blocks have room for them.
        """
        model, drafter, count, vocab_size = self._model, self._drafter, len(sequences), self._model.spec.vocab_size
        max_drafts = [one.num_draft_tokens if drafter else 0 for one in sequences]
        starts = [self._start(one, drafts) for one, drafts in zip(sequences, max_drafts, strict=True)]
        first_blocks, blocks = one_after_another(one.table.blocks for one in sequences)
        # Integers: all blocks; all tokens, with room for more; what the run works with; one candidate a token of the vocabulary.
        num_rows, num_places = count + sum(max_drafts), sum(rooms) + sum(len(one.tokens) for one in sequences) - sum(starts)
        work = len(blocks) + num_places
        candidates = work + num_places + (6 + max(max_drafts)) * count
        self._integers.reserve(candidates + vocab_size)
        self._integers.places[: len(blocks)] = blocks
        self._logits.reserve((num_rows * vocab_size + 1) // 2)
        self._scores.reserve(num_places)
        # Kept until the run is over: the cache may drop them meanwhile.
        ends = [_possible_ends(one.request.end_id, one.request.stop_words.words, vocab_size) for one in sequences]
        described = (_Sequence * count)()
        place = len(blocks)
        for index, (one, start, room) in enumerate(zip(sequences, starts, rooms, strict=True)):
            score = place - len(blocks)
            described[index] = self._described(
                one, start, room, max_drafts[index], first_blocks[index], ends[index][1], place, score
            )
            place += len(one.tokens) - start + room
        num_floats = max(model.scratch_floats(num_rows), drafter.model.scratch_floats(num_places) if drafter else 0)
        run = _Run(
            count,
            max_passes,
            self._num_ids,
            *self._draft,
            drafter.min_chance if drafter else 1.0,
            ctypes.addressof(described),
            self._integers.address,
            self._integers.at(work),
            self._logits.address,
            model.scratch(num_floats),
            self._integers.at(candidates),
            ctypes.addressof(interrupt),
        )
        num_passes = model.run(self._pool, run)
        return [self._gained(*those) for those in zip(sequences, described, starts, strict=True)], num_passes

    def _described(
        self, one: Sequence, start: int, room: int, max_drafts: int, first_block: int, ends: int | None, place: int, score: int
    ) -> _Sequence:
        """A sequence from its token ``start`` on: its tokens lie from ``place`` on, its log-probabilities from ``score`` on."""
        request, known = one.request, one.tokens[start:]
        self._integers.places[place : place + len(known)] = known
        return _Sequence(
            self._integers.at(place),
            len(known),
            0,
            start,
            room,
            max_drafts,
            first_block,
            SamplingStruct.of(request.sampling, request.seed),
            ends,
            self._scores.at(score) if request.return_log_probs else None,
            0,
            0,
            0,
        )

    def _start(self, one: Sequence, max_drafts: int) -> int:
        """The first token to describe: the last one, which is computed next, or the first that the draft model has not seen."""
        last = len(one.tokens) - 1
        if self._drafter is None or not max_drafts:
            return last
        seen = self._drafter.num_seen(one.table.blocks, last)
        if last - seen <= MAX_UNSEEN:
            return seen
        self._drafter.read(one, last)
        return last

    def _gained(self, one: Sequence, described: _Sequence, start: int) -> NewTokens:
        """What a sequence has gained that was described from its token ``start`` on."""
        if described.is_broken:
            return NewTokens(one, [], [])
        known = len(one.tokens) - start
        first = (described.tokens - self._integers.address) // 8
        drawn = self._integers.places[first + known : first + described.count].tolist()
        scores: list[float] = []
        if one.request.return_log_probs:
            first = (described.log_probs - self._scores.address) // 8
            scores = self._scores.places[first + known : first + described.count].view(np.float64).tolist()
        if self._drafter and described.max_drafts:
            self._drafter.has_seen(one.table.blocks, start, start + described.seen)
        return NewTokens(one, drawn, scores, described.num_accepted, described.num_proposed)


@lru_cache(maxsize=64)
def _possible_ends(
    end_id: int | None, stop_words: frozenset[tuple[int, ...]], vocab_size: int
) -> tuple[npt.NDArray[np.uint8] | None, int | None]:
    """Flags by token, 1 where a run may end, and their address; None and None if no token can end it."""
    tokens = [word[-1] for word in stop_words if 0 <= word[-1] < vocab_size] + ([] if end_id is None else [end_id])
    if not tokens:
        return None, None
    flags = np.zeros(vocab_size, dtype=np.uint8)
    flags[tokens] = 1
    return flags, flags.ctypes.data
