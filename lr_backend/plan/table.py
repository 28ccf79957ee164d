"""The planner's table: predicted speedup of policies beside what the paper's formula allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.policy.formulas import ceiling
from lr_backend.request import Mode

LEAST_STEPS = 240
LEAST_SEEDS = 3


@dataclass(frozen=True)
class PlanRow:
    """One policy.

    Attributes:
        speedup: over the target alone with as many requests and the same texts.
        low, high: the range over these.
        ceiling: the formula's at width 1, with everything but drafts free; None: the mode is not ``lr``, of which it is.
        num_texts: so many there are.
    """

    max_depth: int
    width: int
    speedup: float
    low: float
    high: float
    ceiling: float | None
    target_batch: float
    num_texts: int


def plan(scenario: Scenario, depths: Sequence[int], widths: Iterable[int] = (1,), policy: Policy | None = None) -> list[PlanRow]:
    """A row for each width and depth; all rows answer the same questions.

    Args:
        policy: the rest of it.

    Raises:
        ValueError: a depth or width out of range.
    """
    policy = policy or Policy()
    return [
        plan_row(scenario, replace(policy, max_depth=depth, width=width), alone)
        for alone in [_alone(scenario, policy.num_requests)]
        for width in widths
        for depth in depths
    ]


def plan_row(scenario: Scenario, policy: Policy, alone: Sequence[float] | None = None) -> PlanRow:
    """The row of one policy. ``alone``: what the target takes for each text, where that is known.

    Raises:
        ValueError: a depth or width out of range.
    """
    alone = _alone(scenario, policy.num_requests) if alone is None else alone
    found = [simulate(scenario, policy, seed) for seed in range(len(alone))]
    gains = [one / other.latency_s for one, other in zip(alone, found, strict=True)]
    gain = sum(alone) / sum(one.latency_s for one in found)
    batch = fmean(one.target_batch for one in found)
    most = _ceiling(scenario, policy.max_depth) if policy.mode is Mode.LR else None
    return PlanRow(policy.max_depth, policy.width, gain, min(gains), max(gains), most, batch, len(found))


def _alone(scenario: Scenario, num_requests: int) -> list[float]:
    """Latencies of the target alone, of as many texts as short answers need to say as much as long ones.

    A target that always drafts is compared with one that is loaded without its draft.
    """
    scenario = replace(scenario, engine_always_drafts=False)
    num_seeds = max(LEAST_SEEDS, -(-LEAST_STEPS // scenario.workload.num_steps))
    return [simulate(scenario, Policy(Mode.AR, num_requests=num_requests), seed).latency_s for seed in range(num_seeds)]


def _ceiling(scenario: Scenario, depth: int) -> float:
    workload = scenario.workload
    cost_ratio = min(1.0, scenario.machine.cost_ratio(workload.prompt_tokens))
    return ceiling(min(workload.acceptance_rate, 0.999), cost_ratio, max(1, depth))
