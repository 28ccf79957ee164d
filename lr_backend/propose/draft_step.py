"""The drafted step as the target's token draft.

While the target writes the same words, the drafted step goes on where the target stands. After a mismatch the two are
re-aligned: the longest end of what the target wrote that the drafted step also holds says where to go on.
"""

from __future__ import annotations

from collections.abc import Sequence


def continue_drafted(written: Sequence[int], drafted: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Tokens of ``drafted`` that may follow ``written``; empty if the two have nothing in common there."""
    if max_tokens <= 0:
        return ()
    position = _position(written, drafted)
    return tuple(drafted[position : position + max_tokens]) if position is not None else ()


def _position(written: Sequence[int], drafted: Sequence[int]) -> int | None:
    """Index in ``drafted`` after the longest suffix match; of equal matches, the one nearest to where the target stands."""
    if tuple(written) == tuple(drafted[: len(written)]):
        return len(written)
    best: tuple[int, int] | None = None
    choice = None
    for end in range(1, len(drafted)):
        length = _common_suffix(written, drafted, end)
        if length:
            rank = (length, -abs(end - len(written)))
            if best is None or rank > best:
                best, choice = rank, end
    return choice


def _common_suffix(written: Sequence[int], drafted: Sequence[int], end: int) -> int:
    length = 0
    while length < min(len(written), end) and written[-1 - length] == drafted[end - 1 - length]:
        length += 1
    return length
