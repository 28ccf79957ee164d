"""From an iteration's logits to the new tokens of each sequence: greedy rows together, sampled rows together, drafts verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from lr_backend.torch_engine.native_library import library
from lr_backend.torch_engine.runner import Output
from lr_backend.torch_engine.sampler import Purpose, chosen_log_probs, next_tokens, target_probs, uniform
from lr_backend.torch_engine.sequence import NewTokens, Sequence
from lr_backend.torch_engine.transfer import to_device, to_host
from lr_backend.torch_engine.verification import (
    Verdict,
    accept_all,
    impossible_to_zero,
    verify_biased,
    verify_greedy,
    verify_in_c,
    verify_tokens,
    verify_with_logits,
)


def choose_tokens(logits: Tensor, outputs: Items[Output], *, biased: bool) -> list[NewTokens]:
    """New tokens of every output. ``logits`` float32 [R, V] may be changed in place.

    ``biased``: sampled token-only drafts follow upstream's rule.
    """
    _forbid_early_ends(logits, outputs)
    chosen: dict[int, tuple[int, int]] = {}
    for members in _alike(outputs).values():
        sequences = [outputs[index].chunk.sequence for index in members]
        num_rows = outputs[members[0]].chunk.num_logits
        rows = _rows(logits, [outputs[index].first for index in members], num_rows)
        chosen |= dict(zip(members, _decide(rows, sequences, biased), strict=True))
    return [_new_tokens(logits, output, *chosen[index]) for index, output in enumerate(outputs)]


def _alike(outputs: Items[Output]) -> dict[tuple[object, ...], list[int]]:
    """Outputs that can be decided together: as many drafts, greedy or not, with draft logits or not, all accepted or not."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, output in enumerate(outputs):
        request = output.chunk.sequence.request
        kind = (request.sampling.greedy, request.draft_logits is None, request.accept_all_drafts)
        groups[(output.chunk.num_logits, *kind)].append(index)
    return groups


def _rows(logits: Tensor, firsts: list[int], count: int) -> Tensor:
    """[N, count, V] of the rows that begin at ``firsts``; no copy when that is all of them in order."""
    if firsts == list(range(0, len(logits), count)):
        return logits.view(len(firsts), count, -1)
    index = to_device(firsts, logits.device)[:, None] + torch.arange(count, device=logits.device)
    return logits[index]


def _decide(rows: Tensor, sequences: Items[Sequence], biased: bool) -> list[tuple[int, int]]:
    """Drafts accepted and the token after them, of sequences that are alike, from ``rows`` [N, K + 1, V]."""
    greedy = sequences[0].request.sampling.greedy
    if rows.shape[1] == 1:
        return [(0, token) for token in _sampled(rows[:, 0], sequences)]
    native = library() if rows.device.type == "cpu" and not biased else None
    if native is not None and sequences[0].request.draft_logits is None and not sequences[0].request.accept_all_drafts:
        return [
            verify_in_c(native, row, one.drafts, one.request.sampling, one.request.seed, one.num_generated)
            for row, one in zip(rows, sequences, strict=True)
        ]
    drafts = to_device([sequence.drafts for sequence in sequences], rows.device)
    if greedy and sequences[0].request.accept_all_drafts:
        return [(drafts.shape[1], token) for token in rows[:, -1].argmax(dim=-1).tolist()]
    verdict = verify_greedy(rows.argmax(dim=-1), drafts) if greedy else _verified(rows, drafts, sequences, biased)
    return list(zip(*to_host(verdict.num_accepted, verdict.next_token), strict=True))


def _sampled(rows: Tensor, sequences: Items[Sequence]) -> list[int]:
    draws = [uniform(one.request.seed, one.num_generated, Purpose.DRAW) for one in sequences]
    return next_tokens(rows, [sequence.request.sampling for sequence in sequences], draws)


def _verified(rows: Tensor, drafts: Tensor, sequences: Items[Sequence], biased: bool) -> Verdict:
    num_rows, device = rows.shape[1], rows.device
    samplings = [sequence.request.sampling for sequence in sequences for _ in range(num_rows)]
    probs = target_probs(rows.flatten(0, 1), samplings).view(rows.shape)
    draws = _uniforms(sequences, num_rows, Purpose.DRAW, device)
    if sequences[0].request.accept_all_drafts:
        return accept_all(probs, draws)
    if sequences[0].request.draft_logits is not None:
        accept = _uniforms(sequences, num_rows - 1, Purpose.ACCEPT, device)
        return verify_with_logits(probs, _draft_probs(sequences, device), drafts, accept, draws)
    if biased:
        return verify_biased(probs, drafts, draws[:, :-1], _uniforms(sequences, num_rows, Purpose.REDRAW, device))
    return verify_tokens(probs, drafts, _uniforms(sequences, num_rows - 1, Purpose.ACCEPT, device), draws)


def _draft_probs(sequences: Items[Sequence], device: torch.device) -> Tensor:
    """[N, K, V]: draft logits get the request's temperature, top-k and top-p, as the draft that was sampled with them did."""
    stacked = []
    for sequence in sequences:
        logits, num_drafts = sequence.request.draft_logits, len(sequence.drafts)
        assert logits is not None
        rows = impossible_to_zero(torch.from_numpy(logits[:num_drafts]).to(device))
        stacked.append(target_probs(rows, [sequence.request.sampling] * num_drafts))
    return torch.stack(stacked)


def _uniforms(sequences: Items[Sequence], count: int, purpose: Purpose, device: torch.device) -> Tensor:
    """float64 [N, count], of the next ``count`` token offsets of each call."""
    values = [[uniform(one.request.seed, one.num_generated + step, purpose) for step in range(count)] for one in sequences]
    return to_device(values, device, torch.float64)


def _forbid_early_ends(logits: Tensor, outputs: Iterable[Output]) -> None:
    """No end token before ``min_tokens``: rule it out of the rows of those offsets."""
    for output in outputs:
        sequence = output.chunk.sequence
        missing = sequence.request.min_tokens - sequence.num_generated
        if missing > 0 and sequence.request.end_id is not None:
            last = output.first + min(missing, output.chunk.num_logits)
            logits[output.first : last, sequence.request.end_id] = float("-inf")


def _new_tokens(logits: Tensor, output: Output, num_accepted: int, next_token: int) -> NewTokens:
    sequence = output.chunk.sequence
    token_ids = [*sequence.drafts[:num_accepted], next_token]
    log_probs: list[float] = []
    if sequence.request.return_log_probs:
        rows = logits[output.first : output.first + len(token_ids)]
        log_probs = chosen_log_probs(rows, to_device(token_ids, logits.device)).tolist()
    return NewTokens(sequence, token_ids, log_probs, num_stored=num_accepted, num_accepted=num_accepted)
