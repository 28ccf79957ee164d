"""How a command that runs until it is told to end is told so."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """SIGINT, SIGTERM or a closed terminal. The first lets what is in flight finish; the second no longer waits for it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.impatient = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._seen)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        # A terminal that is closed may say so twice, by its shell and by itself.
        self.impatient = self.impatient or (self.event.is_set() and number != signal.SIGHUP)
        self.event.set()

    def asked(self) -> int:
        """0: not; 1: once; 2: more often."""
        return self.event.is_set() + self.impatient
