"""A reasoning step, and the part of a tokenizer that steps need. Leaf module."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class StepEnd(StrEnum):
    """What ended a step."""

    DELIMITER = "delimiter"
    END = "end"
    """An end-of-sequence token: the answer is complete."""
    THINK_CLOSE = "think_close"
    """The end of the reasoning."""
    CAP = "cap"
    """The step or the answer may not be longer; what follows continues the same paragraph."""


@dataclass(frozen=True, slots=True)
class Step:
    """One reasoning step: its token ids, the ending token included."""

    ids: tuple[int, ...]
    end: StepEnd
    markers: frozenset[int] = frozenset()
    """Which end, reasoning and tool tokens the step holds: a drafted and a target step must agree on them."""
    closes: bool = False
    """Nothing is speculated below: the step ends the answer or the reasoning, or touches a tool call."""
    log_prob: float | None = field(default=None, compare=False)
    """Log-probability of all its tokens together under the model that wrote it, where that was asked for."""


class StepTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that step rules and text need."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def batch_decode(self, sequences: Any, **kwargs: Any) -> list[str]: ...
