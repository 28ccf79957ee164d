"""What somebody says of a scenario, over what was fitted or is assumed. Times are ratios to the target's, as people know them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lr_backend.plan.simulation import Scenario


@dataclass(frozen=True, slots=True)
class Overrides:
    """What is given; None leaves it as it is.

    Attributes:
        acceptance_rate, crowding, num_cores, step_tokens, step_spread, num_steps, answer_tokens: as in :class:`Scenario`.
        cost_ratio: time of a drafted step over that of a target step of as many tokens.
        verdict_cost, call_cost: time of a verdict, and of an engine call beside its tokens, over that of a target step.
    """

    acceptance_rate: float | None = None
    cost_ratio: float | None = None
    verdict_cost: float | None = None
    call_cost: float | None = None
    crowding: float | None = None
    num_cores: float | None = None
    step_tokens: int | None = None
    step_spread: float | None = None
    num_steps: int | None = None
    answer_tokens: int | None = None

    def applied_to(self, scenario: Scenario) -> Scenario:
        """The scenario with what is given.

        Raises:
            ValueError: a value is out of range.
        """
        step_s = (self.step_tokens or scenario.step_tokens) * scenario.target_token_s
        fields: dict[str, Any] = {
            "acceptance_rate": self.acceptance_rate,
            "draft_token_s": None if self.cost_ratio is None else self.cost_ratio * scenario.target_token_s,
            "verdict_s": None if self.verdict_cost is None else self.verdict_cost * step_s,
            "call_s": None if self.call_cost is None else self.call_cost * step_s,
            "crowding": self.crowding,
            "num_cores": self.num_cores,
            "step_tokens": self.step_tokens,
            "step_spread": self.step_spread,
            "num_steps": self.num_steps,
            "answer_tokens": self.answer_tokens,
        }
        return replace(scenario, **{name: value for name, value in fields.items() if value is not None})
