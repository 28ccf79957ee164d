"""What a comparison of modes says: paired speedups with their range, and the rates beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from lr_client import Usage

NUM_RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)


T = TypeVar("T")


def rotated(turns: Sequence[T], number: int) -> list[T]:
    """The turns of one round, whose order rotates from round to round: none is always the one that comes first."""
    shift = number % len(turns)
    return [*turns[shift:], *turns[:shift]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. ``latency_s`` is the client's: submit to final response."""

    mode: str
    problem: int
    correct: bool
    latency_s: float
    usage: Usage


@dataclass(frozen=True, slots=True)
class ModeReport:
    """One row of the table. ``speedup`` = baseline seconds / this mode's, over the same problems in one run;
    ``speedup_low`` and ``speedup_high`` bound it at 95 % (bootstrap over problems)."""

    correct: int
    total: int
    tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    step_acceptance_rate: float | None
    token_acceptance_rate: float | None
    mean_accepted_length: float | None
    passes_per_token: float | None
    latency_s: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def paired_speedup(baseline_s: Sequence[float], mode_s: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Ratio of the sums, and its 95 % bootstrap range over pairs."""
    assert len(baseline_s) == len(mode_s) > 0, (len(baseline_s), len(mode_s))
    base, ours = np.asarray(baseline_s), np.asarray(mode_s)
    picks = np.random.default_rng(seed).integers(0, len(base), (NUM_RESAMPLES, len(base)))
    ratios: npt.NDArray[np.float64] = base[picks].sum(axis=1) / ours[picks].sum(axis=1)
    low, high = np.percentile(ratios, INTERVAL)
    return float(base.sum() / ours.sum()), float(low), float(high)


def report(samples: Iterable[Sample], baseline: str) -> dict[str, ModeReport]:
    """A row for each mode, in the order in which the modes first appear."""
    by_mode: dict[str, list[Sample]] = {}
    for sample in samples:
        by_mode.setdefault(sample.mode, []).append(sample)
    rows = {mode: sorted(group, key=lambda sample: sample.problem) for mode, group in by_mode.items()}
    base_s = [sample.latency_s for sample in rows[baseline]]
    return {mode: _row(group, paired_speedup(base_s, [sample.latency_s for sample in group])) for mode, group in rows.items()}


def _row(group: Sequence[Sample], speedup: tuple[float, float, float]) -> ModeReport:
    usages = [sample.usage for sample in group]
    seconds = sum(sample.latency_s for sample in group)
    tokens = sum(usage.completion_tokens for usage in usages)
    accepted = sum(usage.num_steps_accepted for usage in usages)
    decided = accepted + sum(usage.num_steps_late + sum(usage.num_steps_rejected.values()) for usage in usages)
    runs = sum(accepted_runs(usage) for usage in usages)
    return ModeReport(
        correct=sum(sample.correct for sample in group),
        total=len(group),
        tokens_per_s=tokens / seconds,
        speedup=speedup[0],
        speedup_low=speedup[1],
        speedup_high=speedup[2],
        step_acceptance_rate=_rate(accepted, decided),
        token_acceptance_rate=_rate(
            sum(usage.num_accepted_tokens for usage in usages), sum(usage.num_draft_tokens for usage in usages)
        ),
        mean_accepted_length=_rate(accepted, runs),
        passes_per_token=_rate(sum(usage.num_target_passes for usage in usages), tokens),
        latency_s=seconds / len(group),
    )


def accepted_runs(usage: Usage) -> float:
    """In how many runs the accepted steps came; the server reports their mean length."""
    if not usage.mean_accepted_length:
        return float(usage.num_steps_late + sum(usage.num_steps_rejected.values()))
    return usage.num_steps_accepted / usage.mean_accepted_length


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None
