"""The clock of everything that the loop times: counts, traces, what the server has measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds; only differences mean something."""


def running_clock() -> Clock:
    """The running event loop's, as finely as there is one: uvloop's own goes in steps of a millisecond, which is several of a
    small model's tokens."""
    loop = asyncio.get_running_loop()
    return time.monotonic if type(loop).__module__.partition(".")[0] == "uvloop" else loop.time
