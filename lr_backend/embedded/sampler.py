"""From logits to tokens: the highest of logit / temperature + noise among the tokens that top-k and top-p keep.

:mod:`~lr_backend.engine.noise` says what the noise is and why. A draft token stands if and only if it is what would have
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
from lr_backend.embedded.reference.transfer import to_device
from lr_backend.engine import Sampling
from lr_backend.engine.noise import gumbel_noise, noise_keys

MAX_NUMBERS = 1 << 22
"""Scores that torch computes at a time: a dozen numbers of eight bytes each are held for every one."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens that one sequence draws from rows of logits that lie one after another.

    Attributes:
        row: the first.
        position: of the token drawn from it, in the whole sequence.
        drafts: draft tokens, each of which has a row; one row more stands behind them.
    """

    row: int
    position: int
    sampling: Sampling
    seed: int
    drafts: Items[int] = ()


def drawn_tokens(logits: Tensor, draws: Items[Draw]) -> list[list[int]]:
    """The tokens of each: its draft tokens, as long as they are what is drawn, and the one that is drawn then.

    ``logits``: float32 [R, vocabulary]. On a CPU it is done in C: what torch needs dozens of calls for, which cost more than they
    compute.
    """
    native = library() if logits.device.type == "cpu" else None
    if native is not None:
        return _drawn_natively(native, logits, draws)
    rows = [draw.row + step for draw in draws for step in range(len(draw.drafts) + 1)]
    samplings = [draw.sampling for draw in draws for _ in range(len(draw.drafts) + 1)]
    seeds = [draw.seed for draw in draws for _ in range(len(draw.drafts) + 1)]
    positions = [draw.position + step for draw in draws for step in range(len(draw.drafts) + 1)]
    selected = logits if rows == list(range(len(logits))) else logits[to_device(rows, logits.device)]
    drawn = iter(next_tokens(selected, samplings, seeds, positions).tolist())
    return [_standing(draw.drafts, [next(drawn) for _ in range(len(draw.drafts) + 1)]) for draw in draws]


def _standing(drafts: Items[int], drawn: Items[int]) -> list[int]:
    """Of the tokens drawn in the place of each draft and behind the last those up to the first that differs from its draft."""
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
    vocab_size = logits.shape[1]
    candidates = np.empty(vocab_size, dtype=np.int64)
    rows = logits.contiguous()  # held until it is read
    native.draw_tokens(rows.data_ptr(), vocab_size, ctypes.addressof(described), len(draws), candidates.ctypes.data)
    return [[*draw.drafts[: one.num_accepted], one.next_token] for draw, one in zip(draws, described, strict=True)]


def next_tokens(logits: Tensor, samplings: Items[Sampling], seeds: Items[int], positions: Items[int]) -> Tensor:
    """One token a row of float32 ``logits`` [R, vocabulary], int64 [R], by torch: the reference of ``native/draw.c``."""
    tokens = logits.argmax(dim=-1)
    keys = noise_keys(seeds, positions)
    rows = [row for row, sampling in enumerate(samplings) if not is_greedy(sampling)]
    size = max(1, MAX_NUMBERS // logits.shape[1])
    for some in (rows[start : start + size] for start in range(0, len(rows), size)):
        key = to_device([[keys[row]] for row in some], logits.device, torch.int64)
        tokens[some] = _highest(logits[some], [samplings[row] for row in some], key)
    return tokens


def is_greedy(sampling: Sampling) -> bool:
    """Nothing is drawn; nor at a temperature that float32 cannot tell from 0."""
    return sampling.greedy or _as_in_tensors(sampling.temperature) == 0.0


def _highest(logits: Tensor, samplings: Items[Sampling], keys: Tensor) -> Tensor:
    """The token of the highest score in each row, of equals the lowest: int64 [R]."""
    values, tokens = kept_logits(logits, samplings)
    scores = values.double() / _temperatures(samplings, logits) + gumbel_noise(keys, tokens)
    equals = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(equals, tokens, logits.shape[1]).amin(dim=-1)


def kept_logits(logits: Tensor, samplings: Items[Sampling]) -> tuple[Tensor, Tensor]:
    """Logits [R, C] of the tokens that top-k and, after it, top-p keep, the others minus infinity; and whose they are, int64.

    Top-p keeps the most likely tokens up to and including the one that reaches it. Of equals the lower token counts as the more
    likely. Both results lie in order of likelihood, unless no row leaves anything out: then it is the whole vocabulary.
    """
    vocab_size = logits.shape[1]
    tops = [min(sampling.top_k, vocab_size) or vocab_size for sampling in samplings]
    top_ps = [_as_in_tensors(sampling.top_p) for sampling in samplings]
    if min(tops) == vocab_size and min(top_ps) >= 1.0:
        return logits, torch.arange(vocab_size, device=logits.device).expand_as(logits)
    tokens = _by_likelihood(logits, max(tops))
    values = logits.gather(1, tokens)
    rank = torch.arange(max(tops), device=logits.device)
    left_out = rank >= to_device(tops, logits.device)[:, None]
    weights = ((values.double() - values[:, :1].double()) / _temperatures(samplings, logits)).exp_().masked_fill_(left_out, 0.0)
    reached = weights.cumsum(dim=-1)
    # All the mass may be reached before the last token, by rounding; and switched off, top-p leaves nothing out.
    parts = to_device([[top_p if top_p < 1.0 else 2.0] for top_p in top_ps], logits.device, torch.float64)
    left_out[:, 1:] |= reached[:, :-1] >= parts * weights.sum(dim=-1, keepdim=True)
    return values.masked_fill(left_out, float("-inf")), tokens


def _by_likelihood(logits: Tensor, count: int) -> Tensor:
    """The most likely tokens, in order; of equals the lower first, which torch's own order leaves open: int64 [R, count]."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ((order << 32) - torch.arange(logits.shape[1], device=logits.device)).topk(count, dim=-1).indices


def _temperatures(samplings: Items[Sampling], like: Tensor) -> Tensor:
    """float64 [R, 1]."""
    return to_device([[_as_in_tensors(sampling.temperature)] for sampling in samplings], like.device, torch.float64)


def _as_in_tensors(value: float) -> float:
    """Rounded to float32: a setting means the same in a call as in tensors of the contract."""
    return float(np.float32(value))


def chosen_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [R] of ``tokens`` [R] under the model itself: temperature 1, nothing cut off."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
