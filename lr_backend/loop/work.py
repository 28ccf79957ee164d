"""The work of one request that is under way: calls and verdicts, each for one node of its tree."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from lr_backend.errors import ENDS, contained
from lr_backend.loop.ledger import Job, Ledger, made_for
from lr_backend.loop.tree import Node
from lr_backend.trace.schema import Purpose

Change = Callable[[], None]
"""What a completion does to the tree; raises where the work failed."""
Work = Callable[[], Awaitable[Change]]


class WorkUnderWay:
    """Tasks by node. None outlives the request.

    A node that was cancelled has lost. What its tasks still complete is ignored.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_node: defaultdict[Node, list[asyncio.Task[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._completions: asyncio.Queue[tuple[Node, Change]] = asyncio.Queue()

    def __bool__(self) -> bool:
        return bool(self._by_node)

    def start(self, node: Node, purpose: Purpose, work: Work) -> None:
        """Start work for a node."""
        task = asyncio.create_task(self._complete(node, self._ledger.job(purpose, node), work))
        self._by_node[node].append(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def absorb(self) -> None:
        """Wait until something completes; make the changes of all that has, in the order in which it did."""
        completed = [await self._completions.get()]
        while not self._completions.empty():
            completed.append(self._completions.get_nowait())
        for node, change in completed:
            if node in self._by_node:
                change()

    def cancel(self, nodes: Iterable[Node]) -> None:
        """These nodes have lost."""
        for node in nodes:
            for task in self._by_node.pop(node, ()):
                task.cancel()

    async def cancel_all(self) -> None:
        """Returns when nothing runs any more, even where it is cancelled itself: a call that has not ended has no time."""
        self.cancel(list(self._by_node))
        try:
            await self._idle()
        except asyncio.CancelledError:
            await self._idle()
            raise

    async def _idle(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _complete(self, node: Node, job: Job | None, work: Work) -> None:
        try:
            with made_for(job):
                change = await work()
        except ENDS:
            raise
        except BaseException as error:  # whatever it is, the loop's own task raises it: no work fails unseen
            change = _raising(contained(error))
        self._completions.put_nowait((node, change))


def _raising(error: Exception) -> Change:
    def change() -> None:
        raise error

    return change
