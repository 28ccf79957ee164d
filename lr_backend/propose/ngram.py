"""Prompt lookup: what followed the last time the same few tokens were seen (paper: n-gram speculation)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.proposal import Proposal, Room

NGRAM_MAX, NGRAM_MIN = 4, 3
"""Longest and shortest match; shorter ones are mostly wrong, and a wrong draft token costs a verification."""
LEAST_PLAIN, MOST_PLAIN = 4, 64
"""Tokens to decode before the next lookup, where the last ones found nothing: twice as many each time."""


def lookup_ngram(context: IntArray, ngram_max: int, max_tokens: int, ngram_min: int = 1) -> tuple[int, ...]:
    """Up to ``max_tokens`` tokens after the latest earlier occurrence of the longest suffix of ``ngram_min`` to ``ngram_max``.

    Args:
        context: token ids, shape [N]: the prefix and what is written so far.
        ngram_min: shorter matches say too little to be worth a verification.
    """
    length = len(context)
    if max_tokens <= 0 or length < 2:
        return ()
    # Ends of earlier one-token matches; each longer n-gram only thins them out.
    ends = np.flatnonzero(context[:-1] == context[-1])
    best = ends if ngram_min <= 1 else ends[:0]
    for size in range(2, min(ngram_max, length - 1) + 1):
        ends = ends[ends >= size - 1]
        ends = ends[context[ends - size + 1] == context[length - size]]
        if not len(ends):
            break
        if size >= ngram_min:
            best = ends
    if not len(best):
        return ()
    start = int(best[-1]) + 1
    return tuple(context[start : start + max_tokens].tolist())


@dataclass
class _Step:
    prefix: IntArray
    _plain_tokens: int = LEAST_PLAIN

    async def next(self, written: Sequence[int], max_tokens: int) -> Proposal:
        context = np.concatenate([self.prefix, np.asarray(written, dtype=np.int32)])
        if found := lookup_ngram(context, NGRAM_MAX, max_tokens, NGRAM_MIN):
            self._plain_tokens = LEAST_PLAIN
            return Proposal(found)
        plain_tokens, self._plain_tokens = self._plain_tokens, min(MOST_PLAIN, 2 * self._plain_tokens)
        return Proposal(plain_tokens=plain_tokens)

    def verified(self, proposed: Sequence[int], num_accepted: int) -> None:
        pass


class NGram:
    """Looks draft tokens up in the text so far; waits for nobody."""

    follows_drafted = False

    @asynccontextmanager
    async def step(self, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None) -> AsyncIterator[_Step]:
        yield _Step(prefix)
