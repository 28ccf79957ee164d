"""How many requests one process of the step loop carries, at the pace of ``qwen3-32b-apart`` on H200s.

The loop's process is this one: service, loop, tokenizer and metrics are the server's, without Triton. Engines only take time, in
a process of their own; every eight requests have a deployment of theirs, so that the loop fills up and not the engines. The same
requests then run on the virtual clock, where the loop takes no time: by how much answers are later here is what it takes.
Beyond what this machine carries, the virtual clock charges each call the processor time that was measured.

A real Triton serves the same deployment in slow motion, with one process of the loop and with two. There a step costs more: calls
go by BLS. What a call costs does not depend on the pace. Polls go by the wall's clock and cost more a step in this motion, so a
process carries a little more at the real pace than is said.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import psutil
import structlog
import typer
from lr_client import Client, Options
from rich.console import Console
from rich.table import Table

from bench.emulation import DEPLOYMENT, ROWS, SYSTEM, TIMEOUT_S
from bench.kit.engines_apart import EnginesApart, Sets, request_id
from bench.kit.hardware import processor_line
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import serving, short_texts
from lr_backend.build.emulated_spec import DEFAULT_WORKLOAD, EmulatedDeployment, emulated
from lr_backend.build.pace import machine_of, stood_for
from lr_backend.build.render import LOOKAHEAD_MODEL
from lr_backend.clock import run_virtual
from lr_backend.config import LoopConfig
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.workload import Workload
from lr_backend.errors import LookaheadError
from lr_backend.fields import LOOKAHEAD_INPUTS
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.overheads import BLS_MS
from lr_backend.loop.assemble import Engines, Models
from lr_backend.plan.simulation import Policy, ms_a_token
from lr_backend.request import Usage
from lr_backend.serve.keeper import stubs_of
from lr_backend.serve.server import TritonServer
from lr_backend.triton.loop_lag import watch_lag
from lr_backend.triton.models import load_models
from lr_backend.triton.service import LookaheadService
from lr_backend.triton.threads import share_interpreter

LOADS = (1, 4, 8, 16, 32, 64, 128)
MODES = ("lr", "lr_sd")
A_SET = 8
"""Requests that share a deployment's engines."""
NUM_STEPS = 12
FULL_SHARE, FULL_LAG_MS = 0.9, 10.0
"""A process is full with so much of a core, or where half of all looks find its event loop so late."""
BEYOND = (2,)
"""Times the last load: on the virtual clock alone."""
NO_LIMIT = 1 << 16
TRITON_LOAD, TRITON_SLOW_MOTION = 8, 2.0
TRITON_RUNS = (("lr", 1), ("lr", 2), ("lr_sd", 1))
"""Modes, and processes of the loop."""


@dataclass(frozen=True)
class Setting:
    """What every row has in common."""

    workload: Workload
    machine: Machine
    config: LoopConfig
    models: Models

    @classmethod
    def of(cls, deployment: EmulatedDeployment) -> Setting:
        """A deployment without Triton's hop, and without limits of how many it answers."""
        machine = machine_of(stood_for(deployment.emulates), deployment.system)
        machine = machine.with_longer_hops(dict.fromkeys(machine.places, -BLS_MS.value / 2e3))
        config = deployment.loop_config()
        limits = config.limits.model_copy(update={"max_in_flight_requests": NO_LIMIT})
        config = config.model_copy(update={"limits": limits})
        return cls(deployment.texts, machine, config, load_models(config))

    def sets(self, load: int, loop_s: float = 0.0) -> Sets:
        return Sets(self.workload, replace(self.machine, loop_s=loop_s), -(-load // A_SET))

    def service(self, engines: Engines) -> LookaheadService:
        return LookaheadService(self.config, self.models, engines)


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one load, on the wall's clock and on the virtual one.

    Attributes:
        cpu_s, engines_cpu_s: processor time of the loop's process, and of that of the engines.
        lag_p50_ms, lag_p99_ms: of the event loop.
        ms_a_token, virtual_ms, charged_ms: milliseconds a token here, where the loop takes no time, and where each of its calls
            takes what it took here.
    """

    mode: str
    load: int
    num_steps: int
    num_calls: int
    num_tokens: int
    wall_s: float
    cpu_s: float
    engines_cpu_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    ms_a_token: float
    virtual_ms: float
    charged_ms: float

    @property
    def cpu_ms_a_step(self) -> float:
        return 1e3 * self.cpu_s / self.num_steps

    @property
    def share(self) -> float:
        """Of one core, that the loop's process takes."""
        return self.cpu_s / self.wall_s

    @property
    def engines_share(self) -> float:
        return self.engines_cpu_s / self.wall_s

    @property
    def steps_a_second(self) -> float:
        """Of each request, where the loop takes no time."""
        return 1e3 * self.num_steps / (self.virtual_ms * self.num_tokens)

    @property
    def off(self) -> float:
        """By how much answers are later than where the loop takes no time."""
        return self.ms_a_token / self.virtual_ms - 1.0

    @property
    def full(self) -> bool:
        """The loop's process is."""
        return self.share > FULL_SHARE or self.lag_p50_ms > FULL_LAG_MS

    @property
    def held_up(self) -> bool:
        """The engines' process is full: this machine goes no further."""
        return self.engines_share > FULL_SHARE

    def as_dict(self) -> dict[str, Any]:
        derived = ("cpu_ms_a_step", "share", "engines_share", "steps_a_second", "off", "full", "held_up")
        return rounded({**asdict(self), **{name: getattr(self, name) for name in derived}})


@dataclass(frozen=True, slots=True)
class Beyond:
    """Milliseconds a token at a load that was not run: by the virtual clock, without and with the loop's processor time."""

    mode: str
    load: int
    virtual_ms: float
    charged_ms: float


@dataclass(frozen=True, slots=True)
class Instances:
    """Processes of the loop behind one Triton.

    Attributes:
        cpu_s: of each process.
    """

    mode: str
    load: int
    num_steps: int
    wall_s: float
    cpu_s: tuple[float, ...]

    @property
    def cpu_ms_a_step(self) -> float:
        return 1e3 * sum(self.cpu_s) / self.num_steps

    def as_dict(self) -> dict[str, Any]:
        return rounded({**asdict(self), "cpu_ms_a_step": self.cpu_ms_a_step})


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def carried(cpu_ms_a_step: float, steps_a_second: float) -> int:
    """Requests that fill a core up to :data:`FULL_SHARE`, each of so many committed steps a second."""
    return int(FULL_SHARE * 1e3 / (cpu_ms_a_step * steps_a_second))


@dataclass
class Heard:
    """One client of the service; it only listens."""

    usage: Usage | None = None
    error: LookaheadError | None = None

    def send(self, tensors: Mapping[str, npt.NDArray[Any]], *, final: bool) -> None:
        if final:
            self.usage = Usage.model_validate_json(tensors["usage"][0])

    def fail(self, error: LookaheadError) -> None:
        self.error = error

    def is_cancelled(self) -> bool:
        return False


def inputs_of(policy: Policy, text: str, max_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """A streamed request as Triton hands it over."""
    shape = {"mode": policy.mode.value, "max_depth": policy.max_depth, "max_tokens": max_tokens}
    values = {"text_input": text, "temperature": 0.6, "seed": 0, "stream": True, **shape, **policy.fields}
    dtypes = {spec.name: spec.numpy_dtype for spec in LOOKAHEAD_INPUTS}
    return {
        name: np.array([value.encode() if isinstance(value, str) else value], dtype=dtypes[name])
        for name, value in values.items()
    }


async def answer_all(service: LookaheadService, texts: Texts, policy: Policy, numbers: range) -> list[Usage]:
    """Questions that are asked at once, eight to a set of engines.

    Raises:
        LookaheadError: one of them failed.
    """
    clients = [Heard() for _ in numbers]
    await asyncio.gather(
        *(
            service.serve(
                request_id(place // A_SET, number),
                inputs_of(policy, texts.question(number), texts.workload.max_tokens),
                clients[place],
            )
            for place, number in enumerate(numbers)
        )
    )
    for client in clients:
        if client.error is not None:
            raise client.error
    return [client.usage for client in clients if client.usage is not None]


def on_the_virtual_clock(setting: Setting, policy: Policy, numbers: range, loop_s: float = 0.0) -> float:
    """Milliseconds a token where each call takes the loop so long."""

    async def run() -> list[Usage]:
        engines = setting.sets(len(numbers), loop_s).open()
        service = setting.service(engines)
        usages = await answer_all(service, Texts(setting.workload, 0), policy, numbers)
        service.close()
        for one in (engines.target, engines.draft, engines.judge):
            await one.close()
        return usages

    return ms_a_token(run_virtual(run()))


@dataclass
class OnTheWall:
    """The loop of this process over engines in another, on the wall's clock."""

    setting: Setting
    apart: EnginesApart
    service: LookaheadService
    _next: int = 0
    _lags: list[float] = field(default_factory=list)

    async def measure(self, mode: str, load: int) -> tuple[Row, range]:
        """A row that has not been on the virtual clock yet, and its questions, which were never asked before."""
        numbers = range(self._next, self._next + load)
        self._next += load
        self._lags = []
        watching = asyncio.create_task(watch_lag(self._lags.append))
        wall_s, cpu_s, engines_cpu_s = time.perf_counter(), time.process_time(), self.apart.cpu_s
        usages = await answer_all(self.service, Texts(self.setting.workload, 0), ROWS[mode], numbers)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        engines_cpu_s = self.apart.cpu_s - engines_cpu_s
        watching.cancel()
        p50, p99 = np.percentile(self._lags or [0.0], (50, 99)) * 1e3
        num_steps = sum(one.num_steps for one in usages)
        num_calls = sum(one.num_target_calls + one.num_draft_calls + one.num_judge_calls for one in usages)
        counts = (num_steps, num_calls, sum(one.completion_tokens for one in usages))
        times = (wall_s, cpu_s, engines_cpu_s, float(p50), float(p99), ms_a_token(usages))
        return Row(mode, load, *counts, *times, 0.0, 0.0), numbers


def event_loop() -> asyncio.AbstractEventLoop:
    """As a server's process has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def measure(setting: Setting, modes: Sequence[str], loads: Sequence[int], console: Console) -> Iterator[tuple[Row, range]]:
    """Every mode at rising load until a process is full, each row with its questions; not on the virtual clock yet."""
    apart = EnginesApart(setting.sets(max(loads)))
    try:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            service = runner.run(_service(setting, apart))
            wall = OnTheWall(setting, apart, service)
            runner.run(wall.measure("lr_sd", 1))  # warms up
            for mode in modes:
                for load in loads:
                    console.print(f"[dim]{mode}, {load} in flight[/]")
                    row, numbers = runner.run(wall.measure(mode, load))
                    yield row, numbers
                    if row.full or row.held_up:
                        break
            service.close()
    finally:
        apart.close()


async def _service(setting: Setting, apart: EnginesApart) -> LookaheadService:
    return setting.service(apart.connect())


@dataclass(frozen=True, slots=True)
class Job:
    """Questions for the virtual clock, where each call takes the loop ``loop_s``; ``texts`` is the workload's file."""

    texts: str
    mode: str
    numbers: range
    loop_s: float

    def run(self) -> float:
        """Milliseconds a token."""
        quiet()
        return on_the_virtual_clock(setting_of(self.texts), ROWS[self.mode], self.numbers, self.loop_s)


@cache
def setting_of(texts: str) -> Setting:
    return Setting.of(emulated(DEPLOYMENT, SYSTEM, texts))


def on_both_clocks(texts: str, measured: Sequence[tuple[Row, range]]) -> tuple[list[Row], list[Beyond]]:
    """Rows with what the virtual clock says of them, and of loads beyond the last of each mode, at what a call took there."""
    last = {row.mode: row for row, _ in measured}
    loads = [(row, row.load * times) for row in last.values() for times in BEYOND]
    asked = [*measured, *((row, range(load)) for row, load in loads)]
    jobs = [Job(texts, row.mode, numbers, loop_s) for row, numbers in asked for loop_s in (0.0, row.cpu_s / row.num_calls)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = list(pool.map(Job.run, jobs))
    pairs = list(zip(found[::2], found[1::2], strict=True))
    rows = [
        replace(row, virtual_ms=virtual_ms, charged_ms=charged_ms)
        for (row, _), (virtual_ms, charged_ms) in zip(measured, pairs, strict=False)
    ]
    more = [Beyond(row.mode, load, *pair) for (row, load), pair in zip(loads, pairs[len(rows) :], strict=True)]
    return rows, more


def through_triton(deployment: EmulatedDeployment, folder: Path, count: int, mode: str, load: int) -> Instances:
    """A real Triton with so many processes of the loop."""
    texts = Texts(deployment.texts, 0)
    server_spec = deployment.server.model_copy(update={"num_loops": count})
    spec = deployment.model_copy(update={"server": server_spec})
    with serving(spec, folder) as server, ThreadPoolExecutor(load) as pool:
        ask = _asking(server.grpc_url, texts, ROWS[mode])
        list(pool.map(ask, range(count)))  # warm up
        before, wall_s = _cpu_of_loops(server), time.perf_counter()
        num_steps = sum(pool.map(ask, range(count, count + load)))
        wall_s, after = time.perf_counter() - wall_s, _cpu_of_loops(server)
    cpu_s = tuple(after[pid] - before[pid] for pid in sorted(before))
    return Instances(mode, load, num_steps, wall_s, cpu_s)


def _asking(url: str, texts: Texts, policy: Policy) -> Callable[[int], int]:
    """Asks a question by its number; returns the steps of its answer."""
    shape = {"mode": policy.mode.value, "max_depth": policy.max_depth, "max_tokens": texts.workload.max_tokens}
    options = Options(stream=True, temperature=0.6, seed=0, **{**shape, **policy.fields})

    def ask(number: int) -> int:
        with Client(url) as client:
            return client.ask(texts.question(number), options, timeout_s=TIMEOUT_S).usage.num_steps

    return ask


def _cpu_of_loops(server: TritonServer) -> dict[int, float]:
    """Processor time of each process of the loop, by its id."""
    times = {pid: psutil.Process(pid).cpu_times() for pid in stubs_of(server.pid)[LOOKAHEAD_MODEL]}
    return {pid: float(one.user + one.system) for pid, one in times.items()}


def table_of(rows: Sequence[Row], more: Sequence[Beyond]) -> Table:
    table = Table(title=f"one process of the step loop, at the pace of {DEPLOYMENT} on H200s")
    for name in ("mode", "in flight", "CPU ms a step", "calls a step", "of a core", "engines' core", "lag p50, p99 ms"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name in ("ms a token", "loop takes none", "late", "CPU charged"):
        table.add_column(name, justify="right")
    for row in rows:
        colour = "bold red" if row.full else "yellow" if row.held_up else "green"
        table.add_row(
            *(row.mode, str(row.load), f"{row.cpu_ms_a_step:.2f}", f"{row.num_calls / row.num_steps:.1f}"),
            *(f"[{colour}]{row.share:.0%}[/]", f"{row.engines_share:.0%}", f"{row.lag_p50_ms:.1f}, {row.lag_p99_ms:.1f}"),
            *(f"{row.ms_a_token:.2f}", f"{row.virtual_ms:.2f}", f"{row.off:+.1%}", f"{row.charged_ms:.2f}"),
        )
    for one in more:
        late = f"{one.charged_ms / one.virtual_ms - 1.0:+.1%}"
        unknown = ("",) * 6
        table.add_row(one.mode, str(one.load), *unknown, f"{one.virtual_ms:.2f}", late, f"{one.charged_ms:.2f}")
    return table


@dataclass(frozen=True)
class Found:
    """All that one run has measured."""

    label: str
    rows: Sequence[Row]
    more: Sequence[Beyond]
    instances: Sequence[Instances]

    def summary(self) -> dict[str, Any]:
        """Requests that one process of the loop carries, by mode: without Triton, and by BLS."""
        found: dict[str, Any] = {}
        for mode in dict.fromkeys(row.mode for row in self.rows):
            own = [row for row in self.rows if row.mode == mode]
            pace = max((row for row in own if row.load <= A_SET), key=lambda row: row.load, default=own[0]).steps_a_second
            kept = [row for row in own if not row.held_up] or own
            found[mode] = {"loop_alone": carried(kept[-1].cpu_ms_a_step, pace)}
            for one in self.instances:
                if one.mode == mode:
                    found[mode][f"triton_{len(one.cpu_s)}"] = carried(one.cpu_ms_a_step, pace) * len(one.cpu_s)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "device": processor_line(),
            "rows": [row.as_dict() for row in self.rows],
            "beyond": [rounded(asdict(one)) for one in self.more],
            "triton": [one.as_dict() for one in self.instances],
            "carried": self.summary(),
        }


def show(console: Console, found: Found) -> None:
    console.print(table_of(found.rows, found.more))
    for one in found.instances:
        processes = ", ".join(f"{seconds:.2f}" for seconds in one.cpu_s)
        told = f"{one.cpu_ms_a_step:.2f} CPU ms a step; CPU s of each: {processes}"
        console.print(f"through Triton, {one.mode}, {one.load} in flight, {len(one.cpu_s)} process(es) of the loop: {told}")
    console.print(f"[yellow]{found.label}[/]", soft_wrap=True, highlight=False)


def quiet() -> None:
    """A line a request on the console is not a server's log: only what goes wrong is told."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def main(
    loads: Annotated[list[int] | None, typer.Option("--load", min=1, help="Requests in flight; by default 1 to 128.")] = None,
    modes: Annotated[list[str] | None, typer.Option("--mode", help="lr or lr_sd; by default both.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Of an answer's reasoning.")] = NUM_STEPS,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "loop_limit.json",
) -> None:
    """Print a table and one line of JSON."""
    console, chosen = console_of_any_width(), modes or list(MODES)
    if unknown := set(chosen) - set(MODES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(MODES)}", param_hint="--mode")
    quiet()
    share_interpreter()
    with tempfile.TemporaryDirectory(prefix="lookahead-loop-") as name:
        folder = Path(name)
        texts = short_texts(DEFAULT_WORKLOAD, steps, folder)
        slow = emulated(DEPLOYMENT, SYSTEM, texts, slow_motion=TRITON_SLOW_MOTION)
        instances = [
            through_triton(slow, folder / f"{mode}.{count}", count, mode, TRITON_LOAD)
            for mode, count in TRITON_RUNS
            if mode in chosen
        ]
        measured = list(measure(setting_of(texts), chosen, sorted(loads or LOADS), console))
        rows, more = on_both_clocks(texts, measured)
    found = Found(emulated(DEPLOYMENT, SYSTEM).pace_label, rows, more, instances)
    show(console, found)
    write_json(output, found.as_dict())
    print_line(console, found.summary())
