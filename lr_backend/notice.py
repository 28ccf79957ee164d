"""What the launcher and the processes of the step loop tell one another while they run, by three small files.

The launcher tells of models whose process has died: Triton tells its models nothing of it, and a call to such a model hangs until
its client gives up. It also tells that the server is to end: Triton takes no BLS call once it is stopping, so answers must finish
before it is told to stop. The processes of the loop tell how many requests each of them is answering (:class:`Seats`), and how
many of its calls are lost with dead models. Together they keep to the server's limit, and the launcher sees when all is
answered. What one process learns it tells the others (:class:`Lessons`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

NOTICE_VARIABLE = "LOOKAHEAD_NOTICE_FILE"
"""Names the file of deaths to the step loop, which is there from the first death on. That of the seats lies beside it."""
MAX_LOOPS = 64
"""Processes of the step loop that one server may have."""
_SIZE = 8 * (1 + 7 * MAX_LOOPS)


def post(path: Path, dead: Iterable[str]) -> None:
    """Say which models' processes have died and are not back yet. Readers see what was said before, or this."""
    staging = path.with_suffix(".new")
    staging.write_text("".join(f"{model}\n" for model in sorted(dead)), encoding="utf-8")
    staging.replace(path)


def read(path: Path) -> frozenset[str]:
    """The models that are said to be dead; none where nothing has been said."""
    try:
        return frozenset(path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return frozenset()


@dataclass(frozen=True, slots=True)
class Seats:
    """Requests in flight of each process of the step loop, and whether the server is to end, in memory that all of them share.

    The numbers are: whether the server is to end, and for each process its requests in flight, whether it ever had one, its lost
    calls, its target sequences, the calls that the target has answered and hangs in, and its beats. Each has one writer. A loop
    counts a request first and then looks whether the server is to end; the launcher says so first and then looks at the counts.
    So it sees what was let in before, and nothing is let in after.
    """

    numbers: memoryview

    @classmethod
    def alone(cls) -> Self:
        """Of a process that no launcher has started, which shares them with nobody."""
        return cls(memoryview(bytearray(_SIZE)).cast("q"))

    @classmethod
    def make(cls, notices: Path) -> Self:
        """Those of a server that is about to start, all free, beside the file of its notices."""
        notices.with_suffix(".seats").write_bytes(bytes(_SIZE))
        return cls.beside(notices)

    @classmethod
    def beside(cls, notices: Path) -> Self:
        """Those that the launcher has made. Raises: OSError: it has not."""
        with notices.with_suffix(".seats").open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0)).cast("q"))

    @property
    def ending(self) -> bool:
        """No new requests; those in flight may finish."""
        return bool(self.numbers[0])

    def end(self) -> None:
        """From now on the server is to end."""
        self.numbers[0] = 1

    @property
    def num_in_flight(self) -> int:
        """Requests of all processes."""
        return sum(self.numbers[1 : 1 + MAX_LOOPS])

    @property
    def num_used(self) -> int:
        """Processes that have had a request."""
        return sum(self.numbers[1 + MAX_LOOPS : 1 + 2 * MAX_LOOPS])

    @property
    def most_lost(self) -> int:
        """Calls that one process has lost with dead models, where it lost the most: none of them is ever answered."""
        return max(self.numbers[1 + 2 * MAX_LOOPS : 1 + 3 * MAX_LOOPS])

    @property
    def num_sequences(self) -> int:
        """Target sequences of all processes."""
        return sum(self.numbers[1 + 3 * MAX_LOOPS : 1 + 4 * MAX_LOOPS])

    @property
    def num_answered(self) -> int:
        """Calls that the target has answered, of all processes, since the start."""
        return sum(self.numbers[1 + 4 * MAX_LOOPS : 1 + 5 * MAX_LOOPS])

    @property
    def num_hung(self) -> int:
        """Calls that the target does not let go of now, of all processes."""
        return sum(self.numbers[1 + 5 * MAX_LOOPS : 1 + 6 * MAX_LOOPS])

    def seat(self, loop: int) -> Seat:
        """The place of one process, counted from 0."""
        return Seat(self, 1 + loop)


@dataclass(frozen=True, slots=True)
class Seat:
    """What one process of the step loop says in :class:`Seats`, and sees of the others. For one thread."""

    _seats: Seats
    _place: int

    def enter(self) -> None:
        """One request more."""
        self._seats.numbers[self._place] += 1
        self._seats.numbers[self._place + MAX_LOOPS] = 1

    def leave(self) -> None:
        """It is answered."""
        self._seats.numbers[self._place] -= 1

    def lose(self, num_calls: int) -> None:
        """So many of its calls are lost now."""
        self._seats.numbers[self._place + 2 * MAX_LOOPS] = num_calls

    def say_sequences(self, num_sequences: int) -> None:
        """So many target sequences of its are in flight now."""
        self._seats.numbers[self._place + 3 * MAX_LOOPS] = num_sequences

    def answered(self) -> None:
        """The target has answered one of its calls."""
        self._seats.numbers[self._place + 4 * MAX_LOOPS] += 1

    @property
    def num_answered(self) -> int:
        """Calls that the target has answered, of all processes, since the start."""
        return self._seats.num_answered

    def hangs(self, by: int) -> None:
        """The target does not let go of one call more (1), or of one less (-1)."""
        self._seats.numbers[self._place + 5 * MAX_LOOPS] += by

    def beat(self) -> None:
        """Its event loop goes round."""
        self._seats.numbers[self._place + 6 * MAX_LOOPS] += 1

    @property
    def num_beats(self) -> int:
        """How often it has said so."""
        return self._seats.numbers[self._place + 6 * MAX_LOOPS]

    @property
    def num_sequences_elsewhere(self) -> int:
        """Target sequences of the other processes."""
        return self._seats.num_sequences - self._seats.numbers[self._place + 3 * MAX_LOOPS]

    @property
    def num_in_flight(self) -> int:
        """Requests of this process."""
        return self._seats.numbers[self._place]

    @property
    def num_in_all(self) -> int:
        """Requests of all processes. Two that come at once may both see the other: the last place may stay free then."""
        return self._seats.num_in_flight

    @property
    def ending(self) -> bool:
        return self._seats.ending


class Lessons:
    """What the processes of the step loop have learned, in the one order in which it was told, in memory that all of them share.

    A ring: who does not listen for so long that it comes round again has missed the oldest. A writer that dies leaves nothing
    behind. Each process has its own object. For one thread.
    """

    SIZE, NUM = 512, 1 << 14
    """Bytes of a lesson, and lessons in the ring: at 1,000 a second it comes round in 16 s."""
    _MARGIN = 64
    """Of the oldest, which may be overwritten while they are read."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._memory = mmap.mmap(descriptor, 0)
        self._num_told = memoryview(self._memory)[:8].cast("q")
        self._num_heard = 0

    @classmethod
    def make(cls, notices: Path) -> None:
        """An empty ring of a server that is about to start, beside the file of its notices.

        Raises:
            OSError: there is no room for it. Who writes to memory of a file without room is killed, so it is taken now.
        """
        with notices.with_suffix(".lessons").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 + cls.SIZE * cls.NUM)

    @classmethod
    def beside(cls, notices: Path) -> Self:
        """That which the launcher has made. Raises: OSError: it has not."""
        return cls(os.open(notices.with_suffix(".lessons"), os.O_RDWR | os.O_CLOEXEC))

    def tell(self, lesson: Sequence[Any]) -> bool:
        """Put it behind all others; False if it is too long, or the file system knows no locks."""
        text = json.dumps(lesson, separators=(",", ":"), default=float).encode()
        if len(text) > self.SIZE:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            return False
        try:
            number = self._num_told[0]
            self._memory[self._place(number) : self._place(number) + self.SIZE] = text.ljust(self.SIZE)
            self._num_told[0] = number + 1  # last: what is not whole was never told
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def heard(self) -> Iterator[Sequence[Any]]:
        """Those that were told since the last time, by whomever."""
        while self._num_heard < (num_told := self._num_told[0]):
            self._num_heard = max(self._num_heard, num_told - self.NUM + self._MARGIN)  # older ones are being written over
            place = self._place(self._num_heard)
            self._num_heard += 1
            yield json.loads(self._memory[place : place + self.SIZE])

    def _place(self, number: int) -> int:
        return 8 + number % self.NUM * self.SIZE


@dataclass(frozen=True, slots=True)
class OtherLoops:
    """The other processes of the step loop, for what one of them decides by (:class:`~lr_backend.policy.others.Others`)."""

    seat: Seat
    lessons: Lessons

    @property
    def num_requests(self) -> int:
        return self.seat.num_in_all - self.seat.num_in_flight

    @property
    def num_sequences(self) -> int:
        return self.seat.num_sequences_elsewhere

    def say_sequences(self, num: int) -> None:
        self.seat.say_sequences(num)

    def tell(self, lesson: Sequence[Any]) -> bool:
        return self.lessons.tell(lesson)

    def heard(self) -> Iterator[Sequence[Any]]:
        return self.lessons.heard()
