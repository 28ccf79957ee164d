"""For tests of what another thread or process does."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

WAIT_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds; nobody tells when that is."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def all_ended(process_fds: list[int], limit_s: float = WAIT_S) -> bool:
    """Whether every process ends within the limit."""
    deadline = time.monotonic() + limit_s
    try:
        return all(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] for fd in process_fds)
    finally:
        for fd in process_fds:
            os.close(fd)
