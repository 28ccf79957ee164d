"""One workload at several loads, by mode and placement: latency, throughput, GPU-seconds and cost of an answer, and what limits.

The real step loop runs on a virtual clock. Every placement has all of the deployment's cards, and its memory comes from
:func:`~lr_backend.build.pace.machine_of`. So many requests are in flight at all times: as soon as one is answered the next is
asked. The step loop takes its own time for each call, in turns; the deployment's processes of it share the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil
from statistics import fmean
from typing import Any

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import drafts_with_its_draft, machine_of, profile_key
from lr_backend.build.placements import Where, placed
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.profile import ProfileKey, find, label_of
from lr_backend.plan.equal_gpus import BY_ITSELF, DRAFT_TOKENS, MAX_DEPTH
from lr_backend.plan.limits import draft_tokens_refused, load_refused, texts_refused
from lr_backend.plan.losses import LIMITS
from lr_backend.plan.simulation import Policy, Scenario, simulate_steady, with_loop
from lr_backend.request import Mode, Usage

SWEPT = (Mode.AR, Mode.SD, Mode.LR, Mode.LR_SD, Mode.AUTO)
LEARNS_FROM = 16
"""Answers before those that count, where a mode learns from them."""
TARGET_LIMITS = "target's iterations"
ALWAYS_DRAFTS = "the target drafts by itself in every call, and does not serve this mode"
LEAST_GAIN = 0.05
"""What brings less, taken away, is not what limits."""
_LIMITS: Mapping[str, Callable[[Machine], Machine]] = {
    name: LIMITS[name] for name in ("token budget", "batch size", "KV memory", "draft", "judge", "hops", "step loop")
}


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One mode in one placement at one load.

    Attributes:
        p50_s, p99_s: of an answer, by nearest rank; of fewer than 100 answers the second is the slowest.
        cost: of an answer, in the currency of the price; None: no price was given.
        limited_by: what gains most when it is taken away; None: nobody asked.
    """

    placement: str
    mode: Mode
    load: int
    num_answers: int
    p50_s: float
    p99_s: float
    answers_per_s: float
    tokens_per_s: float
    gpu_s_per_answer: float
    cost: float | None
    limited_by: str | None


@dataclass(frozen=True)
class Sweep:
    """All rows, which placements, modes and loads are left out, and why, and what must stand beside the times."""

    rows: Sequence[SweepRow]
    left_out: Mapping[str, str]
    label: str


def sweep(
    spec: GpuDeployment,
    system: str,
    workload: Workload,
    loads: Sequence[int],
    modes: Sequence[Mode] = SWEPT,
    *,
    num_answers: int = 1,
    price: float | None = None,
    limits: bool = False,
) -> Sweep:
    """Every mode in every placement at every load.

    Args:
        num_answers: of a row at least.
        price: of one card for an hour.
        limits: also find what limits each row; takes several times as long.

    Raises:
        ConfigError: nothing is left, the deployment refuses texts of this length, or there is no pace of what the target drafts
            with by itself.
    """
    if why := texts_refused(spec, workload):
        raise ConfigError(why)
    cards, inside = spec.hardware.num_gpus, drafts_with_its_draft(spec)
    rows: list[SweepRow] = []
    keys: dict[ProfileKey, None] = {}
    left_out = {mode.value: why for mode in modes if (why := _mode_refused(spec, mode))}
    left_out |= {f"load {load}": why for load in loads if (why := load_refused(spec, load))}
    kept = [mode for mode in modes if mode.value not in left_out]
    borne = [load for load in loads if f"load {load}" not in left_out]
    for name, tp_size, where in _placements(cards):
        there = [mode for mode in kept if (mode is Mode.AR) is (where is Where.NOWHERE)]
        if not there:
            continue
        try:
            moved = placed(spec, system, tp_size, where, cards)
            machine = machine_of(moved, system, drafts_itself=inside)
        except ConfigError as error:
            left_out[name] = error.message
            continue
        keys |= {profile_key(moved, role, system): None for role in Role}
        for mode, load in product(there, borne):
            behind = with_loop(machine, spec.server.num_loops, load, mode)
            scenario = replace(Scenario.of(spec.loop_config(), workload, behind), engine_always_drafts=inside)
            policy = _policy(spec, mode, load)
            rows.append(_row(scenario, name, policy, cards, num_answers, price, limits))
    if not rows:
        raise ConfigError("; ".join(dict.fromkeys(left_out.values())) or "no mode to sweep")
    return Sweep(rows, left_out, label_of([find(key) for key in keys]))


def rank(values: Sequence[float], share: float) -> float:
    """The quantile by nearest rank: one of the values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def as_json(found: Sweep) -> dict[str, Any]:
    return {"label": found.label, "rows": [asdict(row) for row in found.rows], "left_out": dict(found.left_out)}


def as_markdown(found: Sweep) -> str:
    """One table; columns that nobody asked for are left out."""
    head = ["placement", "mode", "load", "p50 s", "p99 s", "answers/s", "tokens/s", "GPU s an answer"]
    priced = any(row.cost is not None for row in found.rows)
    limited = any(row.limited_by is not None for row in found.rows)
    head += ["cost an answer"] * priced + ["limited by"] * limited
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2 - limited) + ["---"] * limited]
    for row in found.rows:
        cells = [row.placement, row.mode.value, f"{row.load}", f"{row.p50_s:.1f}", f"{row.p99_s:.1f}"]
        cells += [f"{row.answers_per_s:.3f}", f"{row.tokens_per_s:.0f}", f"{row.gpu_s_per_answer:.1f}"]
        cells += [] if row.cost is None else [f"{row.cost:.4f}"]
        cells += [] if row.limited_by is None else [row.limited_by]
        lines.append(cells)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return table + "".join(f"\nLeft out: {name}: {why}\n" for name, why in found.left_out.items())


def _placements(num_cards: int) -> Iterator[tuple[str, int, Where]]:
    """(name, parallelism of the target, where draft and judge are)"""
    yield f"TP {num_cards}, target alone", num_cards, Where.NOWHERE
    yield f"TP {num_cards}, beside the target", num_cards, Where.TARGETS_CARDS
    if num_cards > 1:
        yield f"TP {num_cards // 2}, apart", num_cards // 2, Where.OWN_CARDS


def _mode_refused(spec: GpuDeployment, mode: Mode) -> str:
    """Why the deployment does not serve a mode as it is swept; empty: it does."""
    if not mode.speculates_tokens:
        return ALWAYS_DRAFTS if spec.engine_always_drafts else ""
    return draft_tokens_refused(spec, _tokens(spec)["num_draft_tokens"])


def _tokens(spec: GpuDeployment) -> Mapping[str, Any]:
    """Of draft tokens; a target that drafts by itself has as many in every pass."""
    return {**BY_ITSELF, "num_draft_tokens": spec.target.num_drafts} if spec.engine_always_drafts else DRAFT_TOKENS


def _policy(spec: GpuDeployment, mode: Mode, load: int) -> Policy:
    depth = MAX_DEPTH if mode.speculates_steps else 0
    return Policy(mode, depth, num_requests=load, fields=_tokens(spec) if mode.speculates_tokens else {})


def _row(
    scenario: Scenario, name: str, policy: Policy, cards: int, num_answers: int, price: float | None, limits: bool
) -> SweepRow:
    load = policy.num_requests
    usages = _usages(scenario, policy, num_answers)
    taken = [usage.latency_s for usage in usages]
    mean_s = fmean(taken)
    gpu_s = cards * mean_s / load
    return SweepRow(
        placement=name,
        mode=policy.mode,
        load=load,
        num_answers=len(usages),
        p50_s=rank(taken, 0.5),
        p99_s=rank(taken, 0.99),
        answers_per_s=load / mean_s,
        tokens_per_s=load * fmean(usage.completion_tokens for usage in usages) / mean_s,
        gpu_s_per_answer=gpu_s,
        cost=None if price is None else price * gpu_s / 3600.0,
        limited_by=_limit(scenario, policy, num_answers, mean_s) if limits else None,
    )


def _usages(scenario: Scenario, policy: Policy, num_answers: int) -> Sequence[Usage]:
    """The same questions for every mode; a multiple of those in flight."""
    counted = policy.num_requests * ceil(num_answers / policy.num_requests)
    return simulate_steady(scenario, policy, learns_from=LEARNS_FROM, num_answers=counted).usages


def _limit(scenario: Scenario, policy: Policy, num_answers: int, mean_s: float) -> str:
    """What shortens answers most when it is taken away; the target's iterations where nothing else does."""
    gains: dict[str, float] = {}
    for name, free in _LIMITS.items():
        machine = free(scenario.machine)
        if machine != scenario.machine:
            usages = _usages(replace(scenario, machine=machine), policy, num_answers)
            gains[name] = 1.0 - fmean(usage.latency_s for usage in usages) / mean_s
    best = max(gains, key=lambda name: gains[name], default=TARGET_LIMITS)
    return best if gains.get(best, 0.0) >= LEAST_GAIN else TARGET_LIMITS
