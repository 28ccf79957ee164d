"""The engines of a deployment whose iterations are computed on a card, each role's in a process of its own.

Texts are scripted and the step loop is real, as in the simulation. But the clock is the one on the wall, and an iteration lasts
as long as its kernels do beside whatever else the card is doing. What a serving runtime adds on the host is waited for, by the
same constants as in the simulation.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from bench.kit.card import FusedModel, like, shard_of
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.emulated.texts import ScriptedSource
from lr_backend.emulated.virtual import LoopThread, SharedCards, VirtualEngine
from lr_backend.engine import Role
from lr_backend.hardware.cost import Iteration, ProfileCosts
from lr_backend.hardware.machine import Place

START_TIMEOUT_S = 180.0
SPIN_S = 2e-3
"""The last of a wait is spent watching the clock: timers of the operating system come some of it late."""


@dataclass(frozen=True, slots=True)
class ModelOnCard:
    """What one process computes.

    Attributes:
        hub: a known model; or ``spec`` says its shape.
        tp_size: the process computes one card's share of so many.
        max_kv_tokens: of all sequences of an iteration together.
    """

    hub: str
    device: str = "cuda"
    max_kv_tokens: int = 65_536
    max_positions: int = 8192
    tp_size: int = 1
    spec: ModelSpec | None = None

    def load(self) -> FusedModel:
        spec = self.spec or shard_of(self.hub, self.tp_size)
        sizes = {"max_kv_tokens": self.max_kv_tokens, "max_positions": self.max_positions}
        return FusedModel.random(spec, device=self.device, **sizes)


@dataclass(frozen=True, slots=True)
class Busy:
    """Compute the same iteration over and over between two moments of the monotonic clock; answered with each one's seconds."""

    iteration: Iteration
    start_s: float
    end_s: float


class Worker:
    """A process that computes iterations of one model, one at a time."""

    def __init__(self, model: ModelOnCard, environment: Mapping[str, str] | None = None) -> None:
        """Starts the process; :meth:`wait` for it before another is started: a model that loads takes twice its memory."""
        self._max_kv_tokens, self._known = model.max_kv_tokens, set[Iteration]()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(model, theirs, dict(environment or {})), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        """Its next answer, or that it is ready.

        Raises:
            RuntimeError: it failed or takes too long.
        """
        if not self.connection.poll(START_TIMEOUT_S):
            raise RuntimeError("a process with a model does not answer")
        answer = self.connection.recv()
        if isinstance(answer, BaseException):
            raise RuntimeError(f"a process with a model failed: {answer!r}")
        return answer

    def ask(self, work: Iteration | Busy) -> Any:
        if isinstance(work, Iteration):
            self._known.add(like(work, self._max_kv_tokens))
        self.connection.send(work)
        return self.wait()

    def knows(self, iteration: Iteration) -> bool:
        """Whether it was asked for one like it, so that the graph is recorded."""
        return like(iteration, self._max_kv_tokens) in self._known

    def close(self) -> None:
        self.connection.close()
        self._process.join(10.0)
        self._process.kill()


def _serve(model: ModelOnCard, connection: Connection, environment: dict[str, str]) -> None:
    os.environ |= environment  # before the card is touched
    try:
        loaded = model.load()
        connection.send("ready")
        while True:
            work = connection.recv()
            if isinstance(work, Busy):
                connection.send(_busy_s(loaded, work))
            else:
                loaded.run(work)
                connection.send("done")
    except EOFError:
        pass
    except BaseException as error:
        connection.send(error)


def _busy_s(model: FusedModel, work: Busy) -> list[float]:
    while time.monotonic() < work.start_s:
        pass
    found = []
    while (started_s := time.monotonic()) < work.end_s:
        model.run(work.iteration)
        found.append(time.monotonic() - started_s)
    return found


@contextmanager
def workers(
    models: Mapping[Role, ModelOnCard],
    environment: Mapping[str, str] | None = None,
    environments: Mapping[Role, Mapping[str, str]] | None = None,
) -> Iterator[dict[Role, Worker]]:
    """A process for each role, ready; with these variables in its environment, all roles' and its own."""
    own = environments or {}
    started: dict[Role, Worker] = {}
    try:
        for role, model in models.items():
            started[role] = Worker(model, {**(environment or {}), **own.get(role, {})})
            started[role].wait()
        yield started
    finally:
        for worker in started.values():
            worker.close()


# Engines ----------------------------------------------------------------------------------------------------------------


@dataclass
class Computed:
    """What a role has computed: iterations, and the seconds on the card that they took and were predicted to take alone."""

    num_iterations: int = 0
    card_s: float = 0.0
    predicted_s: float = 0.0


class CardEngine(VirtualEngine):
    """An engine whose iterations a worker computes, on a clock that is the wall's."""

    def __init__(
        self,
        worker: Worker,
        computed: Computed,
        place: Place,
        source: ScriptedSource,
        shared: SharedCards,
        loop_thread: LoopThread,
    ) -> None:
        super().__init__(place, source, shared, loop_thread)
        assert isinstance(place.costs, ProfileCosts), place.costs
        self._worker, self.computed, self._costs = worker, computed, place.costs

    async def compute(self) -> None:
        iteration, clock = self.timeline.iteration, asyncio.get_running_loop()
        assert isinstance(clock, PunctualLoop), clock
        if not self._worker.knows(iteration):
            clock.stand_still(lambda: self._worker.ask(iteration))
        started_s = clock.time()
        await self._answer(iteration)
        kernels_s = self._costs.kernels_ms(iteration) / 1e3
        self.computed.num_iterations += 1
        self.computed.card_s += clock.time() - started_s
        self.computed.predicted_s += kernels_s
        await asyncio.sleep(max(0.0, self._costs.seconds(iteration) - kernels_s))

    async def _answer(self, iteration: Iteration) -> None:
        """Have it computed."""
        loop, connection = asyncio.get_running_loop(), self._worker.connection
        answered: asyncio.Future[None] = loop.create_future()
        loop.add_reader(connection.fileno(), answered.set_result, None)
        try:
            connection.send(iteration)
            await answered
        finally:
            loop.remove_reader(connection.fileno())
        self._worker.wait()


class _WatchingSelector(selectors.DefaultSelector):
    """A selector that watches the clock at the end of each wait, so that timers are not late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0.0:
            return super().select(timeout)
        end_s = time.monotonic() + timeout
        if timeout > SPIN_S and (found := super().select(timeout - SPIN_S)):
            return found
        while time.monotonic() < end_s:
            if found := super().select(0):
                return found
        return []


class PunctualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers are some microseconds late, at the price of a core.

    Attributes:
        stopped_s: that its clock has stood still in all.
    """

    def __init__(self) -> None:
        self.stopped_s = 0.0
        super().__init__(_WatchingSelector())

    def time(self) -> float:
        return super().time() - self.stopped_s

    def stand_still(self, work: Callable[[], object]) -> None:
        """Do work that takes no time by this clock, and let nobody else on this loop do anything meanwhile.

        What other processes have begun still ends.
        """
        started_s = super().time()
        work()
        self.stopped_s += super().time() - started_s


@dataclass(frozen=True)
class EnginesOnCard:
    """Makes engines of these workers, one at a time, as :func:`~lr_backend.plan.simulation.virtual_engines` wants them."""

    workers: Mapping[Role, Worker]
    computed: Mapping[Role, Computed]

    @classmethod
    def of(cls, those: Mapping[Role, Worker]) -> Self:
        return cls(those, {role: Computed() for role in those})

    def engine(self, role: Role, place: Place, source: ScriptedSource, shared: SharedCards, thread: LoopThread) -> CardEngine:
        return CardEngine(self.workers[role], self.computed[role], place, source, shared, thread)
