"""Which draft tokens stand, and which token follows: pure functions of probabilities and uniforms.

Shapes: N verifications of K drafts each over a vocabulary of V. ``probs`` is float [N, K + 1, V]: the target's distribution
at each draft and after the last, temperature, top-k and top-p applied. Every rule but the biased one and :func:`accept_all`
leaves the output distributed exactly as if the target had sampled alone.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Items
from ctypes import CDLL
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lr_backend.engine import Sampling
from lr_backend.torch_engine.sampler import draw

IMPOSSIBLE_GAP = 5e3
"""A draft logit so far below its row's largest means probability zero at any temperature, as one-hot logits intend."""


class Verdict(NamedTuple):
    """Drafts accepted from the left, int64 [N], and the target's token after them, int64 [N]."""

    num_accepted: Tensor
    next_token: Tensor


def verify_greedy(best: Tensor, drafts: Tensor) -> Verdict:
    """Accept while the draft is the most likely token. ``best`` int64 [N, K + 1], ``drafts`` int64 [N, K]."""
    num_accepted = _leading(best[:, :-1] == drafts)
    return Verdict(num_accepted, best.gather(1, num_accepted[:, None]).squeeze(1))


def verify_tokens(probs: Tensor, drafts: Tensor, accept: Tensor, draws: Tensor) -> Verdict:
    """Drafts known by their ids only: a proposal that was certain of its token.

    Accepted with the target's probability of it; else the token is drawn from the target with the draft taken out.

    Args:
        accept: uniforms [N, K]. ``draws``: uniforms [N, K + 1]; only the one at the end of the accepted run is used.
    """
    num_accepted = _leading(accept < _at(probs, drafts))
    rest, rejected = _distribution_after(probs, num_accepted)
    column = _padded(drafts).gather(1, num_accepted[:, None])
    return _drawn(num_accepted, _residual_or(rest, rest.scatter(1, column, 0.0), rejected), draws)


def verify_in_c(native: CDLL, logits: Tensor, drafts: Items[int], sampling: Sampling, seed: int, offset: int) -> tuple[int, int]:
    """:func:`verify_greedy` or :func:`verify_tokens` of one request, from its logits, float32 [K + 1, V], on a CPU.

    ``offset``: output tokens before the drafts. What it draws has the same distribution; an equal uniform need not give the
    same token.
    """
    vocab_size = logits.shape[1]
    ids = array("q", drafts)
    candidates, next_token = np.empty(vocab_size, dtype=np.int64), ctypes.c_int64()
    rows = logits.contiguous()  # held until it is read
    temperature = 0.0 if sampling.greedy else sampling.temperature
    num_accepted: int = native.verify_drafts(
        rows.data_ptr(),
        vocab_size,
        ids.buffer_info()[0],
        len(ids),
        temperature,
        sampling.top_k,
        sampling.top_p,
        seed,
        offset,
        candidates.ctypes.data,
        ctypes.addressof(next_token),
    )
    return num_accepted, next_token.value


def verify_with_logits(probs: Tensor, draft_probs: Tensor, drafts: Tensor, accept: Tensor, draws: Tensor) -> Verdict:
    """Drafts sampled from known probabilities ``draft_probs`` [N, K, V].

    Accepted iff p_target > r * p_draft; else the token is drawn from the normalised max(0, p_target - p_draft).
    """
    num_accepted = _leading(_at(probs, drafts) > accept * _at(draft_probs, drafts))
    rest, rejected = _distribution_after(probs, num_accepted)
    last = num_accepted.clamp(max=draft_probs.shape[1] - 1)
    residual = (rest - _row(draft_probs, last)).clamp(min=0.0)
    return _drawn(num_accepted, _residual_or(rest, residual, rejected), draws)


def verify_biased(probs: Tensor, drafts: Tensor, compared: Tensor, redraws: Tensor) -> Verdict:
    """Upstream's rule for drafts known by their ids: compare with a sampled token, on a mismatch draw *again*.

    A draft of probability p comes out with p + (1 - p) p. Kept to show that; never the default.

    Args:
        compared: uniforms [N, K] of the tokens compared with. ``redraws``: uniforms [N, K + 1].
    """
    num_rows, num_drafts, vocab_size = probs[:, :-1].shape
    sampled = draw(probs[:, :-1].reshape(-1, vocab_size), compared.reshape(-1)).view(num_rows, num_drafts)
    num_accepted = _leading(sampled == drafts)
    return _drawn(num_accepted, _row(probs, num_accepted), redraws)


def accept_all(probs: Tensor, draws: Tensor) -> Verdict:
    """Every draft, and a token of the target's after them; not the target's distribution, but how likely it found the drafts."""
    num_accepted = torch.full((len(probs),), probs.shape[1] - 1, device=probs.device)
    return _drawn(num_accepted, _row(probs, num_accepted), draws)


def impossible_to_zero(draft_logits: Tensor) -> Tensor:
    """Draft logits with every token far below the largest ruled out, so that one-hot stays one-hot at any temperature."""
    best = draft_logits.amax(dim=-1, keepdim=True)
    return draft_logits.masked_fill(draft_logits < best - IMPOSSIBLE_GAP, float("-inf"))


def _leading(accepted: Tensor) -> Tensor:
    """Length of the run of True at the left of each row of bool [N, K]."""
    return accepted.long().cumprod(dim=1).sum(dim=1)


def _at(probs: Tensor, drafts: Tensor) -> Tensor:
    """Probability of each draft, [N, K]."""
    return probs[:, : drafts.shape[1]].gather(2, drafts[:, :, None]).squeeze(2)


def _row(probs: Tensor, index: Tensor) -> Tensor:
    """Row ``index`` [N] of each [N, ., V]."""
    return probs[torch.arange(len(index), device=index.device), index]


def _distribution_after(probs: Tensor, num_accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The target's distribution after the accepted run [N, V], and whether a draft was rejected there, bool [N, 1]."""
    return _row(probs, num_accepted), (num_accepted < probs.shape[1] - 1)[:, None]


def _residual_or(rest: Tensor, residual: Tensor, rejected: Tensor) -> Tensor:
    """The residual where a draft was rejected; a rejection that only rounding made leaves none, and then ``rest`` is meant."""
    return torch.where(rejected & (residual.sum(dim=-1, keepdim=True) > 0.0), residual, rest)


def _padded(drafts: Tensor) -> Tensor:
    """Drafts with a column more, so that "after the last" can be indexed."""
    return torch.cat((drafts, drafts[:, -1:]), dim=1)


def _drawn(num_accepted: Tensor, distribution: Tensor, uniforms: Tensor) -> Verdict:
    return Verdict(num_accepted, draw(distribution, uniforms.gather(1, num_accepted[:, None]).squeeze(1)))
