"""The calls behind one request: run side by side, heard as one, and all cancelled once nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from lr_client import AsyncClient, AsyncStream, Event, Overloaded

from lr_backend.frontend.asked import Job
from lr_backend.frontend.errors import ClientGone

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

AGAIN_S = 0.2
"""Until a call that was refused as one too many is made once more: the step loop looks each 0.1 s for calls that are gone."""
WAITING_EVENTS = 16
"""Of all calls together; a client that reads slowly holds the calls up, not the memory."""


class Answers:
    """The events of all choices of a request, in the order in which they come. Leaving the block cancels what still runs.

    Args:
        request_id: of the request; a call has it with the number of its choice.
        timeout_s: for each call.
        context: that the calls belong to, as headers.
    """

    def __init__(
        self, client: AsyncClient, jobs: Sequence[Job], request_id: str, timeout_s: float, context: Mapping[str, str]
    ) -> None:
        self._client, self._jobs = client, jobs
        self._request_id, self._timeout_s, self._context = request_id, timeout_s, context
        self._events: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(WAITING_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = len(jobs)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._listen(number)) for number in range(len(self._jobs))]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> tuple[int, Event] | None:
        """(number of the choice, event); None once every choice has come to its end.

        Raises:
            ClientError: one of them failed.
        """
        while self._num_open:
            number, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if event is not None:
                return number, event
            self._num_open -= 1
        return None

    def _call(self, number: int) -> AsyncStream:
        job, request_id = self._jobs[number], f"{self._request_id}-{number}"
        return self._client.stream(
            job.question, job.options, timeout_s=self._timeout_s, request_id=request_id, metadata=self._context
        )

    async def _listen(self, number: int) -> None:
        has_begun = False
        try:
            for is_last in (False, True):
                try:
                    async with self._call(number) as stream:
                        async for event in stream:
                            has_begun = True
                            await self._events.put((number, event))
                    break
                except Overloaded:
                    if has_begun or is_last:
                        raise
                    await asyncio.sleep(AGAIN_S)
            await self._events.put((number, None))
        except Exception as error:  # whatever it is, somebody waits for it
            await self._events.put((number, error))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` comes to. It is cancelled, and has ended, when the client goes away first.

    Args:
        receive: of a request whose body has been read: it brings nothing but the end of the connection.

    Raises:
        ClientGone: nobody waits any more.
    """
    working, listening = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
