"""Draft tokens from the text so far: prompt lookup, and whatever a deployment brings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.errors import heed_cancel, require_in_time
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.proposal import Proposal, Room, within

LEAST_PLAIN, MOST_PLAIN = 4, 64
"""Tokens to decode before the next lookup, where the last ones found nothing: twice as many each time."""
MAX_FAILURES = 3
"""In a row, after which a proposer is asked no more in that request."""

_logger = logging.getLogger(__name__)


class Proposer(Protocol):
    """Proposes draft tokens for a text. One object serves all requests of a server."""

    async def propose(self, ids: IntArray, max_tokens: int) -> Sequence[int]:
        """What may follow ``ids``, shape [N]: at most ``max_tokens`` > 0 tokens, or none.

        The target waits for it. An error proposes nothing.
        """
        ...


@dataclass
class Lookup:
    """The :class:`~lr_backend.propose.proposal.DraftSource` of a proposer: its answers for one request's texts.

    Attributes:
        num_ids: token ids that there are; what is proposed ends before any other. None: it proposes no other.
        timeout_s: for an answer; who is later is asked no more. None waits.
        gone: is told once it is asked no more.
        num_failures: in a row.
    """

    proposer: Proposer
    num_ids: int | None = None
    timeout_s: float | None = None
    gone: Callable[[], None] = lambda: None
    follows_drafted: ClassVar[bool] = False
    is_available: bool = True
    num_failures: int = 0
    is_told: bool = False

    def failed(self, error: BaseException, *, at_once: bool) -> None:
        """It is asked no more after a few failures in a row, or ``at_once``. The log tells of the first."""
        self.num_failures += 1
        if at_once or self.num_failures >= MAX_FAILURES:
            self.is_available = False
            self.gone()
        if not self.is_told:
            self.is_told = True
            _logger.warning("the proposer failed", exc_info=error)

    @asynccontextmanager
    async def step(self, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None) -> AsyncIterator[_Step]:
        yield _Step(self, prefix)


@dataclass
class _Step:
    source: Lookup
    prefix: IntArray
    _plain_tokens: int = LEAST_PLAIN

    async def next(self, written: Sequence[int], max_tokens: int) -> Proposal:
        if found := await self._found(written, max_tokens) if self.source.is_available else ():
            self._plain_tokens = LEAST_PLAIN
            return Proposal(found)
        plain_tokens, self._plain_tokens = self._plain_tokens, min(MOST_PLAIN, 2 * self._plain_tokens)
        return Proposal(plain_tokens=plain_tokens)

    async def _found(self, written: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        source, context = self.source, np.concatenate([self.prefix, np.asarray(written, dtype=np.int32)])
        try:
            async with asyncio.timeout(source.timeout_s) as limit:
                proposed = await source.proposer.propose(context, max_tokens)
            require_in_time(limit)
            found = tuple(int(token) for token in proposed)[:max_tokens]
        except BaseException as error:  # a deployment's own code may raise anything
            heed_cancel(error)
            source.failed(error, at_once=limit.expired())
            return ()
        source.num_failures = 0
        return within(found, source.num_ids)

    def verified(self, proposed: Sequence[int], num_accepted: int) -> None:
        pass
