"""The planner's table: predicted speedup by depth and width beside what the paper's formula allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lr_backend.loop.depth import ceiling
from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.request import Mode

LEAST_STEPS = 240
LEAST_SEEDS = 3


@dataclass(frozen=True)
class PlanRow:
    """One policy. ``speedup`` is over the target alone with as many requests and the same texts, of which there are a few;
    ``low`` and ``high`` are the range over these; ``ceiling`` is the formula's at width 1, with everything but drafts free."""

    max_depth: int
    width: int
    speedup: float
    low: float
    high: float
    ceiling: float
    target_batch: float


def plan(
    scenario: Scenario, depths: Sequence[int], widths: Iterable[int] = (1,), num_requests: int = 1, num_seeds: int | None = None
) -> list[PlanRow]:
    """A row for each width and depth; all rows answer the same questions.

    Args:
        num_seeds: texts; by default as many as short answers need to say as much as long ones.

    Raises:
        ValueError: a depth or width out of range.
    """
    num_seeds = num_seeds or max(LEAST_SEEDS, -(-LEAST_STEPS // scenario.num_steps))
    alone = [simulate(scenario, Policy(Mode.AR, num_requests=num_requests), seed).latency_s for seed in range(num_seeds)]
    rows = []
    for width in widths:
        for depth in depths:
            policy = Policy(max_depth=depth, width=width, num_requests=num_requests)
            found = [simulate(scenario, policy, seed) for seed in range(num_seeds)]
            gains = [one / other.latency_s for one, other in zip(alone, found, strict=True)]
            gain = sum(alone) / sum(one.latency_s for one in found)
            batch = fmean(one.target_batch for one in found)
            rows.append(PlanRow(depth, width, gain, min(gains), max(gains), _ceiling(scenario, depth), batch))
    return rows


def _ceiling(scenario: Scenario, depth: int) -> float:
    cost_ratio = min(1.0, scenario.draft_token_s / scenario.target_token_s)
    return ceiling(min(scenario.acceptance_rate, 0.999), cost_ratio, max(1, depth))
