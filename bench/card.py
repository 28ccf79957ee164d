"""The hardware profiles beside a real card, and the four modes with every iteration computed on it.

Models have random weights of the real shapes. Four parts, each of which can be asked for alone:

- ``iterations``: decodes, joins and both together, by graph and kernel by kernel, beside what the profile says;
- ``constants``: launches, gaps and copies on the host, beside the constants that stand for them;
- ``sharing``: how much target, draft and judge slow one another down on one card, beside the laws that stand for it;
- ``modes``: the real step loop over engines whose iterations this card computes, beside the simulation of the same texts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.kit.card import FusedModel
from bench.kit.card_engines import Busy, EnginesOnCard, ModelOnCard, PunctualLoop, Worker, workers
from bench.kit.hardware import processor_line
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from bench.maps import EQUAL_ALPHA, EQUAL_CONTEXT, FIXED, NUM_STEPS, POLICIES, TEXTS
from lr_backend.build.pace import machine_of, stood_for, system_of
from lr_backend.build.placements import Where, placed
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.cost import Iteration, Join, ProfileCosts
from lr_backend.hardware.overheads import COPY_BYTES_PER_S, EAGER_GAP_US, LAUNCH_US, POLL_SLACK_MS, Constant, Overheads
from lr_backend.hardware.profile import Profile, ProfileKey, find
from lr_backend.hardware.sharing import LAWS, CardSharing
from lr_backend.nvidia import probe_gpus
from lr_backend.plan.simulation import Policy, Scenario, keep_in_flight, ms_a_token, simulate_steady
from lr_backend.serve import mps

DEPLOYMENT = "qwen3-32b-1gpu"
PARTS = ("iterations", "constants", "sharing", "modes")
TARGET, DRAFT, JUDGE = "Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-7B-Instruct"
MODELS: Mapping[Role, str] = {Role.TARGET: TARGET, Role.DRAFT: DRAFT, Role.JUDGE: JUDGE}
SHARDS = ((TARGET, 1), (TARGET, 2), (DRAFT, 1), (JUDGE, 1))
"""Models and parallelisms to be timed; of the latter, one card's share without the all-reduces."""
KV_TOKENS = 131_072
DECODES = tuple(
    Iteration((), num, num * length)
    for length in (1_000, 4_000, 16_000)
    for num in (1, 2, 4, 8, 16, 32, 64, 128)
    if num * length <= KV_TOKENS
)
JOINS = (
    *(Iteration((Join(new, 1_000, new - 1),)) for new in (2, 5, 9, 17)),
    *(Iteration((Join(new, 1_000),)) for new in (32, 64, 128, 256, 512, 1_024)),
    *(Iteration((Join(new, cached),)) for cached in (4_000, 16_000) for new in (9, 32)),
    Iteration((Join(150, 100),)),
    Iteration((Join(1_000, 0),)),
    Iteration(tuple(Join(32, 1_000) for _ in range(4))),
)
MIXED = (
    Iteration((Join(9, 1_000, 8),), 8, 8_000),
    Iteration((Join(32, 1_000),), 8, 8_000),
    Iteration(tuple(Join(32, 1_000) for _ in range(4)), 8, 8_000),
)
NUM_TIMED, NUM_ALONE = 8, 30
WORK: Mapping[Role, Iteration] = {
    Role.TARGET: Iteration((), 2, 2 * 1_024),
    Role.DRAFT: Iteration((), 2, 2 * 1_024),
    Role.JUDGE: Iteration((Join(45, 100),)),
}
"""What each role computes over and over while it is looked at how they share the card."""
TOGETHER = (
    (Role.TARGET, Role.DRAFT),
    (Role.TARGET, Role.JUDGE),
    (Role.DRAFT, Role.JUDGE),
    (Role.TARGET, Role.DRAFT, Role.JUDGE),
)
BUSY_S = 1.5


@dataclass(frozen=True)
class Arrangement:
    """How the roles' processes share the card.

    Attributes:
        law: that is held against it.
        environments: of each role's process, what makes it so.
    """

    law: CardSharing
    environments: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)


def _split(percent: int) -> Arrangement:
    """So much of the card's multiprocessors for the target, and the rest for draft and judge."""
    shares = {role: percent if role is Role.TARGET else 100 - percent for role in Role}
    return Arrangement(
        CardSharing.MPS, {role: {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share}"} for role, share in shares.items()}
    )


ARRANGEMENTS: Mapping[str, Arrangement] = {
    "time_slices": Arrangement(CardSharing.TIME_SLICES),
    "mps": Arrangement(CardSharing.MPS),
    "mps_priority": Arrangement(CardSharing.MPS, {Role.TARGET: {"CUDA_MPS_CLIENT_PRIORITY": "1"}}),
    **{f"mps_split_{percent}": _split(percent) for percent in (80, 65, 50)},
}
"""By name: in turns; at the same time; with the target below normal priority; with multiprocessors of its own for each side, so
many in a hundred for the target."""
LOADS = (1, 8)


# Iterations --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """One iteration, in milliseconds.

    Attributes:
        table_ms: of its kernels, by the profile.
        graph_ms, eager_ms: measured, replayed as a graph and launched kernel by kernel.
        spread_ms: between the shortest and the longest time by graph.
    """

    what: str
    table_ms: float
    graph_ms: float
    eager_ms: float
    spread_ms: float

    @property
    def ratio(self) -> float:
        """Measured by graph over the table."""
        return self.graph_ms / self.table_ms


def in_words(iteration: Iteration) -> str:
    """As a row of a table calls it."""
    joins: dict[Join, int] = {}
    for join in iteration.joins:
        joins[join] = joins.get(join, 0) + 1
    parts = [f"{count} x {join.num_new} new behind {join.num_cached:,}" for join, count in joins.items()]
    if iteration.num_decodes:
        parts.append(f"{iteration.num_decodes} decodes of {iteration.kv_tokens // iteration.num_decodes:,}")
    return " + ".join(parts)


def timed(model: FusedModel, iteration: Iteration, profile: Profile) -> Timed:
    """Time an iteration on the model's card."""
    costs = ProfileCosts(profile, Overheads.compiled(profile, 1.0))
    eager = times_ms(model, model.prepared(iteration))
    graph = times_ms(model, model.replayed(iteration))
    return Timed(in_words(iteration), costs.kernels_ms(iteration), median(graph), median(eager), max(graph) - min(graph))


def times_ms(model: FusedModel, compute: Any, num: int = NUM_TIMED) -> list[float]:
    """Of so many runs one after another, by the card's own clock where there is one."""
    for _ in range(2):
        compute()
    model.wait()
    if model.device.type != "cuda":
        found = []
        for _ in range(num):
            started_s = time.perf_counter()
            compute()
            found.append(1e3 * (time.perf_counter() - started_s))
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        compute()
        mark.record()
    model.wait()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def num_kernels(model: FusedModel, iteration: Iteration) -> int:
    """Kernels that an iteration launches."""
    compute = model.prepared(iteration)
    compute()
    model.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        compute()
        model.wait()
    return sum(event.count for event in profiler.key_averages() if event.device_type.name == "CUDA")


def time_model(hub: str, tp_size: int, system: str) -> dict[str, Any]:
    """All iterations of one model; runs in a process of its own, whose end frees the card."""
    model = ModelOnCard(hub, max_kv_tokens=KV_TOKENS + 1_024, max_positions=32_768, tp_size=tp_size).load()
    profile = find(ProfileKey.of(system, hub, tp_size, "bfloat16"))
    rows = [timed(model, iteration, profile) for iteration in (*DECODES, *JOINS, *MIXED)]
    kernels = num_kernels(model, DECODES[0])
    return {"num_kernels": kernels, "num_layers": profile.num_layers, "rows": [asdict(row) for row in rows]}


def show_iterations(console: Console, name: str, found: Mapping[str, Any]) -> None:
    table = Table(title=f"{name}: milliseconds; {found['num_kernels'] / found['num_layers']:.1f} kernels a layer")
    for heading in ("iteration", "table", "measured, graph", "measured / table", "kernel by kernel", "spread"):
        table.add_column(heading, justify="left" if heading == "iteration" else "right")
    for row in found["rows"]:
        one = Timed(**row)
        numbers = (one.table_ms, one.graph_ms, one.ratio, one.eager_ms, one.spread_ms)
        table.add_row(one.what, *(f"{number:.2f}" for number in numbers))
    console.print(table)


# Constants ---------------------------------------------------------------------------------------------------------------


def constants() -> dict[str, float]:
    """What can be measured of :mod:`lr_backend.hardware.overheads` without an engine."""
    found = {"COPY_BYTES_PER_S": copied_bytes_per_s(), "POLL_SLACK_MS": sleep_slack_ms()}
    with tempfile.TemporaryDirectory(prefix="lookahead-card-") as folder:
        program = Path(folder) / "launches"
        source = Path(__file__).parent / "inputs" / "launches.cu"
        subprocess.run(["nvcc", "-O2", "-o", str(program), str(source)], check=True)
        line = json.loads(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout)
    return {**found, "LAUNCH_US": line["launch_us"], "EAGER_GAP_US": line["eager_gap_us"]}


def copied_bytes_per_s(num_bytes: int = 2_431_000, rounds: int = 200) -> float:
    """One core copies the logits of eight draft tokens into fresh memory, page faults included."""
    source = np.ones(num_bytes, dtype=np.uint8)
    seconds = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        source.copy()
        seconds.append(time.perf_counter() - started_s)
    return num_bytes / median(seconds)


def sleep_slack_ms(rounds: int = 300) -> float:
    """How late a sleep of 1 ms ends."""
    late = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        time.sleep(1e-3)
        late.append(1e3 * (time.perf_counter() - started_s) - 1.0)
    return median(late)


CONSTANTS: Mapping[str, Constant] = {
    "LAUNCH_US": LAUNCH_US,
    "EAGER_GAP_US": EAGER_GAP_US,
    "POLL_SLACK_MS": POLL_SLACK_MS,
    "COPY_BYTES_PER_S": COPY_BYTES_PER_S,
}


def show_constants(console: Console, found: Mapping[str, float]) -> None:
    table = Table("constant", "value", "range", "measured", title="Constants of lr_backend/hardware/overheads.py")
    for name, measured in found.items():
        one = CONSTANTS[name]
        table.add_row(name, f"{one.value:g}", f"{one.low:g} to {one.high:g}", f"{measured:.3g}")
    console.print(table)


# Sharing -----------------------------------------------------------------------------------------------------------------


@contextmanager
def side_by_side(how: Arrangement) -> Iterator[dict[str, str]]:
    """Variables of the environment in which processes share the card so: for CUDA MPS, those of a daemon of our own.

    Raises:
        ConfigError: its daemon does not start.
    """
    if how.law is not CardSharing.MPS:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="lookahead-mps-") as folder:
        ours = {mps.PIPES_VARIABLE: folder, mps.LOG_VARIABLE: folder}
        found = mps.start({**os.environ, **ours})
        try:
            if found is not mps.Mps.RUNNING:
                raise ConfigError(f"CUDA MPS: {mps.CONTROL} is {found}")
            yield ours
        finally:
            mps.stop({**os.environ, **ours})


def shared_ms(those: Mapping[Role, Worker], together: Sequence[Role], seconds: float = BUSY_S) -> dict[str, float]:
    """Mean milliseconds of an iteration of each role while these are all busy."""
    start_s = time.monotonic() + 0.2
    for role in together:
        those[role].connection.send(Busy(WORK[role], start_s, start_s + seconds))
    answers = {role: those[role].wait() for role in together}
    return {role.value: 1e3 * fmean(answers[role]) for role in together}


def sharing(those: Mapping[Role, Worker], how: CardSharing, system: str) -> list[dict[str, Any]]:
    """Each role's slowdown beside others, and what the law of :mod:`lr_backend.hardware.sharing` says."""
    for role in those:
        those[role].ask(WORK[role])
    alone = {role.value: shared_ms(those, [role])[role.value] for role in those}
    costs = {role: _costs(MODELS[role], system) for role in those}
    rows = []
    for together in TOGETHER:
        demands = {role: replace(costs[role].demand(WORK[role]), share=1.0) for role in together}  # nobody is ever idle here
        law = {
            role.value: LAWS[how](own, [other for one, other in demands.items() if one is not role])
            for role, own in demands.items()
        }
        found = shared_ms(those, together)
        slower = {name: ms / alone[name] for name, ms in found.items()}
        rows.append({"together": [role.value for role in together], "slowdown": slower, "law": law})
    return [{"alone_ms": alone}, *rows]


def _costs(hub: str, system: str) -> ProfileCosts:
    profile = find(ProfileKey.of(system, hub, 1, "bfloat16"))
    return ProfileCosts(profile, Overheads.compiled(profile, 1.0))


def show_sharing(console: Console, how: str, rows: Sequence[Mapping[str, Any]]) -> None:
    alone = ", ".join(f"{name} {ms:.2f} ms" for name, ms in rows[0]["alone_ms"].items())
    table = Table("busy together", "slowdown of each", "by the law", "throughput", title=f"{how} (alone: {alone})")
    for row in rows[1:]:
        each, said = (", ".join(f"{name} {value:.2f}" for name, value in row[key].items()) for key in ("slowdown", "law"))
        throughput = sum(1.0 / value for value in row["slowdown"].values())
        table.add_row(" + ".join(row["together"]), each, said, f"{throughput:.2f}")
    console.print(table)


# Modes -------------------------------------------------------------------------------------------------------------------


def scenario(system: str, how: CardSharing) -> Scenario:
    """One card for all three models, and texts whose steps are accepted with a given probability."""
    spec = placed(stood_for(DEPLOYMENT), system, 1, Where.TARGETS_CARDS, 1)
    machine = machine_of(spec, system, card_sharing=how)
    workload = replace(TEXTS, acceptance_rate=EQUAL_ALPHA, prompt_tokens=EQUAL_CONTEXT, num_steps=NUM_STEPS)
    return Scenario.of(spec.loop_config(), workload, machine, prompts_are_cached=True)


@dataclass(frozen=True)
class SlowerKernels(ProfileCosts):
    """The costs of a model each of whose iterations takes so much longer on the card, whatever is in it."""

    more_ms: float

    def kernels_ms(self, iteration: Iteration) -> float:
        return super().kernels_ms(iteration) + self.more_ms


def adds_ms(those: Mapping[Role, Worker], system: str) -> dict[Role, float]:
    """What an iteration of each role takes here alone beyond its table: CUDA MPS, the process and the way to it."""
    found = {}
    for role, worker in those.items():
        took = []
        for _ in range(NUM_ALONE):
            started_s = time.perf_counter()
            worker.ask(WORK[role])
            took.append(1e3 * (time.perf_counter() - started_s))
        found[role] = max(0.0, median(took) - _costs(MODELS[role], system).kernels_ms(WORK[role]))
    return found


def slower(what: Scenario, more_ms: Mapping[Role, float]) -> Scenario:
    """The scenario on a machine whose iterations take so much longer."""
    places = dict(what.machine.places)
    for role, ms in more_ms.items():
        costs = places[role].costs
        assert isinstance(costs, ProfileCosts), costs
        places[role] = replace(places[role], costs=SlowerKernels(costs.profile, costs.overheads, ms))
    return replace(what, machine=replace(what.machine, places=places))


def on_card(those: Mapping[Role, Worker], what: Scenario, policy: Policy, num_answers: int) -> dict[str, Any]:
    """A policy with its iterations on the card: milliseconds a token, and what they took over what kernels take alone."""
    engines = EnginesOnCard.of(those)
    with asyncio.Runner(loop_factory=PunctualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, PunctualLoop), loop
        found = runner.run(keep_in_flight(what, policy, num_answers=num_answers, engine_of=engines.engine))
    return {
        "ms_a_token": ms_a_token(found.usages),
        "recording_s": loop.stopped_s,
        "step_acceptance": found.step_acceptance_rate,
        "num_iterations": {role.value: one.num_iterations for role, one in engines.computed.items()},
        "card_over_table": {
            role.value: one.card_s / one.predicted_s for role, one in engines.computed.items() if one.predicted_s
        },
    }


def modes(
    those: Mapping[Role, Worker], what: Scenario, more_ms: Mapping[Role, float], loads: Sequence[int], num_answers: int
) -> Iterator[dict[str, Any]]:
    """Every policy at every load, one after another: on the card, and as it was predicted.

    Args:
        more_ms: that iterations take longer here than by their tables; ``as_slow_ms`` is predicted with it.
    """
    as_slow = slower(what, more_ms)
    with ProcessPoolExecutor(4, get_context("spawn")) as apart:
        asked = [(load, name, replace(POLICIES[name], num_requests=load)) for load in loads for name in FIXED]
        predicted = [
            [apart.submit(predicted_ms, one, policy, max(num_answers, load)) for one in (what, as_slow)]
            for load, _, policy in asked
        ]
        for (load, name, policy), said in zip(asked, predicted, strict=True):
            on_card(those, what, policy, 1)  # records graphs, and lets compilers do their work
            found = on_card(those, what, policy, max(num_answers, load))
            tables_ms, as_slow_ms = (one.result() for one in said)
            yield {"mode": name, "load": load, "predicted_ms": tables_ms, "as_slow_ms": as_slow_ms, **found}


def predicted_ms(what: Scenario, policy: Policy, num_answers: int) -> float:
    """Milliseconds a token on the virtual clock."""
    return ms_a_token(simulate_steady(what, policy, num_answers=num_answers).usages)


def show_modes(console: Console, how: str, more_ms: Mapping[Any, float], rows: Sequence[Mapping[str, Any]]) -> None:
    more = ", ".join(f"{role} {ms:.2f}" for role, ms in more_ms.items())
    title = f"Modes on one card, {how}: milliseconds a token, and speedup over ar at the same load\n"
    table = Table(title=f"{title}(as slow as here: so many more ms an iteration: {more})")
    columns = {"on the card": "ms_a_token", "predicted": "predicted_ms", "predicted as slow as here": "as_slow_ms"}
    for heading in ("in flight", "mode", *(part for name in columns for part in (name, "over ar"))):
        table.add_column(heading, justify="right")
    alone = {row["load"]: row for row in rows if row["mode"] == "ar"}
    for row in rows:
        base = alone[row["load"]]
        pairs = [(f"{row[key]:.2f}", f"{base[key] / row[key]:.2f}") for key in columns.values()]
        table.add_row(f"{row['load']}", row["mode"], *(cell for pair in pairs for cell in pair))
    console.print(table)


# The run -----------------------------------------------------------------------------------------------------------------


def main(
    parts: Annotated[list[str] | None, typer.Option("--part", help=f"{', '.join(PARTS)}; by default all.")] = None,
    loads: Annotated[list[int] | None, typer.Option("--load", min=1, help="Requests in flight; by default 1 and 8.")] = None,
    shared: Annotated[list[str] | None, typer.Option("--sharing", help=f"{', '.join(ARRANGEMENTS)}; by default all.")] = None,
    num_answers: Annotated[int, typer.Option("--answers", min=1, help="Of each mode, or as many as are in flight.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "card.json",
) -> None:
    """Time models of real shapes on this card, beside the hardware profile of its kind."""
    for asked, known, option in ((parts, PARTS, "--part"), (shared, tuple(ARRANGEMENTS), "--sharing")):
        if unknown := set(asked or ()) - set(known):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(known)}", param_hint=option)
    cards = probe_gpus()
    system = system_of(cards[0].name) if cards else None
    if system is None:
        raise typer.BadParameter(f"there is no card with a hardware profile here: {[card.name for card in cards]}")
    console, wanted = console_of_any_width(), parts or PARTS
    hardware = f"{cards[0].name}, {cards[0].memory_mib} MiB, torch {torch.__version__}, {processor_line()}"
    console.print(hardware, highlight=False)
    keep_json(output, "hardware", {"line": hardware, "date": f"{datetime.now(UTC):%Y-%m-%d}"})
    if "constants" in wanted:
        measured = constants()
        show_constants(console, measured)
        keep_json(output, "constants", measured)
    for hub, tp_size in SHARDS if "iterations" in wanted else ():
        name = f"{hub.rpartition('/')[2]} TP {tp_size}"
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            timings = apart.submit(time_model, hub, tp_size, system).result()
        show_iterations(console, name, timings)
        keep_json(output, name, timings)
    models = {role: ModelOnCard(hub) for role, hub in MODELS.items()}
    for name in shared or ARRANGEMENTS if {"sharing", "modes"} & set(wanted) else ():
        arrangement = ARRANGEMENTS[name]
        try:
            with side_by_side(arrangement) as environment, workers(models, environment, arrangement.environments) as those:
                if "sharing" in wanted:
                    rows = sharing(those, arrangement.law, system)
                    show_sharing(console, name, rows)
                    keep_json(output, f"sharing, {name}", {"rows": rows})
                if "modes" in wanted:
                    more_ms, found = adds_ms(those, system), []
                    for row in modes(those, scenario(system, arrangement.law), more_ms, loads or LOADS, num_answers):
                        found.append(row)  # minutes each: what is known stays
                        keep_json(output, f"modes, {name}", {"more_ms": more_ms, "rows": found})
                    show_modes(console, name, more_ms, found)
        except ConfigError as error:
            console.print(error.message, style="red")
    print_line(console, json.loads(output.read_text(encoding="utf-8")))
