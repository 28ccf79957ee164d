"""What step speculation gains: the paper's formulas for the asynchronous window (section 3.2, Theorem 2).

:func:`ceiling` is the paper's: steps of equal cost, verdicts that cost nothing, parallel steps that cost no more than one.
:func:`speedup` adds what verdicts do cost. Both count a *cycle*: accepted steps up to a correction.
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


def ceiling(acceptance_rate: float, cost_ratio: float, max_depth: int, *, by_tokens: float = 1.0) -> float:
    """The most that ``lr`` can be faster than the target alone: S1 where the window never fills, else S2.

    Args:
        acceptance_rate: alpha, the share of drafted steps that are accepted, in [0, 1).
        cost_ratio: c, as in :func:`useful_depth`.
        max_depth: k, target steps in flight at most; 1 is no speculation.
        by_tokens: how much faster draft tokens alone make the target, for ``lr_sd``. Drafted steps come later beside it.

    Raises:
        ValueError: an argument out of its range.
    """
    _check("cost_ratio", cost_ratio, 0.0 < cost_ratio <= 1.0)
    return by_tokens * speedup(acceptance_rate, min(1.0, by_tokens * cost_ratio), max_depth)


def speedup(acceptance_rate: float, cost_ratio: float, max_depth: int, *, verdict_cost: float = 0.0) -> float:
    """How much faster ``lr`` is than the target alone, with verdicts in units of one target step.

    The root moves only with a verdict, which comes after the target's step: a step takes so much longer, and drafts are so much
    cheaper beside it. So a deeper window is of use than without verdicts.

    Args:
        acceptance_rate, cost_ratio, max_depth: as in :func:`ceiling`.
        verdict_cost: time of a verdict.

    Raises:
        ValueError: an argument out of its range.
    """
    alpha, c, k = acceptance_rate, cost_ratio, max_depth
    _check("acceptance_rate", alpha, 0.0 <= alpha < 1.0)
    _check("max_depth", k, k >= 1)
    _check("verdict_cost", verdict_cost, verdict_cost >= 0.0)
    whole = 1.0 + verdict_cost
    c /= whole
    num_steps = 1.0 / (1.0 - alpha)
    if k >= useful_depth(c):  # S1: the next target step starts as soon as its prefix is drafted
        return num_steps / (1.0 + c * alpha * num_steps) / whole
    # S2: windows of k steps; the correction comes as many drafts later as steps stand above it in the last one
    num_windows = 1.0 / (1.0 - alpha**k)
    num_drafts = (alpha - alpha ** (k + 1) - k * (1.0 - alpha) * alpha**k) * num_steps * num_windows
    return num_steps / (num_windows + c * num_drafts) / whole


def _check(name: str, value: float, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value} is out of range")
