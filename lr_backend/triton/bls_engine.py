"""An engine behind Triton, called by BLS from the same server.

What the contract makes us do by hand: a call that was sent cannot be taken back, only asked to stop by a second request of the
same id, which "succeeds" even when nothing of that id runs. So a cancel is repeated until the call has come back, and the call
keeps its place among those in flight until then.

A model whose process died answers each call, cancels too, after a second and one at a time; calls would pile up without end.
So an engine that fails, or that does not let go of a cancelled call, is left alone for a while: its :class:`Breaker` is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy.typing as npt

from lr_backend.engine import EngineCall, Generation, cancel_tensors
from lr_backend.errors import EngineError, EngineUnavailable

CANCEL_REPEAT_S = 0.05
MAX_CANCELS = 20
"""An engine that so many cancels do not move to end a call, and that answers no other meanwhile, is out of order."""
CANCEL_TIMEOUT_S = 0.5
RETRY_S = 5.0
"""How long an engine that is out of order is left alone before one call tries it again."""

Arrays = Mapping[str, npt.NDArray[Any]]
Infer = Callable[[str, str, Arrays, tuple[str, ...]], Awaitable[dict[str, npt.NDArray[Any]]]]
"""(model, request id, inputs, wanted outputs) -> outputs. Raises EngineError."""

TOKEN_OUTPUTS = ("output_ids", "sequence_length")
PERF_OUTPUTS = (
    "kv_cache_reused_blocks",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
)


class CallGate:
    """How many engine calls may be in flight at a time, over all requests and roles.

    Triton holds one thread of its pool for each; past the pool the rest would wait unseen. Cancels do not pass the gate: the
    pool keeps a reserve for them.
    """

    def __init__(self, max_in_flight_calls: int) -> None:
        self._semaphore = asyncio.Semaphore(max_in_flight_calls)
        self.num_in_flight = 0

    async def enter(self) -> None:
        await self._semaphore.acquire()
        self.num_in_flight += 1

    def leave(self) -> None:
        self.num_in_flight -= 1
        self._semaphore.release()


class Breaker:
    """Whether an engine is worth calling. Open: calls fail at once. After a while one call may try; its success closes it."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._open_until: float | None = None

    def enter(self, name: str) -> None:
        """Raises :class:`EngineUnavailable` while open; lets one call through when the time has come."""
        if self._open_until is None:
            return
        if asyncio.get_running_loop().time() < self._open_until:
            raise EngineUnavailable(f"{name} is out of order; it is tried again within {self._retry_s:g} s")
        self.trip()

    def trip(self) -> None:
        self._open_until = asyncio.get_running_loop().time() + self._retry_s

    def close(self) -> None:
        self._open_until = None


class BlsEngine:
    """One model of the server as an :class:`~lr_backend.engine.Engine`."""

    def __init__(self, model_name: str, infer: Infer, gate: CallGate, *, tokens_per_block: int) -> None:
        self._model_name = model_name
        self._infer = infer
        self._gate = gate
        self._tokens_per_block = tokens_per_block
        self._breaker = Breaker()
        self._num_answered = 0
        self._reaping: set[asyncio.Task[None]] = set()

    async def generate(self, call: EngineCall) -> Generation:
        self._breaker.enter(self._model_name)
        # Cancelled while it waits here, a call was never sent and needs no cancel.
        await self._gate.enter()
        running = asyncio.create_task(self._run(call))
        running.add_done_callback(lambda _: self._gate.leave())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                self._reap(call.request_id, running)
            raise

    async def close(self) -> None:
        """Wait until every cancelled call has come back."""
        while self._reaping:
            await asyncio.wait(self._reaping)

    async def _run(self, call: EngineCall) -> Generation:
        wanted = TOKEN_OUTPUTS + (PERF_OUTPUTS if call.return_perf_metrics else ())
        wanted += ("output_log_probs",) if call.return_log_probs else ()
        try:
            outputs = await self._infer(self._model_name, call.request_id, call.tensors(), wanted)
        except EngineUnavailable:
            self._breaker.trip()
            raise
        self._breaker.close()
        self._num_answered += 1
        return Generation.from_tensors(outputs, tokens_per_block=self._tokens_per_block)

    def _reap(self, request_id: str, running: asyncio.Task[Generation]) -> None:
        task = asyncio.create_task(self._stop(request_id, running))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _stop(self, request_id: str, running: asyncio.Task[Generation]) -> None:
        while not running.done():
            num_answered = self._num_answered
            if not await self._repeat_cancel(request_id, running) and num_answered == self._num_answered:
                # Nor has it answered anybody else: a call that only waits for its turn is no sign of that.
                self._breaker.trip()
                await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # nobody else asks for it any more

    async def _repeat_cancel(self, request_id: str, running: asyncio.Task[Generation]) -> bool:
        """Ask for a while; whether the call has ended."""
        for _ in range(MAX_CANCELS):
            if not await self._cancel(request_id):
                break
            done, _pending = await asyncio.wait({running}, timeout=CANCEL_REPEAT_S)
            if done:
                break
        return running.done()

    async def _cancel(self, request_id: str) -> bool:
        """Ask once; False if not even that is answered. Where the engine is gone so is the call, and its own failure says so."""
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                with suppress(EngineError):
                    await self._infer(self._model_name, request_id, cancel_tensors(), TOKEN_OUTPUTS)
        except TimeoutError:
            return False
        return True


def unavailable(model_name: str, error: Exception) -> EngineUnavailable:
    """The error of a call that never reached its engine."""
    return EngineUnavailable(f"{model_name} cannot be called: {error}")
