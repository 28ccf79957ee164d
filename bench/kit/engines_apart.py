"""Engines that take time and nothing else, in a process of their own: what a step loop's process takes is then the loop's alone.

They are those of the virtual clock, driven by the clock on the wall, so the two differ by what is real: processor time of the
loop, its way to the engines, and this machine's haste. Calls go through a pipe, and a thread takes the answers, as in Triton's
Python backend.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection

import psutil

from lr_backend.emulated.texts import Texts
from lr_backend.emulated.virtual import LoopThread, SharedCards
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Engine, EngineCall, Generation, Role
from lr_backend.errors import EngineError
from lr_backend.hardware.machine import Machine
from lr_backend.loop.assemble import Engines
from lr_backend.plan.simulation import virtual_engines

CLOSE_S = 10.0


@dataclass(frozen=True)
class Sets:
    """So many deployments that are alike; a request stays with one of them.

    Attributes:
        machine: that each is. Its ``loop_s`` is taken by one thread for the calls to all of them.
    """

    workload: Workload
    machine: Machine
    num_sets: int

    def open(self) -> Engines:
        """On the running event loop's clock."""
        texts = Texts(self.workload, 0)
        thread = LoopThread(self.machine.loop_s, SharedCards(self.machine.law), self.machine.call_demand)
        found = [virtual_engines(self.machine, texts, thread) for _ in range(self.num_sets)]
        return Engines(
            OneOfSet([one.target for one in found]),
            OneOfSet([one.draft for one in found]),
            OneOfSet([one.judge for one in found]),
        )


def request_id(one_set: int, number: int) -> str:
    """Of a request that stays with a set; ids of its calls begin with it."""
    return f"{one_set}.{number}"


class OneOfSet:
    """The engine of the set that a call's id names."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    async def generate(self, call: EngineCall) -> Generation:
        return await self._engines[int(call.request_id.partition(".")[0])].generate(call)

    async def close(self) -> None:
        for one in self._engines:
            await one.close()


class EnginesApart:
    """The process; :meth:`close` ends it. The engines are to be used on one event loop, which :meth:`connect` names."""

    def __init__(self, sets: Sets) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, sets), name="engines", daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._reader: threading.Thread | None = None

    def connect(self) -> Engines:
        """The engines, for the running event loop."""
        loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, args=(loop,), name="answers", daemon=True)
        self._reader.start()
        return Engines(*(_Called(self, role) for role in (Role.TARGET, Role.DRAFT, Role.JUDGE)))

    @property
    def cpu_s(self) -> float:
        """Processor time that the engines have taken."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(CLOSE_S)
        self._process.kill()
        if self._reader is not None:
            self._reader.join(CLOSE_S)
        self._connection.close()

    async def call(self, role: Role, call: EngineCall) -> Generation:
        number = next(self._numbers)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._connection.send((number, role, call))
        try:
            return await future
        except asyncio.CancelledError:
            with suppress(OSError):  # they have ended
                self._connection.send((number, role, None))
            raise
        finally:
            del self._waiting[number]

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(EOFError, OSError, RuntimeError):  # the process, or the event loop, has ended
            while True:
                loop.call_soon_threadsafe(self._settle, *self._connection.recv())
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        for number in list(self._waiting):
            self._settle(number, "the engines have ended")

    def _settle(self, number: int, result: Generation | str) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if isinstance(result, Generation):
            future.set_result(result)
        else:
            future.set_exception(EngineError(result))


class _Called:
    """One role's engines, seen from the loop's process."""

    def __init__(self, apart: EnginesApart, role: Role) -> None:
        self._apart, self._role = apart, role

    async def generate(self, call: EngineCall) -> Generation:
        return await self._apart.call(self._role, call)

    async def close(self) -> None:
        """The process is closed as a whole."""


def _run(connection: Connection, sets: Sets) -> None:
    """The engines' process. ``select`` ends a wait to the microsecond, where asyncio's own selector goes in milliseconds."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_serve(connection, sets))


async def _serve(connection: Connection, sets: Sets) -> None:
    opened = sets.open()
    engines: Mapping[Role, Engine] = {Role.TARGET: opened.target, Role.DRAFT: opened.draft, Role.JUDGE: opened.judge}
    running: dict[int, asyncio.Task[None]] = {}
    closed = asyncio.Event()

    async def answer(number: int, role: Role, call: EngineCall) -> None:
        try:
            connection.send((number, await engines[role].generate(call)))
        except Exception as error:  # whatever it is, the call must end
            connection.send((number, f"{type(error).__name__}: {error}"))
        finally:
            del running[number]

    def heed() -> None:
        while connection.poll():
            try:
                said = connection.recv()
            except EOFError:
                said = None
            if said is None:
                asyncio.get_running_loop().remove_reader(connection.fileno())
                closed.set()
                return
            number, role, call = said
            if call is not None:
                running[number] = asyncio.create_task(answer(number, role, call))
            elif number in running:
                running[number].cancel()

    asyncio.get_running_loop().add_reader(connection.fileno(), heed)
    await closed.wait()
    connection.close()
