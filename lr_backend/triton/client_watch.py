"""Whose client has gone away: looked for every so often, as TensorRT-LLM's backend does, and then cancelled in the engine.

Triton tells nobody that a client is gone; it has to be asked, request by request, and each question crosses processes: some
40 us, and 100 at times. So those are asked about that have been in flight for a while, in turns, and not too many at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

CLIENT_LOOK_S = 0.2
"""Between two looks whose client has gone. Not more often: a process that is killed while it asks holds up its own return."""
MIN_AGE_S = 0.1
"""A younger request is left alone: most end sooner."""
MAX_ASKED_A_SECOND = 500
"""This bounds what it costs: some hundredths of a core. Beyond it each is asked about less often than every period."""

_logger = logging.getLogger(__name__)


class WatchedClient:
    """One request in flight. Triton forgets it with its answer: then it may no longer be asked about it."""

    def __init__(self, request_id: str, sender: Any, since_s: float) -> None:
        self.request_id, self.since_s = request_id, since_s
        self._sender = sender
        self._lock = threading.Lock()
        self._is_answered = False

    def is_gone(self) -> bool:
        with self._lock:
            return not self._is_answered and bool(self._sender.is_cancelled())

    def will_be_answered(self) -> None:
        """Nobody asks from now on."""
        with self._lock:
            self._is_answered = True


class ClientWatch:
    """Calls ``cancel`` with the ids of requests whose clients have gone away. Any thread may enter and leave.

    Args:
        period_s: how often it is looked.
    """

    def __init__(self, period_s: float, cancel: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._period_s, self._cancel, self._now = period_s, cancel, now
        self._most = max(1, round(MAX_ASKED_A_SECOND * period_s))
        self._lock = threading.Lock()
        self._clients: dict[WatchedClient, None] = {}  # whoever was asked about last stands last
        self._occupied, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="client-watch", daemon=True)
        self._thread.start()

    def enter(self, request_id: str, sender: Any) -> WatchedClient:
        """``sender``: Triton's response sender of the request."""
        client = WatchedClient(request_id, sender, self._now())
        with self._lock:
            self._clients[client] = None
            self._occupied.set()
        return client

    def leave(self, client: WatchedClient) -> None:
        """Its answer comes next."""
        client.will_be_answered()
        self._forget(client)

    def look(self) -> None:
        """Ask about some of those that have been in flight for a while."""
        before_s = self._now() - MIN_AGE_S
        with self._lock:
            asked = [one for one in self._clients if one.since_s <= before_s][: self._most]
            for one in asked:
                del self._clients[one]
                self._clients[one] = None
        for one in asked:
            if one.is_gone():
                self._forget(one)
                self._cancel(one.request_id)

    def close(self) -> None:
        with self._lock:  # nobody clears what is set here
            self._stopped.set()
            self._occupied.set()
        self._thread.join()

    def _forget(self, client: WatchedClient) -> None:
        with self._lock:
            self._clients.pop(client, None)
            if not self._clients and not self._stopped.is_set():
                self._occupied.clear()

    def _run(self) -> None:
        while self._occupied.wait() and not self._stopped.wait(self._period_s):
            try:
                self.look()
            except Exception:
                _logger.exception("clients could not be looked after")
