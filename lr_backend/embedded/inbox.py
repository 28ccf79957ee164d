"""What other threads hand to the engine's thread: requests and cancellations."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lr_backend.embedded.sequence import Sequence
from lr_backend.errors import EngineRejected, EngineUnavailable, Overloaded


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine's thread has taken over."""

    cancelled: list[Sequence]
    closing: bool


class Inbox:
    """All methods may be called from any thread, but :meth:`wait` and :meth:`take` are for the engine's."""

    def __init__(self, waiting: deque[Sequence], max_queue_size: int, interrupt: Callable[[bool], None]) -> None:
        """
        Args:
            waiting: where sequences go that were taken over; they count for ``max_queue_size``.
            interrupt: has a run of many passes end soon, or no longer.
        """
        self._waiting = waiting
        self._max_queue_size = max_queue_size
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._num_submitted = 0
        self.closing = False
        self._why_closed = ""

    def __len__(self) -> int:
        return len(self._arrived)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, and give it its number of arrival.

        Raises:
            EngineRejected: its request's id is in flight.
            Overloaded: the queue is full.
            EngineUnavailable: the engine is closed or died.
        """
        request_id = sequence.request.request_id
        with self._changed:
            if self.closing:
                raise EngineUnavailable(self._why_closed)
            if request_id in self._by_id:
                raise EngineRejected(f"request id {request_id!r} is in flight already")
            num_waiting = len(self._arrived) + len(self._waiting)
            if num_waiting >= self._max_queue_size:
                raise Overloaded(f"the engine's queue is full: {num_waiting} requests wait")
            sequence.order = self._num_submitted
            self._num_submitted += 1
            self._arrived.append(sequence)
            if request_id:
                self._by_id[request_id] = sequence
            self._awaken()

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request in flight. Unknown ids are no error."""
        with self._changed:
            if (sequence := self._by_id.get(request_id)) is not None:
                self._cancelled.append(sequence)
                self._awaken()

    def close(self, why: str = "the engine is closed") -> None:
        """Take nothing more, and let the engine's thread end. Whoever comes later is told the first ``why``."""
        with self._changed:
            self.closing = True
            self._why_closed = self._why_closed or why
            self._awaken()

    def notify(self) -> None:
        """Let the engine's thread see that something has changed."""
        with self._changed:
            self._awaken()

    def free_id(self, sequence: Sequence) -> None:
        """The id of an answered request may be used again."""
        with self._changed:
            if self._by_id.get(sequence.request.request_id) is sequence:
                del self._by_id[sequence.request.request_id]

    def wait(self, also: Callable[[], bool] = lambda: False, timeout_s: float | None = None) -> bool:
        """Wait until there is something to take, or ``also`` holds. False after ``timeout_s`` seconds in vain."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._has_work or also(), timeout_s))

    def take(self) -> Work:
        """All that came. Requests go to where they wait, at once: so a queue's length is right at any time."""
        with self._changed:
            work = Work(list(self._cancelled), self.closing)
            self._cancelled.clear()
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            self._interrupt(False)
        return work

    @property
    def _has_work(self) -> bool:
        return bool(self._arrived or self._cancelled or self.closing)

    def _awaken(self) -> None:
        self._interrupt(True)
        self._changed.notify()
