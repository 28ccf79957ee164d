"""Token-level proposers: where the tokens come from that the target verifies in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lr_backend.contract import IntArray
from lr_backend.propose.draft_step import continue_drafted
from lr_backend.propose.ngram import lookup_ngram
from lr_backend.request import ProposerName

Proposer = Callable[[IntArray, Sequence[int], Sequence[int] | None, int], tuple[int, ...]]
"""(prefix with what is written, written step so far, drafted step if known, at most n) -> proposed tokens."""


def make_proposer(name: ProposerName, ngram_max: int) -> Proposer:
    """The proposer of a request; ``draft_step`` falls back to n-gram lookup where the drafted step does not help."""
    # Shorter matches than these two lengths guess mostly wrong, and a wrong guess costs a verification.
    ngram_min = max(1, ngram_max - 1)

    def by_ngram(context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, max_tokens: int) -> tuple[int, ...]:
        return lookup_ngram(context, ngram_max, max_tokens, ngram_min)

    def by_drafted_step(
        context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, max_tokens: int
    ) -> tuple[int, ...]:
        tokens = continue_drafted(written, drafted, max_tokens) if drafted is not None else ()
        return tokens or lookup_ngram(context, ngram_max, max_tokens, ngram_min)

    return by_drafted_step if name is ProposerName.DRAFT_STEP else by_ngram
