"""An embedded engine in this process behind the :class:`~lr_backend.engine.Engine` protocol: no Triton between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from lr_backend.engine import EngineCall, Generation
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, EngineUnavailable, LookaheadError, Overloaded


class Submits(Protocol):
    """An engine: see :class:`~lr_backend.embedded.engine.EmbeddedEngine`."""

    def submit(self, request: EngineRequest, on_done: Callable[[EngineResponse | LookaheadError], None], /) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def close(self) -> None: ...


class InProcessEngine:
    """``generate`` and ``close`` of one engine. Several event loops may use it at a time."""

    def __init__(self, engine: Submits) -> None:
        """Takes the engine over: :meth:`close` closes it."""
        self.engine = engine

    async def generate(self, call: EngineCall) -> Generation:
        """Run one call; cancelling the coroutine ends the run.

        Raises:
            EngineRejected: the call breaks a rule of the engine.
            EngineUnavailable: the engine is closed, or its queue is full.
            EngineError: the iteration failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[EngineResponse] = loop.create_future()

        def settle(result: EngineResponse | LookaheadError) -> None:
            if future.done():
                return
            if isinstance(result, EngineResponse):
                future.set_result(result)
            else:
                future.set_exception(_engine_error(result))

        def on_done(result: EngineResponse | LookaheadError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        try:
            self.engine.submit(EngineRequest.from_call(call), on_done)
        except Overloaded as error:
            raise _engine_error(error) from error
        try:
            return (await future).generation()
        except asyncio.CancelledError:
            self.engine.cancel(call.request_id)
            raise

    async def close(self) -> None:
        """End what is in flight and wait until the engine's thread has ended."""
        await asyncio.to_thread(self.engine.close)


def _engine_error(error: LookaheadError) -> EngineError:
    """The protocol knows engine errors only; a full queue is one that passes."""
    return error if isinstance(error, EngineError) else EngineUnavailable(error.message)


def run_all(engine: Submits, requests: Sequence[EngineRequest]) -> list[EngineResponse]:
    """All at once, without an event loop; answers in order of the requests.

    Raises:
        LookaheadError: one of them failed.
    """
    results: dict[int, EngineResponse | LookaheadError] = {}
    finished = threading.Semaphore(0)
    for index, request in enumerate(requests):

        def on_done(result: EngineResponse | LookaheadError, index: int = index) -> None:
            results[index] = result
            finished.release()

        engine.submit(request, on_done)
    for _ in requests:
        finished.acquire()
    for result in results.values():
        if not isinstance(result, EngineResponse):
            raise result
    return [result for _, result in sorted(results.items()) if isinstance(result, EngineResponse)]
