"""What sequences draw from rows of logits, and which of their draft tokens stand: in C on a CPU, by torch elsewhere.

:mod:`~lr_backend.engine.drawing` says how a token is drawn. A draft token stands if and only if it is what would have
been drawn in its place, greedy or not. So no text depends on whether draft tokens were sent, on who proposed them, or on the
probabilities that they were proposed with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lr_backend.embedded.native.library import library
from lr_backend.engine import Sampling
from lr_backend.engine.drawing import next_tokens


@dataclass(frozen=True, slots=True)
class Draw:
    """What one sequence draws from rows of logits that lie one after another.

    Attributes:
        row: the first of them.
        position: in the whole sequence, of the token drawn from that row.
        drafts: draft tokens. Each has a row, and one more row follows them.
    """

    row: int
    position: int
    sampling: Sampling
    seed: int
    drafts: Items[int] = ()


def drawn_tokens(logits: Tensor, draws: Items[Draw]) -> list[list[int]]:
    """The tokens of each draw: its draft tokens as long as they equal what is drawn, and then the token that is drawn.

    ``logits``: float32 [R, ids]. On a CPU it is done in C: torch needs dozens of calls for it, which cost more
    than they compute.
    """
    native = library() if logits.device.type == "cpu" else None
    if native is not None:
        return _drawn_natively(native, logits, draws)
    rows = [draw.row + step for draw in draws for step in range(len(draw.drafts) + 1)]
    samplings = [draw.sampling for draw in draws for _ in range(len(draw.drafts) + 1)]
    seeds = [draw.seed for draw in draws for _ in range(len(draw.drafts) + 1)]
    positions = [draw.position + step for draw in draws for step in range(len(draw.drafts) + 1)]
    selected = logits if rows == list(range(len(logits))) else logits[rows]
    drawn = iter(next_tokens(selected, samplings, seeds, positions).tolist())
    return [_standing(draw.drafts, [next(drawn) for _ in range(len(draw.drafts) + 1)]) for draw in draws]


def _standing(drafts: Items[int], drawn: Items[int]) -> list[int]:
    """The tokens drawn in the places of ``drafts`` and after them, up to the first that differs from its draft."""
    agreed = [draft == token for draft, token in zip(drafts, drawn, strict=False)]
    return list(drawn[: [*agreed, False].index(False) + 1])


class SamplingStruct(ctypes.Structure):
    """``Sampling`` of ``native.h``."""

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, sampling: Sampling, seed: int) -> SamplingStruct:
        return cls(0.0 if sampling.greedy else sampling.temperature, sampling.top_p, sampling.top_k, seed)


class _Draw(ctypes.Structure):
    _fields_ = (
        ("sampling", SamplingStruct),
        *((name, ctypes.c_int64) for name in ("row", "position", "num_drafts")),
        ("drafts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_accepted", "next_token")),
    )


def _drawn_natively(native: CDLL, logits: Tensor, draws: Items[Draw]) -> list[list[int]]:
    drafts = np.array([token for draw in draws for token in draw.drafts], dtype=np.int64)
    described, place = (_Draw * len(draws))(), drafts.ctypes.data
    for index, draw in enumerate(draws):
        sampling, count = SamplingStruct.of(draw.sampling, draw.seed), len(draw.drafts)
        described[index] = _Draw(sampling, draw.row, draw.position, count, place)
        place += 8 * count
    num_ids = logits.shape[1]
    candidates = np.empty(num_ids, dtype=np.int64)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()  # held until it is read
    places = ctypes.addressof(described), len(draws), candidates.ctypes.data
    native.draw_tokens(rows.data_ptr(), rows.stride(0), num_ids, *places)
    return [[*draw.drafts[: one.num_accepted], one.next_token] for draw, one in zip(draws, described, strict=True)]


def chosen_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [R] of ``tokens`` [R] under the model itself: temperature 1, nothing cut off."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
