"""A timeline driven by the clock of an event loop: on a virtual one, minutes of an engine's life pass in milliseconds."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count

from lr_backend.contract import IntArray
from lr_backend.embedded.sequence import Sequence
from lr_backend.emulated.feed import TextSource
from lr_backend.emulated.timeline import Sizes, Timeline
from lr_backend.engine import EngineCall, Generation
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, LookaheadError
from lr_backend.hardware.machine import Place
from lr_backend.hardware.sharing import IDLE, Demand, Law

LOOKS = 4
"""Into so many parts work on shared cards is cut; before each it is seen what the others ask of them by then."""
SETTLE_S = 1e-8
"""Between two iterations: time moves on only when nobody has anything left to do."""


class SharedCards:
    """What is asked of each card just now, and how much that slows down whoever runs on it."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self._busy: dict[int, tuple[tuple[int, ...], Demand]] = {}
        self._numbers = count()

    async def work(self, seconds: float, cards: tuple[int, ...], demand: Demand) -> None:
        """Take so long alone, or longer where others are busy on the same cards."""
        if not cards or not demand.share:
            await asyncio.sleep(seconds)
            return
        with self._asking(cards, demand) as number:
            for _ in range(LOOKS):
                await asyncio.sleep(seconds / LOOKS * self._slowdown(number))

    @contextmanager
    def _asking(self, cards: tuple[int, ...], demand: Demand) -> Iterator[int]:
        number = next(self._numbers)
        self._busy[number] = (cards, demand)
        try:
            yield number
        finally:
            del self._busy[number]

    def _slowdown(self, number: int) -> float:
        """Of the work with this number: as on the busiest of its cards."""
        cards, own = self._busy[number]
        others = [one for key, one in self._busy.items() if key != number]
        return max(self._law(own, [demand for those, demand in others if card in those]) for card in cards)


class LoopThread:
    """What makes all engine calls, one after another; each takes it so long."""

    def __init__(self, seconds: float, shared: SharedCards, demand: Demand) -> None:
        self._seconds, self._shared, self._demand = seconds, shared, demand
        self._turn = asyncio.Lock()

    async def make_call(self) -> None:
        if self._seconds:
            async with self._turn:
                await self._shared.work(self._seconds, (0,), self._demand)


class VirtualEngine:
    """One role's engine on the running event loop's clock."""

    def __init__(
        self, place: Place, source: TextSource, shared: SharedCards, loop_thread: LoopThread, call_demand: Demand = IDLE
    ) -> None:
        self._place, self._source, self._shared, self._loop_thread = place, source, shared, loop_thread
        self._call_demand = call_demand
        num_blocks = place.kv_tokens // place.tokens_per_block
        sizes = Sizes(num_blocks, place.tokens_per_block, place.max_batch_size, place.max_num_tokens)
        self.timeline = Timeline(sizes, place.costs, place.rules, one_hot=place.one_hot)
        self._numbers = count()
        self._runner: asyncio.Task[None] | None = None
        self._cancelled: list[Sequence] = []
        self._news: asyncio.Future[None] | None = None

    async def generate(self, call: EngineCall) -> Generation:
        request, hops = EngineRequest.from_call(call), self._place.hops
        if self._place.num_draft_tokens and not request.draft_ids:
            request = replace(request, num_draft_tokens=self._place.num_draft_tokens)
        await self._loop_thread.make_call()
        num_drafts = len(request.draft_ids) if self._place.one_hot and not request.sampling.greedy else 0
        await self._shared.work(hops.there_s + num_drafts * hops.draft_token_s, (0,), self._call_demand)
        result = await self._run(request)
        if hops.back_s:
            await asyncio.sleep(hops.back_s)
        return result.generation()

    def remember(self, tokens: IntArray) -> None:
        """Have a text in the KV cache, without having taken time for it."""
        self.timeline.remember(tokens)

    async def compute(self) -> None:
        """Let the iteration that has begun pass. Overridden where it is computed on a real card."""
        cards = self._place.cards
        await self._shared.work(self.timeline.seconds, cards, self.timeline.demand if cards else IDLE)

    async def close(self) -> None:
        """Wait until the last iteration is over."""
        if self._runner is not None:
            await self._runner

    async def _run(self, request: EngineRequest) -> EngineResponse:
        done: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()

        def on_done(result: EngineResponse | LookaheadError) -> None:
            if done.done():
                return
            if isinstance(result, EngineResponse):
                done.set_result(result)
            else:
                done.set_exception(result if isinstance(result, EngineError) else EngineError(result.message))

        most = len(request.draft_ids) + 1 if request.draft_ids else request.max_new_tokens
        sequence = Sequence(
            order=next(self._numbers),
            request=request,
            on_done=on_done,
            drafts=request.draft_ids,
            max_new_tokens=most,
            tokens_per_block=self._place.tokens_per_block,
            arrival_ns=_now_ns(),
        )
        self.timeline.admit(sequence, self._source.begin(request))
        self._tell()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._iterate())
        try:
            return await done
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(self._place.hops.there_s, self._cancel, sequence)
            raise

    def _cancel(self, sequence: Sequence) -> None:
        self._cancelled.append(sequence)
        self._tell()

    def _tell(self) -> None:
        """Somebody came or goes."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _iterate(self) -> None:
        try:
            await self._iterate_until_idle()
        except Exception as error:
            for sequence in self.timeline.sequences:
                sequence.on_done(EngineError(f"the engine died: {error}"))
            raise

    async def _iterate_until_idle(self) -> None:
        timeline = self.timeline
        while not timeline.idle:
            timeline.begin(_now_ns())
            num_alike = timeline.num_alike if not self._place.cards else 1
            if num_alike > 1:
                num_alike = await self._alike(timeline.seconds_each(num_alike))
            else:
                await self.compute()
            for one in timeline.end(_now_ns(), num_alike):
                one.sequence.on_done(one.failure or one.sequence.response())
            if not timeline.idle:
                await asyncio.sleep(SETTLE_S)  # whoever was answered may join the next iteration
            for sequence in self._cancelled:
                timeline.cancel(sequence)
            self._cancelled.clear()

    async def _alike(self, seconds: list[float]) -> int:
        """Let iterations pass, up to the one in which somebody comes or goes; returns how many."""
        loop = asyncio.get_running_loop()
        ends = list(accumulate(seconds, initial=loop.time()))[1:]
        self._news = loop.create_future()
        timer = loop.call_at(ends[-1], self._tell)
        await self._news
        timer.cancel()
        self._news = None
        passed = min(bisect_left(ends, loop.time()), len(ends) - 1)
        await asyncio.sleep(ends[passed] - loop.time())
        return passed + 1


def _now_ns() -> int:
    return 1 + int(1e9 * asyncio.get_running_loop().time())
