"""What processes hold of memory and of the system's handles, and how much of it a request leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from scipy.stats import theilslopes

TRITON = "tritonserver"
MAX_BYTES_KEPT = 64.0
"""Of a request, in any process of this project."""
ENOUGH_REQUESTS = 2_000
"""Below, what stays is mostly what is set up once, and no leak."""
_WARM_UP = 1 / 3
"""The share of the samples in which caches fill."""


@dataclass(frozen=True)
class Held:
    """One process at one time."""

    name: str
    num_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Held:
        with process.oneshot():
            memory, threads = process.memory_info().rss, process.num_threads()
        return cls(name_of(process), memory, process.num_fds(), threads)


@dataclass(frozen=True)
class Kept:
    """What all requests together have left.

    Attributes:
        bytes_by_process: a request's, the median slope after the warm-up; Triton's own process is :data:`TRITON`. Of several
            processes of one name it is that of the one that keeps most.
        more: descriptors and threads that a process has come to hold, by process and kind, likewise.
        num_blocks: of the engines' KV caches that are held though nothing is in flight.
        num_requests: all of them.
    """

    bytes_by_process: Mapping[str, float]
    more: Mapping[str, int]
    num_blocks: int
    num_requests: int

    @classmethod
    def of(cls, samples: Sequence[tuple[int, Mapping[int, Held]]], num_blocks: int) -> Kept:
        """``samples``: the number of requests so far, and every process by its id."""
        warm = samples[int(len(samples) * _WARM_UP) :]
        pids = set.intersection(*(set(held) for _, held in warm))
        counts = [count for count, _ in warm]
        names = {pid: warm[0][1][pid].name for pid in pids}
        slopes = {pid: float(theilslopes([held[pid].num_bytes for _, held in warm], counts).slope) for pid in pids}
        # Of one name the last one stays, which is the one that keeps most.
        grown = sorted((num, f"{names[pid]} {what}") for pid in pids for what, num in growth(warm, pid).items() if num > 0)
        more = {what: num for num, what in grown}
        kept = {names[pid]: slopes[pid] for pid in sorted(pids, key=lambda pid: slopes[pid])}
        return cls(kept, more, num_blocks, counts[-1])

    @property
    def bytes_a_request(self) -> float:
        """The most that a process of this project keeps."""
        return max(0.0, *(slope for name, slope in self.bytes_by_process.items() if name != TRITON))

    @property
    def told(self) -> str:
        worst = max((name for name in self.bytes_by_process if name != TRITON), key=lambda name: self.bytes_by_process[name])
        theirs = self.bytes_by_process.get(TRITON, 0.0)
        return f"{self.bytes_a_request:.0f} bytes a request stay in {worst}, {theirs:.0f} in {TRITON}"

    @property
    def missed(self) -> tuple[str, ...]:
        leaks = self.bytes_a_request > MAX_BYTES_KEPT and self.num_requests >= ENOUGH_REQUESTS
        bytes_kept = (f"bytes a request: {self.bytes_a_request:.0f}",) if leaks else ()
        blocks = (f"blocks held: {self.num_blocks}",) if self.num_blocks else ()
        return (*bytes_kept, *blocks, *(f"more {what}: {num}" for what, num in self.more.items()))


def growth(warm: Sequence[tuple[int, Mapping[int, Held]]], pid: int) -> dict[str, int]:
    """By how much a process's fewest handles of the second half are more than its most of the first: growth, not a wave."""
    half = len(warm) // 2
    early, late = ([held[pid] for _, held in part] for part in (warm[:half], warm[half:]))
    return {
        "descriptors": min(one.num_descriptors for one in late) - max(one.num_descriptors for one in early),
        "threads": min(one.num_threads for one in late) - max(one.num_threads for one in early),
    }


def name_of(process: psutil.Process) -> str:
    """What a process of a served deployment is: a model's, Triton's own, the front end's, or the serving one's."""
    words = process.cmdline()
    program = Path(words[0]).name if words else ""
    if program.endswith("_stub") and len(words) > 1:  # one that is just being started has none yet
        return Path(words[1]).parents[1].name
    if "lr_backend.frontend" in words:
        return "frontend"
    return TRITON if program == TRITON else "guard" if any(word.endswith("guard.py") for word in words) else "serve"
