"""What somebody says of texts and times, over what was fitted or assumed; times as ratios to the target's."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from lr_backend.emulated.workload import Workload
from lr_backend.hardware.machine import LinearTimes

Record = TypeVar("Record", Workload, LinearTimes)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What is given; None leaves it as it is.

    Attributes:
        acceptance_rate, token_agreement, step_tokens, step_spread, num_steps, prompt_tokens: as in
            :class:`~lr_backend.emulated.workload.Workload`.
        crowding, num_cores: as in :class:`~lr_backend.hardware.machine.LinearTimes`.
        cost_ratio: time of a drafted step over that of a target step of as many tokens.
        verdict_cost: time of a verdict over that of a target step.
    """

    acceptance_rate: float | None = None
    cost_ratio: float | None = None
    verdict_cost: float | None = None
    crowding: float | None = None
    num_cores: float | None = None
    step_tokens: int | None = None
    step_spread: float | None = None
    num_steps: int | None = None
    prompt_tokens: int | None = None
    token_agreement: float | None = None

    def of_texts(self, workload: Workload) -> Workload:
        """The workload with what is given. The exact rate is part of the acceptance rate, and falls with it.

        Raises:
            ValueError: a value is out of range.
        """
        if self.acceptance_rate is not None and 0.0 <= self.acceptance_rate < workload.exact_rate:
            workload = replace(workload, acceptance_rate=self.acceptance_rate, exact_rate=self.acceptance_rate)
        return _with(workload, {field.name: getattr(self, field.name, None) for field in fields(Workload)})

    def of_times(self, times: LinearTimes, step_tokens: int) -> LinearTimes:
        """The times with what is given, for steps of so many tokens.

        Raises:
            ValueError: a value is out of range.
        """
        given = {
            "draft_token_s": None if self.cost_ratio is None else self.cost_ratio * times.target_token_s,
            "verdict_s": None if self.verdict_cost is None else self.verdict_cost * step_tokens * times.target_token_s,
            "crowding": self.crowding,
            "num_cores": self.num_cores,
        }
        return _with(times, given)


def _with(record: Record, given: dict[str, Any]) -> Record:
    return replace(record, **{name: value for name, value in given.items() if value is not None})
