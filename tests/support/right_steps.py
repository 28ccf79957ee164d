"""Whether a step of the demo world is right."""

from __future__ import annotations

from demo.problems import compute, meaning


def is_right(step_text: str) -> bool:
    """Whether a step is readable and its arithmetic holds. Steps without arithmetic hold."""
    read = meaning(step_text)
    if read is None:
        return False
    if read.family == "who":
        return read.a > read.b
    return not read.op or compute(read.a, read.op, read.b) == read.result
