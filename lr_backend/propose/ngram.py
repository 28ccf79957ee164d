"""Prompt lookup: what followed the last time the same few tokens were seen (paper: n-gram speculation)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lr_backend.contract import IntArray

NGRAM_MAX, NGRAM_MIN = 4, 3
"""Longest and shortest match; shorter ones are mostly wrong, and a wrong draft token costs a verification."""


def lookup_ngram(context: IntArray, ngram_max: int, max_tokens: int, ngram_min: int) -> tuple[int, ...]:
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


class NGram:
    """Looks draft tokens up in the text so far; waits for nobody."""

    async def propose(self, ids: IntArray, max_tokens: int) -> Sequence[int]:
        return lookup_ngram(ids, NGRAM_MAX, max_tokens, NGRAM_MIN)
