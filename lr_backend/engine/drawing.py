"""From logits to tokens by torch: the highest of logit / temperature + noise among the tokens that top-k and top-p keep.

:mod:`~lr_backend.engine.noise` says what the noise is and why. This is the reference of ``embedded/native/draw.c``. On GPUs it is
what draws.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from lr_backend.engine.noise import gumbel_noise, noise_keys
from lr_backend.engine.protocol import Sampling

MAX_NUMBERS = 1 << 22
"""Scores that torch computes at a time; each takes about a hundred bytes meanwhile."""


def next_tokens(logits: Tensor, samplings: Items[Sampling], seeds: Items[int], positions: Items[int]) -> Tensor:
    """One token a row of float32 ``logits`` [R, vocabulary], int64 [R], by torch: the reference of ``native/draw.c``."""
    tokens = logits.argmax(dim=-1)
    keys = noise_keys(seeds, positions)
    rows = [row for row, sampling in enumerate(samplings) if not is_greedy(sampling)]
    size = max(1, MAX_NUMBERS // logits.shape[1])
    for some in (rows[start : start + size] for start in range(0, len(rows), size)):
        key = torch.tensor([[keys[row]] for row in some], dtype=torch.int64, device=logits.device)
        tokens[some] = _highest(logits[some], [samplings[row] for row in some], key)
    return tokens


def is_greedy(sampling: Sampling) -> bool:
    """Whether nothing is drawn. A temperature that float32 cannot tell from 0 is greedy too."""
    return sampling.greedy or _as_in_tensors(sampling.temperature) == 0.0


def _highest(logits: Tensor, samplings: Items[Sampling], keys: Tensor) -> Tensor:
    """The token of the highest score in each row, of equals the lowest: int64 [R]."""
    values, tokens = kept_logits(logits, samplings)
    scores = values.double() / _temperatures(samplings, logits) + gumbel_noise(keys, tokens)
    equals = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(equals, tokens, logits.shape[1]).amin(dim=-1)


def kept_logits(logits: Tensor, samplings: Items[Sampling]) -> tuple[Tensor, Tensor]:
    """Logits [R, C] of the tokens that top-k and then top-p keep, minus infinity for the others; and their token ids, int64.

    Top-p keeps the most likely tokens up to and including the one that reaches it. Of equals, the lower token counts as the more
    likely. Columns are in order of likelihood, unless no row leaves anything out: then they are the whole vocabulary.
    """
    vocab_size = logits.shape[1]
    tops = [min(sampling.top_k, vocab_size) or vocab_size for sampling in samplings]
    top_ps = [_as_in_tensors(sampling.top_p) for sampling in samplings]
    if min(tops) == vocab_size and min(top_ps) >= 1.0:
        return logits, torch.arange(vocab_size, device=logits.device).expand_as(logits)
    tokens = _by_likelihood(logits, max(tops))
    values = logits.gather(1, tokens)
    rank = torch.arange(max(tops), device=logits.device)
    left_out = rank >= torch.tensor(tops, device=logits.device)[:, None]
    weights = ((values.double() - values[:, :1].double()) / _temperatures(samplings, logits)).exp_().masked_fill_(left_out, 0.0)
    reached = weights.cumsum(dim=-1)
    # All the mass may be reached before the last token, by rounding; and switched off, top-p leaves nothing out.
    parts = weights.new_tensor([[top_p if top_p < 1.0 else 2.0] for top_p in top_ps])
    left_out[:, 1:] |= reached[:, :-1] >= parts * weights.sum(dim=-1, keepdim=True)
    return values.masked_fill(left_out, float("-inf")), tokens


def _by_likelihood(logits: Tensor, count: int) -> Tensor:
    """The most likely tokens, in order; of equals the lower first, which torch's own order leaves open: int64 [R, count]."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ((order << 32) - torch.arange(logits.shape[1], device=logits.device)).topk(count, dim=-1).indices


def _temperatures(samplings: Items[Sampling], like: Tensor) -> Tensor:
    """float64 [R, 1]."""
    temperatures = [[_as_in_tensors(sampling.temperature)] for sampling in samplings]
    return torch.tensor(temperatures, dtype=torch.float64, device=like.device)


def _as_in_tensors(value: float) -> float:
    """Rounded to float32, so that a setting means the same in a call as in a tensor of the contract."""
    return float(np.float32(value))
