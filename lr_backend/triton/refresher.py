"""Metrics are sent on a thread of their own: a metric call crosses processes, and nobody who works may wait for one."""

from __future__ import annotations

import threading
from collections.abc import Callable

REFRESH_S = 0.5


class Refresher:
    """Calls ``send`` soon after something changed: at most every ``REFRESH_S``, and not at all while nothing happens.

    Args:
        name: of the thread.
        send: never called twice at a time.
    """

    def __init__(self, name: str, send: Callable[[], None]) -> None:
        self._send = send
        self._sending = threading.Lock()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something happened; any thread."""
        self._changed.set()

    def refresh(self) -> None:
        """Send what changed since the last time."""
        with self._sending:
            self._send()

    def close(self) -> None:
        self._stopped.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait()
            self._changed.clear()
            self._stopped.wait(REFRESH_S)
            self.refresh()
