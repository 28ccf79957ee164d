"""Which cost to fight first: what a policy would gain with one of them taken away, and with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lr_backend.plan.simulation import Scenario
from lr_backend.plan.table import plan

FREE: Mapping[str, Mapping[str, Any]] = {
    "verdicts": {"verdict_s": 0.0},
    "hand-overs": {"call_s": 0.0},
    "the loop's own time": {"loop_s": 0.0},
    "prompts of branches": {"target_prompt_s": 0.0, "draft_prompt_s": 0.0},
    "crowded iterations": {"crowding": 0.0},
    "shared cores": {"num_cores": None},
}
"""Costs by name, and the scenario's fields without each."""
NOTHING, ALL = "nothing", "all of these"


@dataclass(frozen=True, slots=True)
class Without:
    """The speedup over the target alone ``without`` one cost; of the target alone the same is taken away."""

    without: str
    speedup: float


def losses(scenario: Scenario, max_depth: int, width: int = 1, num_requests: int = 1) -> list[Without]:
    """The policy as it is, without each cost that the scenario has, and without all.

    Raises:
        ValueError: a depth or width out of range.
    """
    changes: dict[str, Mapping[str, Any]] = {NOTHING: {}}
    changes |= {name: fields for name, fields in FREE.items() if replace(scenario, **fields) != scenario}
    changes[ALL] = {name: value for fields in FREE.values() for name, value in fields.items()}
    return [
        Without(name, plan(replace(scenario, **fields), (max_depth,), (width,), num_requests)[0].speedup)
        for name, fields in changes.items()
    ]
