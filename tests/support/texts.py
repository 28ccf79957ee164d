"""Scripted texts as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.vocabulary import END
from lr_backend.emulated.workload import Workload
from tests.support.embedded_engines import request

ASKED = request((1,), 1)


def grown(context: IntArray, tokens: Sequence[int]) -> IntArray:
    return np.concatenate([context, np.asarray(tokens, dtype=np.int32)])


def whole_text(texts: Texts, number: int = 0) -> IntArray:
    """The target's answer behind its question."""
    context = texts.prompt(number)
    while context[-1] != END:
        context = grown(context, texts.target(context, ASKED))
    return context


def share_looked_up(workload: Workload, seeds: Iterable[int]) -> float:
    """Of the target's tokens."""
    hits = total = 0
    for seed in seeds:
        texts = Texts(workload, seed)
        whole, start = whole_text(texts), workload.prompt_tokens
        asked = request((1,), 1, num_draft_tokens=8)
        found = [texts.looked_up(whole[:place], asked) for place in range(start, len(whole))]
        hits += sum(bool(one) and one[0] == token for one, token in zip(found, whole[start:], strict=True))
        total += len(found)
    return hits / total
