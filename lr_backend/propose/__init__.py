"""Token-level proposers: where the tokens come from that the target verifies in one pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from lr_backend.contract import IntArray
from lr_backend.propose.draft_step import continue_drafted
from lr_backend.propose.ngram import lookup_ngram
from lr_backend.propose.proposal import Position, Proposal, Proposer, by_lookup
from lr_backend.request import ProposerName

__all__ = ["Position", "Proposal", "Proposer", "by_lookup", "make_proposer"]


def make_proposer(
    name: ProposerName, ngram_max: int, draft_model: Callable[[Position], Awaitable[Proposal | None]] | None = None
) -> Proposer:
    """The proposer of a request.

    ``draft_step`` falls back to n-gram lookup where the drafted step does not help. ``draft_model`` takes the drafted step
    as long as the target follows it, which is the draft model's word already; asks the draft model from there on; and falls
    back to both where it has nothing to say.
    """
    # Shorter matches than these two lengths guess mostly wrong, and a wrong guess costs a verification.
    ngram_min = max(1, ngram_max - 1)

    def by_ngram(context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, max_tokens: int) -> tuple[int, ...]:
        return lookup_ngram(context, ngram_max, max_tokens, ngram_min)

    def by_drafted_step(
        context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, max_tokens: int
    ) -> tuple[int, ...]:
        tokens = continue_drafted(written, drafted, max_tokens) if drafted is not None else ()
        return tokens or lookup_ngram(context, ngram_max, max_tokens, ngram_min)

    look_up = by_lookup(by_ngram if name is ProposerName.NGRAM else by_drafted_step)
    if name is not ProposerName.DRAFT_MODEL or draft_model is None:
        return look_up

    async def by_draft_model(position: Position) -> Proposal:
        if tokens := _followed(position):
            return Proposal(tokens)
        proposal = await draft_model(position)
        # An unsure draft has been heard: a guess in its place would be wrong more often still.
        return proposal if proposal is not None else await look_up(position)

    return by_draft_model


def _followed(position: Position) -> tuple[int, ...]:
    """How the drafted step goes on, if the target has written nothing else so far."""
    drafted, num_written = position.drafted or (), len(position.written)
    if position.max_tokens <= 0 or tuple(drafted[:num_written]) != tuple(position.written):
        return ()
    return tuple(drafted[num_written : num_written + position.max_tokens])
