"""Prompts beside decodes: one batch of chunks is computed on a thread of its own, while iterations go on with the rest.

A branch that joins brings some thirty tokens, which take as long as several decode iterations. Where a core is free, the others
need not wait for it. Chunks in the lane belong to it until :meth:`SideLane.take`: nobody else may touch their sequences.
"""

from __future__ import annotations

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


class SideLane:
    """At most one batch at a time; the engine's thread owns it."""

    def __init__(self, run: Run, on_done: Callable[[], None]) -> None:
        """``on_done`` is called from the lane's thread when :meth:`take` has something to give."""
        self._run = run
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, "embedded-engine-side")
        self._chunks: list[Chunk] = []
        self._future: Future[tuple[Tensor, list[Output]]] | None = None
        self.sequences: Collection[Sequence] = ()
        """Those in the lane."""

    def divide(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Chunks for the lane and for the iteration; a long chunk that finds the lane taken waits for it beside decodes.

        The last token of a prompt is left for an iteration: there it is one decode more.
        """
        long = [chunk.without_last() for chunk in chunks if chunk.count > MIN_TOKENS]
        others = [chunk for chunk in chunks if chunk.count <= MIN_TOKENS]
        if not long or not others:
            return [], chunks
        return ([] if self.sequences else long), others

    def start(self, chunks: list[Chunk]) -> None:
        assert self._future is None, "the lane is taken"
        self._chunks = chunks
        self.sequences = frozenset(chunk.sequence for chunk in chunks)
        self._future = self._executor.submit(self._run, chunks)
        self._future.add_done_callback(lambda _: self._on_done())

    @property
    def done(self) -> bool:
        """Whether there is something to take."""
        return self._future is not None and self._future.done()

    def take(self) -> tuple[list[Chunk], Callable[[], tuple[Tensor, list[Output]]]]:
        """The lane's chunks and what gives their logits or raises why there are none; waits until they are computed."""
        chunks, future = self._chunks, self._future
        assert future is not None, "the lane is empty"
        future.exception()
        self._chunks, self._future, self.sequences = [], None, ()
        return chunks, future.result

    def close(self) -> None:
        """Wait for what is being computed."""
        self._executor.shutdown()
