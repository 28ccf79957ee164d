"""Draft-target speculation (arXiv 2211.17192): the draft model writes on, the target verifies.

Where a drafted step is likely to have the target's words, it goes to the target in pieces, while it is written, as long as the
target follows it. From where the target leaves it the draft model goes on from the target's own words. It never waits for a
verification: it writes on behind its own last tokens, and begins anew only where the target disagrees.

Whatever the draft writes, the answer's distribution stays the target's. An engine that shares its noise takes a draft token
over if it is what the target draws there; another accepts x with probability p(x) and else draws from the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.engine import Engine, EngineCall, Sampling
from lr_backend.errors import EngineError
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.proposal import NOTHING, Proposal, Room, within

MOST_AHEAD = 3
"""Calls' worth of draft tokens that may wait to be verified."""


@dataclass
class DraftModel:
    """Asks the draft's engine. A draft that failed is not asked again: ``failed`` is told, and ``available`` is then False.

    Attributes:
        sampling: how draft tokens are drawn.
        seed: (start of the step, token offset) -> seed of the call.
        tokens_a_call: draft tokens that one call writes at most.
        tokens_first: the same of the first call of a step, whose tokens the target waits for.
        follows_drafted: the drafted step beside a target step has the words that the target is likely to draw, because it was
            drawn with the same noise or is the draft's likeliest; else the draft model writes draft tokens of its own.
        num_ids: token ids that there are. The draft's logits may be wider than the target's, which refuses what it has not; so a
            proposal ends before any other. None: the draft writes no other.
        patient: a proposal is as long as it can be, whenever its tokens come (deterministic).
        proposed: told how many tokens of a call were verified and how many of these accepted.
    """

    engine: Engine
    sampling: Sampling
    request_id: str
    seed: Callable[[int, int], int]
    tokens_a_call: int
    tokens_first: int
    available: Callable[[], bool]
    failed: Callable[[], None]
    follows_drafted: bool = True
    proposed: Callable[[str, int, int], None] = lambda call_id, num_proposed, num_accepted: None
    patient: bool = False
    num_ids: int | None = None
    _calls: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def step(self, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None) -> AsyncIterator[_Step]:
        step = _Step(self, prefix, stop_words, room, drafted if self.follows_drafted else None)
        try:
            yield step
        finally:
            await step.stop()

    async def write(
        self, prefix: IntArray, written: Sequence[int], stop_words: IntArray, room: int
    ) -> tuple[str, tuple[int, ...]]:
        """One call's draft tokens after ``written``, at most ``room``, and the call's id.

        Raises:
            EngineError: the draft failed.
        """
        context = np.concatenate([prefix, np.asarray(written, dtype=np.int32)])
        call = EngineCall(
            request_id=f"{self.request_id}/draft_tokens/{next(self._calls)}",
            input_ids=context,
            max_new_tokens=min(self.tokens_a_call if written else self.tokens_first, room),
            sampling=self.sampling,
            seed=self.seed(len(prefix), len(context)),
            stop_words=stop_words,
        )
        generation = await self.engine.generate(call)
        return call.request_id, generation.token_ids


class _Step:
    """Draft tokens for one step of the target."""

    def __init__(
        self, model: DraftModel, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None
    ) -> None:
        self._model, self._prefix, self._stop_words, self._room, self._drafted = model, prefix, stop_words, room, drafted
        self._text = GrowingText()
        self._text.end()
        self._origins: list[str] = []
        """Of each token of the text, the call that wrote it; none of those that the target had written before."""
        self._num_known = 0
        self._tasks: list[asyncio.Task[None]] = []
        """The last one writes."""
        self._more_wanted = asyncio.Event()
        self._from_own = False
        self._start = 0

    async def next(self, written: Sequence[int], max_tokens: int) -> Proposal:
        model, wanted = self._model, max_tokens if self._model.patient else 1
        while model.available():
            text = self._source(written)
            await text.has(len(written) + wanted)
            if not text.agrees(written):
                continue
            if found := text.ids[len(written) : len(written) + max_tokens]:
                self._from_own, self._start = text is self._text, len(written)
                ids = within(found, model.num_ids)
                return Proposal(ids) if ids else Proposal(plain_tokens=1)
            if text is self._text:  # it ends here, or the draft has failed
                return NOTHING
        return NOTHING

    def verified(self, proposed: Sequence[int], num_accepted: int) -> None:
        if not self._from_own:
            return
        calls = self._origins[self._start : self._start + len(proposed)]
        for call_id in dict.fromkeys(calls):
            first, num = calls.index(call_id), calls.count(call_id)
            self._model.proposed(call_id, num, max(0, min(num, num_accepted - first)))

    async def stop(self) -> None:
        """Nobody needs more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks)
            for task in done:
                if not task.cancelled():
                    task.result()

    def _source(self, written: Sequence[int]) -> GrowingText:
        """The text that goes on like the target's own."""
        drafted = self._drafted
        if drafted is not None and drafted.agrees(written) and not (drafted.done and len(drafted.ids) <= len(written)):
            return drafted
        if not self._tasks or not self._text.agrees(written) or (self._text.done and len(self._text.ids) <= len(written)):
            self._begin(written)
        self._num_known = len(written)
        self._more_wanted.set()
        return self._text

    def _begin(self, written: Sequence[int]) -> None:
        if self._tasks:
            self._tasks[-1].cancel()
        self._text = GrowingText()
        self._text.extend(written)
        self._origins = [""] * len(written)
        self._tasks.append(asyncio.create_task(self._write(self._text, self._origins)))

    async def _write(self, text: GrowingText, origins: list[str]) -> None:
        try:
            while (room := self._room(text.ids)) and self._model.available():
                call_id, ids = await self._model.write(self._prefix, text.ids, self._stop_words, room)
                if not ids:
                    break
                origins.extend([call_id] * len(ids))
                text.extend(ids)
                while len(text.ids) - self._num_known >= MOST_AHEAD * self._model.tokens_a_call:
                    self._more_wanted.clear()
                    await self._more_wanted.wait()
        except EngineError:
            self._model.failed()
        finally:
            text.end()
