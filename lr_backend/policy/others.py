"""What the other processes of the step loop do, and what they have learned.

A server has several processes of the step loop, which share its engines. A row that one of them takes is paid for by the requests
of all, and a way that pays where one of them takes it may not pay where all do. So they learn as one: whatever one of them
measures is a *lesson*, and all of them take in the same lessons in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Lesson = Sequence[Any]
"""Its kind, and values that JSON can hold."""


class Others(Protocol):
    """The other processes of the step loop, as one of them sees them."""

    @property
    def num_requests(self) -> int:
        """Their requests in flight."""
        ...

    @property
    def num_sequences(self) -> int:
        """Their target sequences in flight."""
        ...

    def say_sequences(self, num: int) -> None:
        """So many target sequences of this process are in flight."""
        ...

    def tell(self, lesson: Lesson) -> bool:
        """Put a lesson behind those that all processes have told; False: it cannot be, and is for this process alone."""
        ...

    def heard(self) -> Iterator[Lesson]:
        """The lessons since the last time, this process's own among them, in the order that all processes see."""
        ...


class Alone:
    """There is no other process."""

    num_requests = num_sequences = 0

    def __init__(self) -> None:
        self._lessons: deque[Lesson] = deque()

    def say_sequences(self, num: int) -> None:
        pass

    def tell(self, lesson: Lesson) -> bool:
        self._lessons.append(lesson)
        return True

    def heard(self) -> Iterator[Lesson]:
        while self._lessons:
            yield self._lessons.popleft()
