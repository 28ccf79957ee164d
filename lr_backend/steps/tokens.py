"""Sequences of token ids, compared."""

from __future__ import annotations

from collections.abc import Sequence


def num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens the two begin with alike."""
    return next(
        (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
