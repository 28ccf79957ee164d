"""For tests of what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds; nobody tells when that is."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)
