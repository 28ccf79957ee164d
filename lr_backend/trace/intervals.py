"""Unions and overlaps of time intervals: pure arithmetic, in whatever unit they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

Interval = tuple[float, float]
"""(start, end), start <= end."""


def at_least(intervals: Iterable[Interval], num: int) -> list[Interval]:
    """Where ``num`` or more of the intervals lie over each other, as disjoint intervals in order."""
    # At the same instant ends come before starts: calls that follow one another do not overlap.
    edges = sorted((time, change) for start, end in intervals if end > start for time, change in ((start, 1), (end, -1)))
    found: list[Interval] = []
    depth, since = 0, 0.0
    for time, change in edges:
        depth += change
        if change > 0 and depth == num:
            since = time
        elif change < 0 and depth == num - 1 and time > since:
            found.append((since, time))
    return found


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where two unions (disjoint, in order) lie over each other."""
    return at_least([*first, *second], 2)


def length(disjoint: Iterable[Interval]) -> float:
    """How long disjoint intervals are together."""
    return sum(end - start for start, end in disjoint)


def rows(intervals: Sequence[Interval], keys: Sequence[Hashable]) -> list[int]:
    """For each interval a row in which it overlaps no other.

    That of the last interval with the same key if it can be (parts of one thing stay in line), else the lowest.
    """
    last: list[tuple[float, Hashable]] = []  # of each row: where it is free from, and the key that ends there
    placed = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        start, end = intervals[index]
        free = [row for row, (until, _) in enumerate(last) if until <= start]
        row = next((row for row in free if last[row][1] == keys[index]), free[0] if free else len(last))
        last[row : row + 1] = [(end, keys[index])]
        placed[index] = row
    return placed
