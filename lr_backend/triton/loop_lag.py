"""How late the step loop's event loop is: all requests share its one thread, so what one of them takes holds up all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lr_backend.clock import running_clock

LOOK_S = 0.05
"""A look costs the process some 50 microseconds, its place in a histogram included."""
LONGEST_S = 60.0
"""A longer stall counts as one of this length. No load makes one: the machine or its container stood still."""


async def watch_lag(tell: Callable[[float], None], busy: Callable[[], bool] = lambda: True, look_s: float = LOOK_S) -> None:
    """Tell again and again by how many seconds a timer was late, for as long as the event loop runs.

    Of a long stall every look that fell into it is told, by how late it would have been: so a stall weighs as long as it lasts.

    The first look is always told, later ones where the loop was busy at their beginning or is at their end: of an idle loop
    there is nothing to say. uvloop's timers go in steps of a millisecond, so less than that means nothing.
    """
    now, wanted = running_clock(), True
    while True:
        due_s = now() + look_s
        await asyncio.sleep(look_s)
        is_busy = busy()
        if wanted or is_busy:
            late_s = min(now() - due_s, LONGEST_S)
            tell(max(0.0, late_s))
            while (late_s := late_s - look_s) > 0.0:
                tell(late_s)
        wanted = is_busy
