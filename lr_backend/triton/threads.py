"""How a model's process runs: how its threads share the interpreter, how its event loop is woken by them, and how it ends."""

from __future__ import annotations

import asyncio
import atexit
import gc
import sys

import uvloop

SWITCH_INTERVAL_S = 0.0002
"""Until a thread that waits for the interpreter is let in. Python's 5 ms are several decode iterations."""


def share_interpreter() -> None:
    """Once in a model's process: an engine's thread, back from an iteration, must not wait for whoever reads a request."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def end_lightly() -> None:
    """Once in a model's process: let the system take back the memory, as it does anyway.

    Python's last collection would look through all of it, which takes 0.5 s of a core.
    """
    atexit.register(gc.freeze)


def use_uvloop() -> None:
    """Once in a model's process, before its event loop is made: have it made by uvloop.

    Every answer of an engine wakes the loop from another thread, which costs asyncio's own a pair of system calls and the
    interpreter's lock.
    """
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
