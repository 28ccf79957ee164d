"""A deployment as its spec places it, and with draft and judge the other way: on the target's cards, or on cards of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from lr_backend.build.admission import USUAL_PREFIX, Admission, admissions
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.memory import GpuMemory, estimate, gib, require_fit
from lr_backend.build.pace import drafts_with_its_draft, kv_tokens, machine_of, on_system
from lr_backend.build.placements import Where, placed, where
from lr_backend.build.shapes import find_sources
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.sharing import CardSharing
from lr_backend.plan.equal_gpus import BY_ITSELF, COMPILED, DRAFT_TOKENS, LLM_API, MAX_DEPTH, Use, Used, measure
from lr_backend.plan.simulation import Policy
from lr_backend.request import Mode

SHORT = {Where.OWN_CARDS: "apart", Where.TARGETS_CARDS: "beside the target"}
POLICIES = (Policy(Mode.LR, MAX_DEPTH), Policy(Mode.LR_SD, MAX_DEPTH, fields=DRAFT_TOKENS))
BY_ITSELF_POLICIES = (Policy(Mode.LR_SD, MAX_DEPTH, fields=BY_ITSELF),)
"""Of a target that drafts by itself, which serves no mode without."""


@dataclass(frozen=True)
class PricedPlacement:
    """A placement, and what answers cost there.

    Attributes:
        name: as the table has it.
        fullest: the card that must hold most.
        kv_tokens: of the target.
        admitted: calls of the target behind the usual prefix; None: its engine charges no prefixes.
        used: what each mode comes to.
        in_turns: the first of them without CUDA MPS; None: no card is shared.
    """

    name: str
    fullest: GpuMemory
    kv_tokens: int
    admitted: Admission | None
    used: Sequence[Used]
    in_turns: Used | None


@dataclass(frozen=True)
class BothPlacements:
    """As written first, and why the other is not there."""

    found: Sequence[PricedPlacement]
    left_out: Mapping[str, str] = field(default_factory=dict)


def both_placements(spec: GpuDeployment, system: str, workload: Workload) -> BothPlacements:
    """The placement as written, and the other one on as many cards; on one card there is no other.

    Raises:
        ConfigError: there is no profile, no pace of what the target's engine drafts with by itself, or the deployment does not
            fit the system's cards as it is written.
    """
    cards, here = spec.hardware.num_gpus, where(spec)
    written = _priced(f"as written: TP {spec.target.tp_size}, {SHORT[here]}", on_system(spec, system), system, workload)
    if cards == 1:
        return BothPlacements((written,))
    there = Where.OWN_CARDS if here is Where.TARGETS_CARDS else Where.TARGETS_CARDS
    tp_size = cards // 2 if there is Where.OWN_CARDS else cards
    name = f"otherwise: TP {tp_size}, {SHORT[there]}"
    try:
        return BothPlacements((written, _priced(name, placed(spec, system, tp_size, there, cards), system, workload)))
    except ConfigError as error:
        return BothPlacements((written,), {name: error.message})


def _priced(name: str, spec: GpuDeployment, system: str, workload: Workload) -> PricedPlacement:
    memory = estimate(spec, find_sources(spec))
    require_fit(spec, memory)
    inside = drafts_with_its_draft(spec)
    policies, runtime = (BY_ITSELF_POLICIES, LLM_API) if inside else (POLICIES, COMPILED)

    def used(policy: Policy, sharing: CardSharing = CardSharing.MPS) -> Used:
        machine = machine_of(spec, system, drafts_itself=inside, card_sharing=sharing)
        return measure(spec, Use(name, runtime, spec.hardware.num_gpus, machine, policy), workload, 1)

    usual = [one for one in admissions(spec, memory) if one.role is Role.TARGET and one.prefix <= USUAL_PREFIX]
    fullest = max(memory, key=lambda gpu: gpu.total / gpu.capacity)
    in_turns = used(policies[0], CardSharing.TIME_SLICES) if where(spec) is Where.TARGETS_CARDS else None
    kept = kv_tokens(spec, system, drafts_itself=inside)[Role.TARGET]
    return PricedPlacement(name, fullest, kept, usual[-1] if usual else None, [used(policy) for policy in policies], in_turns)


def placements_table(found: Sequence[PricedPlacement], alone_ms: float) -> Table:
    """Speedups are over the fastest way to use the same cards without speculation, which takes ``alone_ms`` a token."""
    modes = [used.mode for used in found[0].used]
    sizes = ("fullest card", "target's KV", f"calls behind {USUAL_PREFIX:,}")
    columns = ("draft and judge", *sizes, *modes, f"{modes[0]} without MPS")
    table = Table(title="both placements: one request, ms a token (over the fastest ar)", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", no_wrap=True)
    for placement in found:
        card = f"{gib(placement.fullest.total)} of {gib(placement.fullest.capacity)}"
        admitted = f"{placement.admitted.calls}" if placement.admitted else "-"
        timed = (_timed(used, alone_ms) for used in (*placement.used, placement.in_turns))
        table.add_row(placement.name, card, f"{placement.kv_tokens:,}", admitted, *timed)
    return table


def _timed(used: Used | None, alone_ms: float) -> str:
    return "" if used is None else f"{used.ms_a_token:.2f} ({alone_ms / used.ms_a_token:.2f})"
