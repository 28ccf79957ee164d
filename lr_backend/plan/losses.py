"""Which cost to fight first: what a policy would gain with one of them taken away, and with all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lr_backend.engine import Role
from lr_backend.hardware.cost import CostModel, Iteration, LinearCosts
from lr_backend.hardware.machine import Hops, Machine, Place
from lr_backend.hardware.sharing import IDLE, Demand
from lr_backend.plan.simulation import Policy, Scenario
from lr_backend.plan.table import plan_row


@dataclass(frozen=True)
class FreePrompts:
    """The same costs where what joins takes no longer than what decodes."""

    costs: CostModel

    def seconds(self, iteration: Iteration) -> float:
        return self.costs.seconds(self._decoding(iteration))

    def demand(self, iteration: Iteration) -> Demand:
        return self.costs.demand(self._decoding(iteration))

    @staticmethod
    def _decoding(iteration: Iteration) -> Iteration:
        tokens = sum(join.num_cached + join.num_new for join in iteration.joins)
        return replace(
            iteration, joins=(), num_decodes=iteration.num_decodes + len(iteration.joins), kv_tokens=iteration.kv_tokens + tokens
        )


@dataclass(frozen=True)
class FreeCompany:
    """The same costs where sequences in an iteration beside one take no time."""

    costs: CostModel

    def seconds(self, iteration: Iteration) -> float:
        return self.costs.seconds(self._alone(iteration))

    def demand(self, iteration: Iteration) -> Demand:
        return self.costs.demand(self._alone(iteration))

    @staticmethod
    def _alone(iteration: Iteration) -> Iteration:
        if iteration.joins:
            longest = max(iteration.joins, key=lambda join: join.num_new)
            return replace(iteration, joins=(longest,), num_decodes=0, kv_tokens=0)
        mean = iteration.kv_tokens // max(1, iteration.num_decodes)
        return replace(iteration, num_decodes=min(1, iteration.num_decodes), kv_tokens=mean)


@dataclass(frozen=True)
class FreeReads:
    """The same costs where attention reads no keys and values but those of the tokens that are computed."""

    costs: CostModel

    def seconds(self, iteration: Iteration) -> float:
        return self.costs.seconds(self._unread(iteration))

    def demand(self, iteration: Iteration) -> Demand:
        return self.costs.demand(self._unread(iteration))

    @staticmethod
    def _unread(iteration: Iteration) -> Iteration:
        joins = tuple(replace(join, num_cached=0) for join in iteration.joins)
        return replace(iteration, joins=joins, kv_tokens=iteration.num_decodes)


def _free_reads(costs: CostModel) -> CostModel:
    return costs if isinstance(costs, LinearCosts) else FreeReads(costs)


def _free_verdicts(machine: Machine) -> Machine:
    judge = replace(machine.places[Role.JUDGE], costs=LinearCosts(0.0))
    return replace(machine, places={**machine.places, Role.JUDGE: judge})


def _free_drafting(machine: Machine) -> Machine:
    draft = replace(machine.places[Role.DRAFT], costs=LinearCosts(0.0))
    return replace(machine, places={**machine.places, Role.DRAFT: draft})


def _everywhere(change: Callable[[Place], Place]) -> Callable[[Machine], Machine]:
    """Each role's place changed alike."""
    return lambda machine: replace(machine, places={role: change(place) for role, place in machine.places.items()})


_free_hand_overs = _everywhere(lambda place: replace(place, hops=Hops()))
_whole_budget = _everywhere(lambda place: replace(place, rules=replace(place.rules, charges_whole_prefix=False)))
_large_batch = _everywhere(lambda place: replace(place, max_batch_size=1 << 16))
_free_memory = _everywhere(lambda place: replace(place, rules=replace(place.rules, reserves_kv_in_full=False), kv_tokens=1 << 26))
_own_cards = _everywhere(lambda place: replace(place, cards=()))


def _free_loop(machine: Machine) -> Machine:
    return replace(machine, loop_s=0.0)


def _free_prompts(costs: CostModel) -> CostModel:
    return replace(costs, prompt_token_s=0.0) if isinstance(costs, LinearCosts) else FreePrompts(costs)


def _free_company(costs: CostModel) -> CostModel:
    return replace(costs, crowding=0.0) if isinstance(costs, LinearCosts) else FreeCompany(costs)


def _with_costs(wrap: Callable[[CostModel], CostModel]) -> Callable[[Machine], Machine]:
    def changed(machine: Machine) -> Machine:
        places = dict(machine.places)
        for role in (Role.TARGET, Role.DRAFT):
            places[role] = replace(places[role], costs=wrap(places[role].costs))
        return replace(machine, places=places)

    return changed


def _alone_on_cards(machine: Machine) -> Machine:
    return replace(_own_cards(machine), call_demand=IDLE)


FREE: Mapping[str, Callable[[Machine], Machine]] = {
    "verdicts": _free_verdicts,
    "hand-overs": _free_hand_overs,
    "the loop's own time": _free_loop,
    "prompts of branches": _with_costs(_free_prompts),
    "crowded iterations": _with_costs(_free_company),
    "shared cores": _alone_on_cards,
}
"""Costs by name, and the machine without each."""
LIMITS: Mapping[str, Callable[[Machine], Machine]] = {
    "token budget": _whole_budget,
    "batch size": _large_batch,
    "KV memory": _free_memory,
    "KV reads": _with_costs(_free_reads),
    "other rows": _with_costs(_free_company),
    "draft": _free_drafting,
    "judge": _free_verdicts,
    "hops": _free_hand_overs,
    "step loop": _free_loop,
}
"""What may hold lookahead back on GPUs, and the machine without each."""
NOTHING, ALL = "nothing", "all of these"


def engines_alone(machine: Machine) -> Machine:
    """The machine with every cost but its engines' own taken away."""
    return _alone_on_cards(_free_hand_overs(_free_loop(machine)))


@dataclass(frozen=True, slots=True)
class Without:
    """The speedup over the target alone ``without`` one cost; of the target alone the same is taken away."""

    without: str
    speedup: float


def losses(scenario: Scenario, policy: Policy) -> list[Without]:
    """The policy as it is, without each cost that changes anything, and without all.

    Raises:
        ValueError: a depth or width out of range.
    """
    machine = scenario.machine
    bare = machine
    for free in FREE.values():
        bare = free(bare)
    without = {name: free(machine) for name, free in FREE.items()}
    machines = {NOTHING: machine, **{name: other for name, other in without.items() if other != machine}, ALL: bare}
    return [Without(name, plan_row(replace(scenario, machine=one), policy).speedup) for name, one in machines.items()]
