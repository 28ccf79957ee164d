"""Figures from a noisy machine: what is compared is timed in turns, and every ratio is taken within one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from demo.measure import rotated


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


Rounds = dict[str, list[float]]


def in_turns(actions: Mapping[str, Callable[[], float]], num_rounds: int) -> Rounds:
    """Run every action once a round, in an order that rotates; each returns its figure. One round before is not kept."""
    names = list(actions)
    for name in names:
        actions[name]()
    figures: Rounds = {name: [] for name in names}
    for number in range(num_rounds):
        for name in rotated(names, number):
            figures[name].append(actions[name]())
    return figures


def ratio(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> Spread:
    """``factor * over / under`` round by round."""
    return Spread.of([factor * one / other for one, other in zip(over, under, strict=True)])
