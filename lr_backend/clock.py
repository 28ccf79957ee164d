"""The clock of everything that the loop times: counts, traces, what the server has measured; and one whose time is virtual."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds; only differences mean something."""


def running_clock() -> Clock:
    """The running event loop's, as finely as there is one: uvloop's own goes in steps of a millisecond, which is several of a
    small model's tokens."""
    loop = asyncio.get_running_loop()
    return time.monotonic if type(loop).__module__.partition(".")[0] == "uvloop" else loop.time


_limits: ContextVar[tuple[asyncio.Timeout, ...]] = ContextVar("limits", default=())


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """As :func:`asyncio.timeout`. What runs within it and is cancelled can tell whether that is why, by :func:`is_late`."""
    async with asyncio.timeout(seconds) as limit:
        token = _limits.set((*_limits.get(), limit))
        try:
            yield limit
        finally:
            _limits.reset(token)


def is_late() -> bool:
    """Whether a time limit around this has been reached. Tasks that are started within one have it too."""
    return any(limit.expired() for limit in _limits.get())


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: it moves its clock on by the time it was asked to wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and nothing is scheduled")
            self.now_s += max(0.0, timeout)
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a virtual clock; fails if it leaves tasks behind."""
    loop = VirtualClockLoop()
    try:
        result = loop.run_until_complete(main)
        leaked = asyncio.all_tasks(loop)
        assert not leaked, f"tasks left behind: {leaked}"
        return result
    finally:
        loop.close()
