"""Whether an LLM lives, as far as its process can see.

Upstream computes in processes of mpi4py's pool, on one GPU too. Where one of them is killed its future stays pending (seen with
Open MPI 4.1.4), and 1.2.1 looks at nothing else: what is in flight hangs, a further call may block its caller, and ``shutdown``
waits for ever. Where one fails, the next call shuts the LLM down.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil

POOL = "mpi4py.futures.server"
"""A word of the command line of each process of the pool."""


class Health:
    """To be made when the LLM is loaded: its processes are there then, and stay until it is shut down."""

    def __init__(self, llm: Any) -> None:
        self._is_well = getattr(llm, "_check_health", lambda: True)  # private: one day it may be gone
        self._processes: list[psutil.Process] = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if POOL in process.cmdline():
                    self._processes.append(process)

    def why_dead(self) -> str:
        """Empty: it lives."""
        if not all(map(_lives, self._processes)):
            return "a process that computes for it has ended"
        return "" if self._is_well() else "it has shut down"


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
