"""Tables of numbers between whose entries one interpolates. Pure.

Between two entries the value runs straight from one to the other. Beyond the last entry it goes on as between the last two, and
before the first it stays at the first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Line:
    """Values along one axis; ``xs`` ascends strictly and has at least two entries."""

    xs: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis(self.xs)
        if len(self.values) != len(self.xs):
            raise ValueError(f"{len(self.values)} values for {len(self.xs)} places")

    def at(self, x: float) -> float:
        place, share = _between(self.xs, x)
        low, high = self.values[place], self.values[place + 1]
        return low + share * (high - low)


@dataclass(frozen=True, slots=True)
class Grid:
    """Values over two axes: ``values[i][j]`` stands at ``xs[i]`` and ``ys[j]``."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis(self.xs)
        _check_axis(self.ys)
        if [len(row) for row in self.values] != [len(self.ys)] * len(self.xs):
            raise ValueError(f"the values are no grid of {len(self.xs)} by {len(self.ys)}")

    @property
    def least(self) -> float:
        """The smallest value."""
        return min(map(min, self.values))

    def at(self, x: float, y: float) -> float:
        place, share = _between(self.xs, x)
        column, part = _between(self.ys, y)
        low, high = (row[column] + part * (row[column + 1] - row[column]) for row in self.values[place : place + 2])
        return low + share * (high - low)


def _check_axis(xs: Sequence[float]) -> None:
    if len(xs) < 2 or any(low >= high for low, high in pairwise(xs)):
        raise ValueError(f"an axis needs two or more ascending entries, not {list(xs)}")


def _between(xs: Sequence[float], x: float) -> tuple[int, float]:
    """The entry at or before ``x``, at most the last but one, and how far ``x`` lies towards the next one as a share."""
    place = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return place, max(0.0, (x - xs[place]) / (xs[place + 1] - xs[place]))
