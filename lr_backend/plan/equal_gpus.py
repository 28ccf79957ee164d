"""What some number of cards is best used for: the target alone over all of them, replicas of it, or lookahead.

The honest rival of lookahead on four cards is not the target on two of them: it is the target on four. Every row uses all cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from rich.table import Table

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import machine_of
from lr_backend.build.placements import Where, placed
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.cost import DraftingCosts, Iteration, ProfileCosts
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.sharing import CardSharing, Demand
from lr_backend.plan.fit_texts import acceptance_from_length
from lr_backend.plan.simulation import Policy, Scenario, ms_a_token, simulate_steady, with_loop
from lr_backend.request import Mode

COMPILED, LLM_API = "compiled engines", "LLM API"
EAGLE_ACCEPTED_LENGTH = 1.91
EAGLE_MODEL = "Qwen/Qwen3-32B"
EAGLE_SOURCE = "AngelSlim's Qwen3-32B head: 1.91 tokens a pass, mean of four data sets (its benchmarks page)"
EAGLE_DRAFT_TOKENS = 2
EAGLE_LAYERS = 1.5
"""Assumed of a pass of the head: it takes as long as so many layers of the target, for one layer and 32,000 words."""
DRAFT_TOKENS: Mapping[str, Any] = {"proposer": "draft_model", "num_draft_tokens": 4}
"""Of words that agree in three places of four, four are worth most."""
BY_ITSELF: Mapping[str, Any] = {"proposer": "engine", "num_draft_tokens": 4}
MAX_DEPTH = 8
NUM_CARDS = (1, 2, 4)
"""The kernel tables have these parallelisms."""


@dataclass(frozen=True)
class HeadCosts:
    """An engine that drafts by itself with a head on the target's own states: one model, one graph, no host work of its own."""

    target: ProfileCosts

    def seconds(self, iteration: Iteration) -> float:
        profile = self.target.profile
        pass_ms = EAGLE_LAYERS * profile.dense_ms.at(1) / profile.num_layers + self.target.overheads.draft_pass_ms
        return self.target.seconds(iteration) + iteration.num_draft_passes * pass_ms / 1e3

    def demand(self, iteration: Iteration) -> Demand:
        return self.target.demand(iteration)


@dataclass(frozen=True)
class Use:
    """One way to use the cards.

    Attributes:
        name: what runs on them.
        runtime: of ours that can run it.
        replicas: each answers its share of the requests, on its share of the cards.
        token_agreement: of what drafts tokens, where that is not the draft model.
    """

    name: str
    runtime: str
    num_cards: int
    machine: Machine
    policy: Policy
    replicas: int = 1
    token_agreement: float | None = None


@dataclass(frozen=True, slots=True)
class Used:
    """What a use comes to.

    Attributes:
        ms_a_token: of one request.
        tokens_per_s: of all requests together.
        gpu_s_per_1000: seconds of all cards for 1,000 tokens.
    """

    name: str
    runtime: str
    mode: str
    num_cards: int
    num_requests: int
    ms_a_token: float
    tokens_per_s: float
    gpu_s_per_1000: float


@dataclass(frozen=True)
class Uses:
    """Those that fit, and why the others do not."""

    found: Sequence[Use]
    left_out: Mapping[str, str] = field(default_factory=dict)


def uses(spec: GpuDeployment, system: str, num_cards: int, sharing: CardSharing = CardSharing.MPS) -> Uses:
    """All uses of so many cards: by compiled engines and by the LLM API, of a deployment on that by it alone.

    Args:
        sharing: what runs where roles share a card.

    Raises:
        ConfigError: so many cards are not compared, or none of their uses fits.
    """
    if num_cards not in NUM_CARDS:
        raise ConfigError(f"uses are compared of {', '.join(map(str, NUM_CARDS))} cards, not of {num_cards}")
    found: list[Use] = []
    left_out: dict[str, str] = {}
    has_head = spec.target.hub == EAGLE_MODEL
    for name, tp_size, where, replicas in _placements(num_cards):
        for inside in (False, True) if spec.target.runtime == "tensorrtllm" else (True,):
            try:
                moved = placed(spec, system, tp_size, where, num_cards // replicas)
                machine = machine_of(moved, system, drafts_itself=inside, card_sharing=sharing)
            except ConfigError as error:
                left_out[f"{name}, {LLM_API if inside else COMPILED}"] = error.message
                continue
            made = _uses(name, machine, num_cards, where, replicas, inside)
            found += (one for one in made if has_head or one.token_agreement is None)
    if not found:
        raise ConfigError("; ".join(dict.fromkeys(left_out.values())))
    return Uses(found, left_out)


def _placements(num_cards: int) -> Iterator[tuple[str, int, Where, int]]:
    """(name, parallelism of the target, where draft and judge are, replicas)"""
    yield f"TP {num_cards}", num_cards, Where.NOWHERE, 1
    if num_cards > 1:
        yield f"two replicas at TP {num_cards // 2}", num_cards // 2, Where.NOWHERE, 2
        own = max(1, num_cards // 2)
        yield f"TP {own}, {Where.OWN_CARDS}", own, Where.OWN_CARDS, 1
    yield f"TP {num_cards}, {Where.TARGETS_CARDS}", num_cards, Where.TARGETS_CARDS, 1


def _uses(name: str, machine: Machine, num_cards: int, where: Where, replicas: int, inside: bool) -> Iterator[Use]:
    runtime = LLM_API if inside else COMPILED

    def use(mode: Mode, fields: Mapping[str, Any], **more: Any) -> Use:
        depth = MAX_DEPTH if mode.speculates_steps else 0
        return Use(name, runtime, num_cards, machine, Policy(mode, depth, fields=fields), replicas, **more)

    if where is Where.NOWHERE:
        yield use(Mode.AR, {})
        if inside:
            yield use(Mode.SD, BY_ITSELF)
            yield replace(use(Mode.SD, {**BY_ITSELF, "num_draft_tokens": EAGLE_DRAFT_TOKENS}), **_eagle(name, machine))
        return
    if not inside:
        yield use(Mode.SD, DRAFT_TOKENS)
        yield use(Mode.LR, {})
    yield use(Mode.LR_SD, BY_ITSELF if inside else DRAFT_TOKENS)


def _eagle(name: str, machine: Machine) -> dict[str, Any]:
    """The same with an EAGLE-3 head instead of the draft model."""
    target = machine.places[Role.TARGET]
    assert isinstance(target.costs, DraftingCosts), target.costs
    costs = HeadCosts(target.costs.target)
    return {
        "name": f"{name}, EAGLE-3 head",
        "machine": replace(machine, places={**machine.places, Role.TARGET: replace(target, costs=costs)}),
        "token_agreement": acceptance_from_length(EAGLE_ACCEPTED_LENGTH - 1.0, EAGLE_DRAFT_TOKENS),
    }


def scenario_of(spec: GpuDeployment, use: Use, workload: Workload) -> Scenario:
    """What a use is measured in. By the LLM API a target drafts in every call, or in none: it is set when it is loaded."""
    if use.token_agreement is not None:
        workload = replace(workload, token_agreement=use.token_agreement)
    scenario = Scenario.of(spec.loop_config(), workload, use.machine, prompts_are_cached=True)
    return replace(scenario, engine_always_drafts=use.policy.fields.get("proposer") == BY_ITSELF["proposer"])


def measure(
    spec: GpuDeployment, use: Use, workload: Workload, num_requests: int, num_answers: int = 2, learns_from: int = 0
) -> Used:
    """The use with so many requests in flight at all times, over so many answers of each replica.

    Args:
        learns_from: as in :func:`~lr_backend.plan.simulation.simulate_steady`.
    """
    policy = replace(use.policy, num_requests=-(-num_requests // use.replicas))
    machine = with_loop(use.machine, spec.server.num_loops, policy.num_requests, policy.mode)
    scenario = scenario_of(spec, replace(use, machine=machine), workload)
    ms = ms_a_token(simulate_steady(scenario, policy, learns_from=learns_from, num_answers=num_answers).usages)
    tokens_per_s = 1e3 * num_requests / ms
    return Used(
        use.name,
        use.runtime,
        use.policy.mode.value,
        use.num_cards,
        num_requests,
        ms,
        tokens_per_s,
        1e3 * use.num_cards / tokens_per_s,
    )


def uses_table(found: Sequence[Used], title: str) -> Table:
    """All uses at one load; the fastest stands out, and speedups are over the fastest ``ar``."""
    table = Table(title=title)
    for name in ("cards used as", "mode", "runtime", "ms a token", "over ar", "tokens/s", "GPU s / 1,000 tokens"):
        table.add_column(name, justify="left" if name in ("cards used as", "mode", "runtime") else "right")
    fastest = min(one.ms_a_token for one in found)
    alone = min((one.ms_a_token for one in found if one.mode == Mode.AR), default=nan)
    for one in found:
        numbers = (f"{one.ms_a_token:.2f}", f"{alone / one.ms_a_token:.2f}", f"{one.tokens_per_s:.0f}")
        style = "bold green" if one.ms_a_token == fastest else None
        table.add_row(one.name, one.mode, one.runtime, *numbers, f"{one.gpu_s_per_1000:.2f}", style=style)
    return table
