"""What a proposer is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from lr_backend.contract import IntArray


@dataclass(frozen=True, slots=True)
class Position:
    """Where token drafts are wanted.

    Attributes:
        context: the prefix with what is written of its step, token ids, shape [N].
        written: the step so far, the last tokens of ``context``.
        drafted: the drafted step that continues the same prefix, if it is known.
        max_tokens: token drafts at most.
        stop_words: what ends an engine call here (``stop_words_list`` of the contract, shape [2, L]), or None.
        sibling: which candidate the step belongs to.
    """

    context: IntArray
    written: Sequence[int]
    drafted: Sequence[int] | None
    max_tokens: int
    stop_words: IntArray | None = None
    sibling: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Token drafts, in order; none is an answer too.

    Attributes:
        num_drafted: tokens that the draft model wrote for them, those that it was not sure of included.
        call_id: the draft's engine call that wrote them; None: they were looked up.
    """

    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0
    call_id: str | None = None

    @property
    def unsure(self) -> bool:
        """The draft model's tokens end where it was not sure, and not where it had been asked to."""
        return len(self.token_ids) < self.num_drafted


Proposer = Callable[[Position], Coroutine[Any, Any, Proposal]]
"""Where token drafts come from. Fails never: a proposer that cannot propose has nothing to propose."""

Lookup = Callable[[IntArray, Sequence[int], Sequence[int] | None, int], tuple[int, ...]]
"""(prefix with what is written, written step so far, drafted step if known, at most n) -> proposed tokens, at once."""


def by_lookup(lookup: Lookup) -> Proposer:
    """A proposer that waits for nobody."""

    async def propose(position: Position) -> Proposal:
        return Proposal(lookup(position.context, position.written, position.drafted, position.max_tokens))

    return propose
