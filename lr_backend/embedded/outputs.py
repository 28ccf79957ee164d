"""From an iteration's logits to the new tokens of each sequence."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from torch import Tensor

from lr_backend.embedded.reference.transfer import to_device
from lr_backend.embedded.runner import Output
from lr_backend.embedded.sampler import Draw, chosen_log_probs, drawn_tokens
from lr_backend.embedded.sequence import NewTokens


def choose_tokens(logits: Tensor, outputs: Items[Output]) -> list[NewTokens]:
    """New tokens of every output. ``logits`` float32 [R, V] may be changed in place."""
    _forbid_early_ends(logits, outputs)
    draws = [_draw(output) for output in outputs]
    return [_new_tokens(logits, *those) for those in zip(outputs, draws, drawn_tokens(logits, draws), strict=True)]


def _draw(output: Output) -> Draw:
    """What an output's rows are for. Draft tokens that are accepted as they are need no draw."""
    sequence, request = output.chunk.sequence, output.chunk.sequence.request
    num_given = len(sequence.drafts) if request.accept_all_drafts else 0
    position = len(sequence.tokens) + num_given
    return Draw(output.first + num_given, position, request.sampling, request.seed, sequence.drafts[num_given:])


def _forbid_early_ends(logits: Tensor, outputs: Iterable[Output]) -> None:
    """No end token before ``min_tokens``: rule it out of the rows of those offsets."""
    for output in outputs:
        sequence = output.chunk.sequence
        missing = sequence.request.min_tokens - sequence.num_generated
        if missing > 0 and sequence.request.end_id is not None:
            last = output.first + min(missing, output.chunk.num_logits)
            logits[output.first : last, sequence.request.end_id] = float("-inf")


def _new_tokens(logits: Tensor, output: Output, draw: Draw, drawn: list[int]) -> NewTokens:
    sequence = output.chunk.sequence
    token_ids = [*sequence.drafts[: draw.row - output.first], *drawn]
    log_probs: list[float] = []
    if sequence.request.return_log_probs:
        rows = logits[output.first : output.first + len(token_ids)]
        log_probs = chosen_log_probs(rows, to_device(token_ids, logits.device)).tolist()
    num_accepted = len(token_ids) - 1
    return NewTokens(sequence, token_ids, log_probs, num_stored=num_accepted, num_accepted=num_accepted)
