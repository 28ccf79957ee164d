"""Means of what changes with time."""

from __future__ import annotations


class Average:
    """An exponentially weighted mean that begins as a plain one."""

    def __init__(self, memory: int = 64) -> None:
        self._memory = memory
        self.count = 0.0
        """Weights of the values so far, ``memory`` at most."""
        self.value: float | None = None

    def add(self, value: float, weight: float = 1.0) -> None:
        self.count = min(self.count + weight, self._memory)
        before = self.value if self.value is not None else value
        self.value = before + (value - before) * min(1.0, weight / self.count)
