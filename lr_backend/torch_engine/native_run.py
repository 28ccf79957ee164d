"""Decoding without Python between the passes (``native/run.c``): many tokens a call, and several a pass where a draft guesses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lr_backend.errors import EngineError
from lr_backend.torch_engine.drafter import Drafter
from lr_backend.torch_engine.native_model import NativeModel, NativePool, joined, one_after_another
from lr_backend.torch_engine.sequence import NewTokens, Sequence

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, _Size) for name in ("num_sequences", "max_passes")),
        *((name, _Pointer) for name in ("draft", "draft_pool")),
        ("min_chance", ctypes.c_double),
        *((name, _Pointer) for name in ("firsts", "tokens", "counts", "seen", "starts", "rooms", "num_drafts")),
        *((name, _Pointer) for name in ("first_blocks", "blocks", "top_ks", "offsets", "proposed", "accepted", "work")),
        *((name, _Pointer) for name in ("seeds", "temperatures", "top_ps", "ends", "log_probs")),
        *((name, _Pointer) for name in ("logits", "scratch", "candidates", "interrupt")),
    )


def run_ahead(
    model: NativeModel,
    pool: NativePool,
    drafter: Drafter | None,
    sequences: Items[Sequence],
    rooms: list[int],
    max_passes: int,
    interrupt: ctypes.c_int32,
) -> tuple[list[NewTokens], int]:
    """Decode sequences of which nothing but the last token is left to compute, at most ``max_passes`` times.

    It ends with the pass in which one draws a token that may end it or has no more room, or in which ``interrupt`` is found set.
    Returns what each has gained, and the number of passes.

    Args:
        drafter: guesses for those sequences that ask for it.
        rooms: how many tokens each may gain, at least one: its blocks have room for them.

    Raises:
        EngineError: logits that are not finite.
    """
    count, vocab_size = len(sequences), model.spec.vocab_size
    requests = [one.request for one in sequences]
    num_drafts = [one.num_draft_tokens if drafter else 0 for one in sequences]
    # The last token at least: it is computed next, by the draft too.
    starts = [
        drafter.num_seen(one.table.blocks, len(one.tokens) - 1) if drafter and wanted else len(one.tokens) - 1
        for one, wanted in zip(sequences, num_drafts, strict=True)
    ]
    known = [len(one.tokens) - start for one, start in zip(sequences, starts, strict=True)]
    tokens: list[int] = []
    firsts: list[int] = []
    for one, start, room in zip(sequences, starts, rooms, strict=True):
        firsts.append(len(tokens))
        tokens += one.tokens[start:]
        tokens += [0] * room
    first_blocks, blocks = one_after_another(one.table.blocks for one in sequences)
    width, num_places, num_rows = max(num_drafts), len(tokens), count + sum(num_drafts)
    numbers, pointers = joined(
        firsts,
        tokens,
        known,
        [0] * count,
        starts,
        rooms,
        num_drafts,
        first_blocks,
        blocks,
        [request.sampling.top_k for request in requests],
        [one.num_generated - number for one, number in zip(sequences, known, strict=True)],
        [0] * count,
        [0] * count,
        [0] * (num_places + (6 + width) * count),
    )
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    temperatures = np.array([0.0 if request.sampling.greedy else request.sampling.temperature for request in requests])
    top_ps = np.array([request.sampling.top_p for request in requests])
    ends = [_possible_ends(request.end_id, request.stop_words.words, vocab_size) for request in requests]
    end_flags = np.array([0 if flags is None else flags.ctypes.data for flags in ends], dtype=np.uint64)
    log_probs = np.empty(num_places if any(request.return_log_probs for request in requests) else 0)
    logits, candidates = np.empty((num_rows, vocab_size), dtype=np.float32), np.empty(vocab_size, dtype=np.int64)
    num_floats = max(model.scratch_floats(num_rows), drafter.model.scratch_floats(num_places) if drafter else 0)
    run = _Run(
        count,
        max_passes,
        drafter.model.address if drafter else None,
        ctypes.addressof(drafter.pool.struct) if drafter else None,
        drafter.min_chance if drafter else 1.0,
        *pointers,
        *(array.ctypes.data for array in (seeds, temperatures, top_ps, end_flags)),
        log_probs.ctypes.data if len(log_probs) else None,
        logits.ctypes.data,
        model.scratch(num_floats),
        candidates.ctypes.data,
        ctypes.addressof(interrupt),
    )
    num_passes = model.run(pool, run)
    if num_passes < 0:
        raise EngineError("the model computed logits that are not finite")
    at = (np.array(pointers) - numbers.ctypes.data) // numbers.itemsize
    counts, seen, proposed, accepted = (numbers[at[place] : at[place] + count].tolist() for place in (2, 3, 11, 12))
    gained = []
    for index, one in enumerate(sequences):
        first, last = firsts[index] + known[index], firsts[index] + counts[index]
        drawn = numbers[at[1] + first : at[1] + last].tolist()
        scores = log_probs[first:last].tolist() if one.request.return_log_probs else []
        gained.append(NewTokens(one, drawn, scores, len(drawn) - 1, accepted[index], proposed[index]))
        if drafter and num_drafts[index]:
            drafter.has_seen(one.table.blocks, starts[index], starts[index] + seen[index])
    return gained, num_passes


@lru_cache(maxsize=64)
def _possible_ends(end_id: int | None, stop_words: frozenset[tuple[int, ...]], vocab_size: int) -> npt.NDArray[np.uint8] | None:
    """Not 0 for every token with which a run may end; None when it has no such token."""
    tokens = [word[-1] for word in stop_words if word[-1] < vocab_size] + ([] if end_id is None else [end_id])
    if not tokens:
        return None
    flags = np.zeros(vocab_size, dtype=np.uint8)
    flags[tokens] = 1
    return flags
