"""How a command that runs until it is told to end is told so."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from types import FrameType


class StopRequest:
    """SIGINT, SIGTERM or a closed terminal. The first lets what is in flight finish; the second no longer waits for it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.impatient = False
        self._signals: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._seen)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        # It runs between two steps of the main thread, which may hold the event's lock. Into this queue it may always put.
        self._signals.put(number)

    def _listen(self) -> None:
        while True:
            number = self._signals.get()
            # A terminal that is closed may say so twice, by its shell and by itself.
            self.impatient = self.impatient or (self.event.is_set() and number != signal.SIGHUP)
            self.event.set()

    def asked(self) -> int:
        """0: not; 1: once; 2: more often."""
        return self.event.is_set() + self.impatient
