"""From an iteration's logits to the new tokens of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

import torch
from torch import Tensor

from lr_backend.embedded.runner import Output
from lr_backend.embedded.sampler import Draw, chosen_log_probs, drawn_tokens
from lr_backend.embedded.sequence import NewTokens


def choose_tokens(logits: Tensor, outputs: Items[Output]) -> list[NewTokens]:
    """New tokens of every output, and none of one that needs a row which is not finite.

    Rows behind a draft token that does not stand are of no account. ``logits`` float32 [R, ids] may be changed in place.
    """
    finite = torch.isfinite(logits.sum(dim=1)).tolist()
    num_finite = [_num_leading(finite[one.first : one.first + one.chunk.num_logits]) for one in outputs]
    begun = [(one, count) for one, count in zip(outputs, num_finite, strict=True) if count]
    with _early_ends_forbidden(logits, [output for output, _ in begun]):
        drawn = drawn_tokens(logits, [_draw(output, count) for output, count in begun])
    chosen = [_new_tokens(logits, *one, tokens) for one, tokens in zip(begun, drawn, strict=True)]
    return chosen + [_nothing(output) for output, count in zip(outputs, num_finite, strict=True) if not count]


def _num_leading(flags: list[bool]) -> int:
    """How many hold before the first that does not."""
    return [*flags, False].index(False)


def _draw(output: Output, num_rows: int) -> Draw:
    """What is drawn from an output's first rows."""
    sequence, request = output.chunk.sequence, output.chunk.sequence.request
    return Draw(output.first, len(sequence.tokens), request.sampling, request.seed, sequence.drafts[: num_rows - 1])


def _nothing(output: Output) -> NewTokens:
    return NewTokens(output.chunk.sequence, [], [])


@contextmanager
def _early_ends_forbidden(logits: Tensor, outputs: Iterable[Output]) -> Iterator[None]:
    """Before ``min_tokens`` no end token may be drawn: it has no chance in those rows. Log-probabilities count it again."""
    before: list[tuple[Tensor, Tensor]] = []
    for output in outputs:
        sequence = output.chunk.sequence
        missing = sequence.request.min_tokens - sequence.num_generated
        end_id = sequence.request.end_id
        if missing > 0 and end_id is not None and end_id < logits.shape[1]:
            last = output.first + min(missing, output.chunk.num_logits)
            ends = logits[output.first : last, end_id]
            before.append((ends, ends.clone()))
            ends.fill_(float("-inf"))
    yield
    for ends, values in before:
        ends.copy_(values)


def _new_tokens(logits: Tensor, output: Output, num_rows: int, token_ids: list[int]) -> NewTokens:
    """``token_ids`` are drawn from the first rows; if all of them stand as drafts, the next row is needed and not finite."""
    sequence = output.chunk.sequence
    if len(token_ids) == num_rows and token_ids[-1:] == list(sequence.drafts[num_rows - 1 : num_rows]):
        return _nothing(output)
    log_probs: list[float] = []
    if sequence.request.return_log_probs:
        rows = logits[output.first : output.first + len(token_ids)]
        log_probs = chosen_log_probs(rows, torch.tensor(token_ids, device=logits.device)).tolist()
    return NewTokens(sequence, token_ids, log_probs, num_accepted=len(token_ids) - 1)
