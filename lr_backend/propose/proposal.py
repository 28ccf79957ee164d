"""What proposes draft tokens, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from lr_backend.contract import IntArray
from lr_backend.propose.growing import GrowingText


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, in order; none is an answer too.

    Attributes:
        plain_tokens: where there are none, how many the target had better write before it asks again; None: all the rest.
    """

    token_ids: tuple[int, ...] = ()
    plain_tokens: int | None = None


NOTHING = Proposal()


def within(token_ids: Iterable[int], num_ids: int | None) -> tuple[int, ...]:
    """Those before the first that is none of the target's ``num_ids`` ids, which it may refuse; None: all are."""
    return tuple(token_ids if num_ids is None else takewhile(range(num_ids).__contains__, token_ids))


Room = Callable[[Sequence[int]], int]
"""How many tokens may follow those that are written; 0: they end the step."""


class StepDrafts(Protocol):
    """Draft tokens for one step, or for a whole answer, while it is written."""

    async def next(self, written: Sequence[int], max_tokens: int) -> Proposal:
        """What may follow ``written``, at most ``max_tokens`` > 0. Raises nothing: who cannot propose has nothing to propose."""
        ...

    def verified(self, proposed: Sequence[int], num_accepted: int) -> None:
        """The target has taken over so many of the last proposal's tokens."""
        ...


class DraftSource(Protocol):
    """Where the draft tokens of one request come from.

    Attributes:
        follows_drafted: it reads the drafted step beside a target step while that is written.
    """

    @property
    def follows_drafted(self) -> bool: ...

    def step(
        self, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None
    ) -> AbstractAsyncContextManager[StepDrafts]:
        """Draft tokens for what follows ``prefix``, shape [N]; nothing of it outlives the context.

        Args:
            stop_words: what ends an engine call here (``stop_words_list`` of the contract, shape [2, L]).
            drafted: the drafted step that continues the same prefix, as far as it is written; None: there is none.
        """
        ...
