"""What the launcher and the processes of the step loop tell one another while they run, by two small files.

The launcher tells of models whose process has died: Triton tells its models nothing of it, and a call to such a model hangs until
its client gives up. It also tells that the server is to end: Triton takes no BLS call once it is stopping, so answers must finish
before it is told to stop. The processes of the loop tell how many requests each of them is answering (:class:`Seats`), and how
many of its calls are lost with dead models. Together they keep to the server's limit, and the launcher sees when all is
answered.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NOTICE_VARIABLE = "LOOKAHEAD_NOTICE_FILE"
"""Names the file of deaths to the step loop, which is there from the first death on. That of the seats lies beside it."""
MAX_LOOPS = 64
"""Processes of the step loop that one server may have."""
_SIZE = 8 * (1 + 3 * MAX_LOOPS)


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

    The numbers are: whether the server is to end, and for each process its requests in flight, whether it ever had one, and its
    lost calls. Each has one writer. A loop counts a request first and then looks whether the server is to end; the launcher says
    so first and then looks at the counts. So it sees what was let in before, and nothing is let in after.
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
        return max(self.numbers[1 + 2 * MAX_LOOPS :])

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
