"""From an iteration's logits to the new tokens of each sequence."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from lr_backend.embedded.runner import Output
from lr_backend.embedded.sampler import Draw, chosen_log_probs, drawn_tokens
from lr_backend.embedded.sequence import NewTokens


def choose_tokens(logits: Tensor, outputs: Items[Output]) -> list[NewTokens]:
    """New tokens of every output, and none of one whose rows are not all finite.

    ``logits`` float32 [R, V] may be changed in place.
    """
    finite = torch.isfinite(logits.sum(dim=1)).tolist()
    broken = [one for one in outputs if not all(finite[one.first : one.first + one.chunk.num_logits])]
    whole = [one for one in outputs if one not in broken] if broken else outputs
    _forbid_early_ends(logits, whole)
    drawn = drawn_tokens(logits, [_draw(output) for output in whole])
    chosen = [_new_tokens(logits, output, tokens) for output, tokens in zip(whole, drawn, strict=True)]
    return chosen + [NewTokens(output.chunk.sequence, [], [], 0) for output in broken]


def _draw(output: Output) -> Draw:
    """What is drawn from an output's rows."""
    sequence, request = output.chunk.sequence, output.chunk.sequence.request
    return Draw(output.first, len(sequence.tokens), request.sampling, request.seed, sequence.drafts)


def _forbid_early_ends(logits: Tensor, outputs: Iterable[Output]) -> None:
    """Before ``min_tokens`` no end token may be drawn: give it no chance in those rows."""
    for output in outputs:
        sequence = output.chunk.sequence
        missing = sequence.request.min_tokens - sequence.num_generated
        if missing > 0 and sequence.request.end_id is not None:
            last = output.first + min(missing, output.chunk.num_logits)
            logits[output.first : last, sequence.request.end_id] = float("-inf")


def _new_tokens(logits: Tensor, output: Output, token_ids: list[int]) -> NewTokens:
    sequence = output.chunk.sequence
    log_probs: list[float] = []
    if sequence.request.return_log_probs:
        rows = logits[output.first : output.first + len(token_ids)]
        log_probs = chosen_log_probs(rows, torch.tensor(token_ids, device=logits.device)).tolist()
    num_accepted = len(token_ids) - 1
    return NewTokens(sequence, token_ids, log_probs, num_stored=num_accepted, num_accepted=num_accepted)
