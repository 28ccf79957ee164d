"""From logits to tokens: the distribution that a request asks for, and one uniform number a draw.

Noise is counted, not drawn from a stream: a uniform is a hash of (seed, token offset in the call, purpose). So it does not
depend on the batch, on preemption or on what was drawn before, and a token needs one number: the inverse of the cumulative
distribution at it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from ctypes import CDLL
from enum import IntEnum
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lr_backend.engine import Sampling
from lr_backend.torch_engine.native_library import library
from lr_backend.torch_engine.transfer import to_device

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a uniform is for; different purposes are independent at the same offset."""

    DRAW = 0
    ACCEPT = 1
    REDRAW = 2


def uniform(seed: int, offset: int, purpose: Purpose) -> float:
    """A number in [0, 1) that is a function of its arguments only (SplitMix64, 53 bits)."""
    state = _mix(_mix((seed + _GOLDEN) & _MASK) ^ _mix((offset * 4 + purpose + 1) * _GOLDEN & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def target_probs(logits: Tensor, samplings: Items[Sampling]) -> Tensor:
    """Probabilities, float32 [R, vocabulary], after temperature, top-k and top-p of each row, in this order.

    Top-p keeps the most likely tokens up to and including the one that reaches it, counted after top-k. No row may be
    greedy by temperature 0.
    """
    probs, tokens = _candidates(logits, samplings)
    if tokens is None:
        return probs
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    last = _last_kept(cumulative, samplings)
    kept = probs.masked_fill(torch.arange(probs.shape[1], device=probs.device) > last, 0.0)
    return torch.zeros_like(logits).scatter_(1, tokens, kept / kept.sum(dim=-1, keepdim=True))


def next_tokens(logits: Tensor, samplings: Items[Sampling], uniforms: Items[float]) -> list[int]:
    """One token a row of float32 ``logits`` [R, V]: the most likely where greedy, else drawn by :func:`target_probs`.

    On a CPU it is done in C: what torch needs a dozen calls for, which cost more than they compute.
    """
    native = library() if logits.device.type == "cpu" else None
    if native is not None:
        return _drawn_natively(native, logits, samplings, uniforms)
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    tokens = logits.argmax(dim=-1)
    if drawn:
        points = to_device([uniforms[row] for row in drawn], logits.device, torch.float64)
        tokens[drawn] = draw_tokens(logits[drawn], [samplings[row] for row in drawn], points)
    return cast("list[int]", tokens.tolist())


def _drawn_natively(native: CDLL, logits: Tensor, samplings: Items[Sampling], uniforms: Items[float]) -> list[int]:
    num_rows, vocab_size = logits.shape
    reals = np.array([[0.0 if one.greedy else one.temperature, one.top_p, u] for one, u in zip(samplings, uniforms, strict=True)])
    temperatures, top_ps, points = np.ascontiguousarray(reals.T)
    top_ks = np.array([sampling.top_k for sampling in samplings], dtype=np.int64)
    candidates, tokens = np.empty(vocab_size, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    columns = (temperatures, top_ks, top_ps, points, candidates, tokens)
    rows = logits.contiguous()  # held until it is read
    native.draw_tokens(rows.data_ptr(), num_rows, vocab_size, *(column.ctypes.data for column in columns))
    return cast("list[int]", tokens.tolist())


def draw_tokens(logits: Tensor, samplings: Items[Sampling], uniforms: Tensor) -> Tensor:
    """One token a row, int64 [R], as ``draw(target_probs(logits, samplings), uniforms)`` would: the same distribution.

    Cheaper, because nothing is spread over the vocabulary; an equal uniform need not give the same token.
    """
    probs, tokens = _candidates(logits, samplings)
    if tokens is None:
        return draw(probs, uniforms)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    mass = cumulative.gather(1, _last_kept(cumulative, samplings))
    return tokens.gather(1, _locate(cumulative, mass, uniforms)).squeeze(1)


def _candidates(logits: Tensor, samplings: Items[Sampling]) -> tuple[Tensor, Tensor | None]:
    """Probabilities [R, C] after temperature and top-k, most likely first, and whose they are, int64 [R, C].

    Without top-k and top-p in any row it is the whole vocabulary in its own order, and None.
    """
    scaled = logits / to_device([[sampling.temperature] for sampling in samplings], logits.device)
    if all(sampling.top_k == 0 and sampling.top_p >= 1.0 for sampling in samplings):
        return torch.softmax(scaled, dim=-1), None
    vocab_size = scaled.shape[-1]
    tops = [min(sampling.top_k, vocab_size) or vocab_size for sampling in samplings]
    candidates, tokens = scaled.topk(max(tops), dim=-1)
    if min(tops) < max(tops):
        rank = torch.arange(max(tops), device=scaled.device)
        candidates.masked_fill_(rank >= to_device(tops, scaled.device)[:, None], float("-inf"))
    return torch.softmax(candidates, dim=-1), tokens


def _last_kept(cumulative: Tensor, samplings: Items[Sampling]) -> Tensor:
    """Place [R, 1] of the candidate with which each row reaches its top-p; the last one where that is off."""
    top_p = [[sampling.top_p if sampling.top_p < 1.0 else 2.0] for sampling in samplings]
    reached = torch.searchsorted(cumulative, to_device(top_p, cumulative.device, torch.float64))
    return reached.clamp_(max=cumulative.shape[1] - 1)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by the inverse cumulative distribution: int64 [R] of ``probs`` [R, V] at float64 ``uniforms`` [R].

    Rows need not sum to one; a token of probability zero is never drawn.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    return _locate(cumulative, cumulative[:, -1:], uniforms).squeeze(1)


def _locate(cumulative: Tensor, mass: Tensor, uniforms: Tensor) -> Tensor:
    """Where the cumulative distribution passes ``uniforms`` [R] times ``mass`` [R, 1]: int64 [R, 1]."""
    # The product can round up to the mass; then the last token with any probability is meant.
    points = torch.minimum(uniforms[:, None] * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    return torch.searchsorted(cumulative, points, right=True)


def chosen_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [R] of ``tokens`` [R] under the model itself: temperature 1, nothing cut off."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
