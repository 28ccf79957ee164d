"""Whose clock the loop reads."""

from __future__ import annotations

import asyncio
import time

import uvloop

from lr_backend.clock import Clock, running_clock
from lr_backend.testing import run_virtual


async def the_clock() -> tuple[Clock, asyncio.AbstractEventLoop]:
    return running_clock(), asyncio.get_running_loop()


def test_a_loop_that_counts_milliseconds_is_not_asked() -> None:
    """uvloop keeps the time of its last turn, in milliseconds."""
    clock, _ = uvloop.run(the_clock())
    assert clock is time.monotonic


def test_any_other_loop_is_so_that_virtual_time_is_what_counts() -> None:
    clock, loop = run_virtual(the_clock())
    assert clock == loop.time
    clock, loop = asyncio.run(the_clock())
    assert clock == loop.time
