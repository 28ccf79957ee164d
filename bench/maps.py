"""Where lookahead pays, over load, context and acceptance, and what to use some number of cards for.

The real loop on a virtual clock: deployment ``qwen3-32b-apart`` as it is emulated on each system, with scripted texts. The load
is steady: as soon as one request is answered the next is asked. Its prompt is computed already, so that what is measured is the
reasoning. All modes, systems and acceptance rates have the same texts.

Engines are ``built larger`` than the deployment ships them, for more sequences and tokens in an iteration, and for longer texts.
On the H200, at one acceptance rate, there is a map of the engines ``as shipped`` too, where that makes a difference: from several
requests on, behind what they take. At that acceptance rate each cell of the larger ones says what limits lookahead, and the other
system is mapped at it alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.kit.measure import LEARNS_FROM
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.plots import draw_limits, draw_maps
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import kv_tokens, machine_of, pace_of, stood_for
from lr_backend.build.placements import Where, resized
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.profile import find, label_of
from lr_backend.hardware.sharing import CardSharing
from lr_backend.plan.equal_gpus import DRAFT_TOKENS, EAGLE_SOURCE, NUM_CARDS, Used, measure, uses, uses_table
from lr_backend.plan.losses import LIMITS
from lr_backend.plan.simulation import Policy, Prediction, Scenario, ms_a_token, simulate_steady, with_loop
from lr_backend.request import Mode

DEPLOYMENT = "qwen3-32b-apart"
SHIPPED, LARGER = "as shipped", "built larger"
LARGER_SIZES = (256, 32_768, 36_864)
"""Sequences and tokens of an iteration, and tokens of a sequence."""
LOADS = (1, 8, 32)
CONTEXTS = (1_000, 4_000, 16_000, 32_000)
ALPHAS = (0.3, 0.6, 0.9)
NUM_STEPS = 12
"""Of every answer, whatever the load: a window fills at its beginning and runs empty at its end, at each load alike."""
ANSWERS_ALONE, ANSWERS_AMONG = 12, 32
"""Of one request after another, and of several in flight at least: some spans of a trial, so that a try weighs what it costs."""
EQUAL_CONTEXT, EQUAL_ALPHA = 1_000, 0.6
TEXTS = Workload(
    0.6,
    token_agreement=0.75,
    word_agreement=0.5,
    step_tokens=25,
    step_spread=0.9,
    verdict_prefix_tokens=100,
    verdict_tokens=20,
)
"""Acceptance, prompts and steps are set for each cell."""
POLICIES: Mapping[str, Policy] = {
    "ar": Policy(Mode.AR),
    "sd": Policy(Mode.SD, 0, fields=DRAFT_TOKENS),
    "lr": Policy(Mode.LR, 8),
    "lr_sd": Policy(Mode.LR_SD, 8, fields=DRAFT_TOKENS),
    "auto": Policy(Mode.AUTO, 8, fields=DRAFT_TOKENS),
}
FIXED = tuple(name for name in POLICIES if name != "auto")
CHOOSES = "auto"
FIRST = 20
"""So many requests of a mode that learns are also told by themselves."""
NUM_HARDEST, NUM_SETS = 3, 12
"""Cells where ``auto`` falls shortest of the best fixed row: what it learns there is followed over so many sets of requests."""
TAKING_TURNS = "taking turns"
"""So the name of a use of cards ends whose roles do."""
LIMITED = "lr"
"""Of which it is asked what limits it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the map."""

    system: str
    sizes: str
    load: int
    context: int
    alpha: float


@dataclass(frozen=True)
class Found:
    """What a cell comes to.

    Attributes:
        ms_a_token: of one request, by policy; empty: its texts do not fit the KV memory. All have the same questions.
        first_ms: of the first requests that a fresh server answers in the mode that learns.
        limit: what holds lookahead back most, and how much more it would gain over the target alone if that were free to both.
            None: not asked.
    """

    cell: Cell
    ms_a_token: Mapping[str, float]
    limit: tuple[str, float] | None = None
    first_ms: float | None = None

    @property
    def gains(self) -> dict[str, float]:
        """Over the target alone."""
        return {name: self.ms_a_token["ar"] / ms for name, ms in self.ms_a_token.items()}

    @property
    def auto_share_of_best(self) -> float:
        return min(self.ms_a_token[name] for name in FIXED) / self.ms_a_token["auto"]


@cache
def _deployment(sizes: str) -> GpuDeployment:
    spec = stood_for(DEPLOYMENT)
    return spec if sizes == SHIPPED else resized(spec, *LARGER_SIZES)


@cache
def _machine(system: str, sizes: str) -> Machine:
    return machine_of(_deployment(sizes), system)


def scenario(cell: Cell) -> Scenario:
    """The texts and the machine of a cell."""
    texts = replace(TEXTS, acceptance_rate=cell.alpha, prompt_tokens=cell.context, num_steps=NUM_STEPS)
    config = _deployment(cell.sizes).loop_config()
    return Scenario.of(config, texts, _machine(cell.system, cell.sizes), prompts_are_cached=True)


def fits(cell: Cell) -> bool:
    """Whether all texts of a cell fit the target's KV memory at once."""
    texts = scenario(cell).workload
    return cell.load * (cell.context + texts.max_tokens) <= kv_tokens(_deployment(cell.sizes), cell.system)[Role.TARGET]


def explore(cell: Cell, seed: int = 0) -> Found:
    """All policies of a cell, over the texts of this seed."""
    if not fits(cell):
        return Found(cell, {})
    asked = scenario(cell)
    found = {name: predicted(asked, replace(policy, num_requests=cell.load), seed) for name, policy in POLICIES.items()}
    ms = {name: ms_a_token(one.usages) for name, one in found.items()}
    is_asked = (cell.system, cell.sizes, cell.alpha) == ("h200_sxm", LARGER, EQUAL_ALPHA)
    limit = _limit(asked, cell.load, ms["ar"] / ms[LIMITED], seed) if is_asked else None
    return Found(cell, ms, limit, ms_a_token(found[CHOOSES].before[:FIRST]))


def learn(one: Found, seed: int = 0) -> dict[str, Any]:
    """What ``auto`` makes of a cell while it learns: milliseconds a token by sets of answers, from an empty server on."""
    cell, best = one.cell, min(FIXED, key=lambda name: one.ms_a_token[name])
    policy = replace(POLICIES[CHOOSES], num_requests=cell.load)
    usages = simulate_steady(_behind_loops(scenario(cell), policy), policy, seed, learns_from=NUM_SETS * cell.load).before
    sets = [ms_a_token(usages[start : start + cell.load]) for start in range(0, len(usages), cell.load)]
    return {**asdict(cell), "best": best, "best_ms_a_token": one.ms_a_token[best], "auto_ms_a_token": sets}


def _num_answers(load: int) -> int:
    return ANSWERS_ALONE if load == 1 else max(load, ANSWERS_AMONG)


def _behind_loops(asked: Scenario, policy: Policy) -> Scenario:
    num_loops = _deployment(SHIPPED).server.num_loops
    return replace(asked, machine=with_loop(asked.machine, num_loops, policy.num_requests, policy.mode))


def predicted(
    asked: Scenario, policy: Policy, seed: int = 0, *, free: Callable[[Machine], Machine] = lambda machine: machine
) -> Prediction:
    """A policy at a steady load, behind the deployment's step loops. ``free`` takes a cost away."""
    behind = _behind_loops(asked, policy)
    changed = replace(behind, machine=free(behind.machine))
    return simulate_steady(changed, policy, seed, learns_from=LEARNS_FROM, num_answers=_num_answers(policy.num_requests))


def _limit(asked: Scenario, load: int, gain: float, seed: int) -> tuple[str, float]:
    """The cost without which lookahead would gain most."""
    alone, ahead = (replace(POLICIES[name], num_requests=load) for name in ("ar", LIMITED))

    def gain_without(free: Callable[[Machine], Machine]) -> float:
        slow, fast = (ms_a_token(predicted(asked, policy, seed, free=free).usages) for policy in (alone, ahead))
        return slow / fast

    without = {name: gain_without(free) for name, free in LIMITS.items()}
    name = max(without, key=lambda one: without[one])
    return name, without[name] / gain - 1.0


def cells(systems: Iterable[str], loads: Sequence[int], contexts: Sequence[int], alphas: Sequence[float]) -> list[Cell]:
    """Every cell of the map, those that take longest first."""
    found = [
        Cell(system, sizes, load, context, alpha)
        for system in systems
        for sizes in (SHIPPED, LARGER)
        for load in loads
        for context in contexts
        for alpha in alphas
        if alpha == EQUAL_ALPHA or (system, sizes) == ("h200_sxm", LARGER)
        if sizes == LARGER or (system == "h200_sxm" and load > 1 and context < _deployment(SHIPPED).target.max_seq_len)
    ]
    return sorted(found, key=lambda cell: -cell.load * cell.context)


def equal_gpus(num_cards: int, load: int, system: str = "h200_sxm") -> list[Used]:
    """Every use of so many cards, and ``auto`` wherever there is a row of everything that it chooses from."""
    spec = _deployment(LARGER)
    texts = replace(TEXTS, acceptance_rate=EQUAL_ALPHA, prompt_tokens=EQUAL_CONTEXT, num_steps=NUM_STEPS)
    found = list(uses(spec, system, num_cards).found)
    if load == 1:
        turns = uses(spec, system, num_cards, CardSharing.TIME_SLICES).found
        found += [replace(use, name=f"{use.name}, {TAKING_TURNS}") for use in turns if Where.TARGETS_CARDS in use.name]
    found += [replace(use, policy=replace(use.policy, mode=Mode.AUTO)) for use in found if use.policy.mode is Mode.LR_SD]
    return [measure(spec, use, texts, load, _num_answers(load), LEARNS_FROM) for use in found]


# What is shown ---------------------------------------------------------------------------------------------------------


def map_table(found: Sequence[Found], system: str, sizes: str, alpha: float) -> Table:
    """Gains over the target alone, load by load, context by context."""
    title = f"{system}, {DEPLOYMENT} {sizes}, compiled engines, acceptance {alpha:g}: speedup over ar at the same load"
    table = Table(title=title)
    for name in (
        "in flight",
        "context",
        "ar, ms a token",
        *(name for name in POLICIES if name != "ar"),
        "auto, first 20",
        "what limits lr",
    ):
        table.add_column(name, justify="right")
    mine = [one for one in found if (one.cell.system, one.cell.sizes, one.cell.alpha) == (system, sizes, alpha)]
    for one in sorted(mine, key=lambda one: (one.cell.load, one.cell.context)):
        place = (str(one.cell.load), f"{one.cell.context:,}")
        if not one.ms_a_token:
            table.add_row(*place, "-", *["-"] * len(POLICIES), "KV memory: does not fit")
            continue
        limit = f"{one.limit[0]} (+{one.limit[1]:.0%})" if one.limit else ""
        gains = [f"{gain:.2f}" for name, gain in one.gains.items() if name != "ar"]
        first = f"{one.ms_a_token['ar'] / one.first_ms:.2f}" if one.first_ms else ""
        table.add_row(*place, f"{one.ms_a_token['ar']:.1f}", *gains, first, limit)
    return table


def learning_table(learned: Sequence[Mapping[str, Any]]) -> Table:
    """The hardest cells of ``auto``: its share of the best fixed row in each set of requests."""
    table = Table(title="auto where it falls shortest: share of the best fixed row, set by set")
    for name in ("system", "in flight", "context", "acceptance", "best", *(str(index + 1) for index in range(NUM_SETS))):
        table.add_column(name, justify="right")
    for one in learned:
        shares = [f"{one['best_ms_a_token'] / taken:.2f}" for taken in one["auto_ms_a_token"]]
        cell = (f"{one['system']} {one['sizes']}", str(one["load"]), f"{one['context']:,}", f"{one['alpha']:g}")
        table.add_row(*cell, one["best"], *shares)
    return table


def least_share(rows: Sequence[Used]) -> float | None:
    """Of all uses of the cards, the least share of its best fixed row that ``auto`` reaches; None: there is no ``auto``.

    Modes that need neither draft nor judge have the same cards for the target as the use that has those beside it.
    """
    by_use: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if TAKING_TURNS not in row.name:
            of_target = row.name.removesuffix(f", {Where.TARGETS_CARDS}")
            by_use.setdefault((of_target, row.runtime), {})[row.mode] = row.ms_a_token
    chosen = [modes for modes in by_use.values() if CHOOSES in modes]
    return min((min(ms for mode, ms in modes.items() if mode != CHOOSES) / modes[CHOOSES] for modes in chosen), default=None)


def summary(found: Sequence[Found], equal: Mapping[tuple[int, int], Sequence[Used]]) -> dict[str, Any]:
    """The last line. Equal GPUs are told for one request: the best row of a mode over the best of its rival.

    Uses whose roles take turns on their cards are left out there: they have rows for one request alone.
    """
    mapped = [one for one in found if one.ms_a_token]
    pays = [one for one in mapped if max(one.gains[name] for name in FIXED if name.startswith("lr")) > 1.02]

    def best(rows: Sequence[Used], mode: str) -> float:
        return min((row.ms_a_token for row in rows if row.mode == mode and TAKING_TURNS not in row.name), default=nan)

    told = {
        "cells": len(mapped),
        "cells_where_lookahead_pays": len(pays),
        "auto_share_of_best_min": min((one.auto_share_of_best for one in mapped), default=None),
        "auto_share_of_best_mean": fmean(one.auto_share_of_best for one in mapped) if mapped else None,
        "auto_over_ar_min": min((one.gains["auto"] for one in mapped), default=None),
        "auto_first_over_ar_min": min((one.ms_a_token["ar"] / one.first_ms for one in mapped if one.first_ms), default=None),
        "equal_gpus": {
            str(cards): {
                "lr_over_ar": best(rows, "ar") / best(rows, "lr"),
                "lr_sd_over_sd": best(rows, "sd") / best(rows, "lr_sd"),
                "auto_over_ar": best(rows, "ar") / best(rows, "auto"),
                "auto_share_of_best_min": least_share(rows),
            }
            for (cards, load), rows in equal.items()
            if load == 1
        },
    }
    rounded: dict[str, Any] = json.loads(json.dumps(told), parse_float=lambda text: round(float(text), 3))
    return rounded


def main(
    systems: Annotated[list[str] | None, typer.Option("--system", help="By default H200 and H100.")] = None,
    loads: Annotated[list[int] | None, typer.Option("--load", min=1, help="Requests in flight; by default 1, 8 and 32.")] = None,
    contexts: Annotated[list[int] | None, typer.Option("--context", help="Tokens; by default 1,000 to 32,000.")] = None,
    alphas: Annotated[list[float] | None, typer.Option("--alpha", help="By default .3, .6 and .9.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the map's texts.")] = 0,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "maps.json",
) -> None:
    """Print a table for each system and acceptance rate, those of equal GPUs, and last one line of JSON."""
    systems, asked_loads = systems or ["h200_sxm", "h100_sxm"], loads or LOADS
    console = console_of_any_width()
    profiles = [find(pace_of(_deployment(SHIPPED), role, system).profile) for system in systems for role in Role]
    asked = cells(systems, asked_loads, contexts or CONTEXTS, alphas or ALPHAS)
    pairs = [(cards, load) for cards in NUM_CARDS for load in asked_loads]
    with ProcessPoolExecutor(workers) as pool:
        mapping = [pool.submit(explore, cell, seed) for cell in asked]
        using = [pool.submit(equal_gpus, *pair) for pair in pairs]
        with console.status("") as status:
            found = []
            for index, one in enumerate(mapping):
                status.update(f"cell {index + 1} of {len(asked)}")
                found.append(one.result())
        equal = dict(zip(pairs, (one.result() for one in using), strict=True))
        hardest = sorted((one for one in found if one.ms_a_token), key=lambda one: one.auto_share_of_best)[:NUM_HARDEST]
        learned = list(pool.map(partial(learn, seed=seed), hardest))
    for system, sizes in dict.fromkeys((cell.system, cell.sizes) for cell in sorted(asked, key=lambda cell: cell.system)):
        for alpha in sorted({one.alpha for one in asked if (one.system, one.sizes) == (system, sizes)}):
            console.print(map_table(found, system, sizes, alpha))
    console.print(learning_table(learned))
    for rows in equal.values():
        told_for = f"context {EQUAL_CONTEXT:,}, acceptance {EQUAL_ALPHA:g}"
        console.print(uses_table(rows, f"{rows[0].num_cards} x H200, {rows[0].num_requests} in flight, {told_for}"))
    console.print(f"[yellow]the loop is real, texts are scripted, no model; {label_of(profiles)}[/]", soft_wrap=True)
    console.print(f"[dim]EAGLE-3: {EAGLE_SOURCE}[/]", soft_wrap=True)
    told = summary(found, equal)
    document: dict[str, Any] = {
        "label": label_of(profiles),
        "seed": seed,
        "cells": [
            {**asdict(one.cell), "ms_a_token": one.ms_a_token, "first_ms": one.first_ms, "limit": one.limit} for one in found
        ],
        "equal_gpus": [asdict(row) for rows in equal.values() for row in rows],
        "auto_while_it_learns": learned,
        "summary": told,
    }
    write_json(output, document)
    draw_maps(document["cells"], LARGER, output.with_suffix(".png"))
    if any(one.limit for one in found):
        draw_limits(document["cells"], output.with_name(f"{output.stem}_limits.png"))
    console.print(f"written to {output}, with two pictures beside it")
    print_line(console, told)
