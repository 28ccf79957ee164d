"""Prompts beside decodes: long chunks are computed on a second thread, while iterations go on with the rest.

A branch that joins brings some thirty tokens, which take as long as several decode iterations. Where a core is free, the other
sequences need not wait for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from lr_backend.embedded.runner import Output
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import Sequence

MIN_TOKENS = 16
"""A shorter chunk costs an iteration less than handing it over does."""

Run = Callable[[Items[Chunk]], tuple[Tensor, list[Output]]]


def give_way(niceness: int) -> None:
    """Have this thread, and those that it starts, give way to all others by so much."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + niceness)


class PrefillThread:
    """Computes one batch of chunks at a time. All methods are for the engine's thread.

    Attributes:
        sequences: those of the batch that is being computed. Nobody else may touch them until :meth:`take`.
    """

    def __init__(self, run: Run, on_done: Callable[[], None], niceness: int = 0) -> None:
        """``on_done`` is called from the second thread when :meth:`take` has something to give.

        Args:
            niceness: of that thread, on top of the process's.
        """
        self._run = run
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, "embedded-engine-prefill", initializer=give_way, initargs=(niceness,))
        self._executor.submit(int).result()  # a thread that cannot be started is no affair of the first prompt's
        self._chunks: list[Chunk] = []
        self._future: Future[tuple[Tensor, list[Output]]] | None = None
        self.sequences: Collection[Sequence] = ()

    def divide(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Chunks for the second thread, and those for the iteration.

        Without short chunks there is nothing that long ones would hold up: then all are for the iteration. A long chunk that
        finds the second thread busy is for neither; it comes again with the next iteration. The last token of a prompt is left
        for an iteration, where it is one decode more.
        """
        long = [chunk.without_last() for chunk in chunks if chunk.count > MIN_TOKENS]
        others = [chunk for chunk in chunks if chunk.count <= MIN_TOKENS]
        if not long or not others:
            return [], chunks
        return ([] if self.sequences else long), others

    def start(self, chunks: list[Chunk]) -> None:
        """Compute these; nothing else is being computed."""
        assert self._future is None, "the prefill thread is busy"
        future = self._executor.submit(self._run, chunks)  # if it raises, nothing is being computed
        self._chunks, self._future = chunks, future
        self.sequences = frozenset(chunk.sequence for chunk in chunks)
        future.add_done_callback(lambda _: self._on_done())

    @property
    def done(self) -> bool:
        """Whether there is something to take."""
        return self._future is not None and self._future.done()

    def take(self) -> tuple[list[Chunk], Callable[[], tuple[Tensor, list[Output]]]]:
        """Wait for the batch. Returns its chunks, and what gives their logits or raises why there are none."""
        chunks, future = self._chunks, self._future
        assert future is not None, "the prefill thread has nothing"
        future.exception()
        self._chunks, self._future, self.sequences = [], None, ()
        return chunks, future.result

    def close(self) -> None:
        """Wait for what is being computed."""
        self._executor.shutdown()
