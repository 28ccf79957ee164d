"""What step speculation can gain at most: the paper's formulas for the asynchronous window (section 3.2, Theorem 2).

All assume steps of equal cost, verdicts that cost nothing, and parallel steps that cost no more than one.
"""

from __future__ import annotations

from math import ceil


def useful_depth(cost_ratio: float) -> int:
    """Target steps in flight beyond which nothing is gained: by then the first one is done.

    Args:
        cost_ratio: c, time of a drafted step over that of a target step, each model alone; in (0, 1].
    """
    _check("cost_ratio", cost_ratio, 0.0 < cost_ratio <= 1.0)
    return ceil(1.0 / cost_ratio)


def ceiling(acceptance_rate: float, cost_ratio: float, max_depth: int) -> float:
    """The most that ``lr`` can be faster than the target alone: S1 where the window never fills, else S2.

    Args:
        acceptance_rate: alpha, the share of drafted steps that are accepted, in [0, 1).
        cost_ratio: c, as in :func:`useful_depth`.
        max_depth: k, target steps in flight at most; 1 is no speculation.

    Raises:
        ValueError: an argument out of its range.
    """
    alpha, c, k = acceptance_rate, cost_ratio, max_depth
    _check("acceptance_rate", alpha, 0.0 <= alpha < 1.0)
    _check("max_depth", k, k >= 1)
    if k >= useful_depth(c):
        return 1.0 / (c + (1.0 - c) * (1.0 - alpha))
    drafting = alpha - alpha ** (k + 1) - k * (1.0 - alpha) * alpha**k
    return (1.0 - alpha**k) / ((1.0 - alpha) + c * drafting)


def _check(name: str, value: float, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value} is out of range")
