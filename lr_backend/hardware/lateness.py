"""How far paced engines have fallen behind, and when that makes a measurement void."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LATE_SHARE = 0.01
"""Beyond it, what is measured says nothing of the hardware that is stood for."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Seconds that iterations were to take, and seconds that they and their answers took beyond."""

    paced_s: float = 0.0
    late_s: float = 0.0

    def __add__(self, other: Lateness) -> Lateness:
        return Lateness(self.paced_s + other.paced_s, self.late_s + other.late_s)

    def __sub__(self, other: Lateness) -> Lateness:
        return Lateness(self.paced_s - other.paced_s, self.late_s - other.late_s)

    @property
    def share(self) -> float:
        return self.late_s / self.paced_s if self.paced_s else 0.0

    @property
    def void(self) -> bool:
        return self.paced_s <= 0.0 or self.share > MAX_LATE_SHARE

    def __str__(self) -> str:
        told = f"{self.share:.1%} late over {self.paced_s:.0f} s of paced iterations"
        if self.paced_s <= 0.0:
            return "nothing was paced"
        if not self.void:
            return told
        return f"{told}, more than {MAX_LATE_SHARE:.0%}: this machine is too slow for the pace, and its figures are void"
