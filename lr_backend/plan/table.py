"""The planner's table: predicted speedup by depth and width beside what the paper's formula allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lr_backend.loop.depth import ceiling
from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.request import Mode

NUM_SEEDS = 3


@dataclass(frozen=True)
class PlanRow:
    """One policy. ``speedup`` is over the target alone with as many requests, mean over a few texts, ``low`` and ``high`` their
    range; ``ceiling`` is the formula's at width 1, with everything but drafts free."""

    max_depth: int
    width: int
    speedup: float
    low: float
    high: float
    ceiling: float
    target_batch: float


def plan(
    scenario: Scenario, depths: Sequence[int], widths: Iterable[int] = (1,), num_requests: int = 1, num_seeds: int = NUM_SEEDS
) -> list[PlanRow]:
    """A row for each width and depth; all rows answer the same questions.

    Raises:
        ValueError: a depth or width out of range.
    """
    alone = [simulate(scenario, Policy(Mode.AR, num_requests=num_requests), seed).latency_s for seed in range(num_seeds)]
    rows = []
    for width in widths:
        for depth in depths:
            policy = Policy(max_depth=depth, width=width, num_requests=num_requests)
            found = [simulate(scenario, policy, seed) for seed in range(num_seeds)]
            gains = [one / other.latency_s for one, other in zip(alone, found, strict=True)]
            batch = fmean(one.target_batch for one in found)
            rows.append(PlanRow(depth, width, fmean(gains), min(gains), max(gains), _ceiling(scenario, depth), batch))
    return rows


def _ceiling(scenario: Scenario, depth: int) -> float:
    cost_ratio = min(1.0, scenario.draft_token_s / scenario.target_token_s)
    return ceiling(min(scenario.acceptance_rate, 0.999), cost_ratio, max(1, depth))
