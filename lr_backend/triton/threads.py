"""How the threads of a model's process share its interpreter, and how its event loop is woken by them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

SWITCH_INTERVAL_S = 0.0002
"""Until a thread that waits for the interpreter is let in. Python's 5 ms are several decode iterations."""


def share_interpreter() -> None:
    """Once in a model's process: an engine's thread, back from an iteration, must not wait for whoever reads a request."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def use_uvloop() -> None:
    """Once in a model's process, before its event loop is made: have it made by uvloop, where that is installed.

    Every answer of an engine wakes the loop from another thread, which costs asyncio's own a pair of system calls and the
    interpreter's lock.
    """
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
