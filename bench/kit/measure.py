"""What a comparison of modes says: paired speedups with their range, and the rates beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from lr_client import StepRecord, Usage

from bench.kit.intervals import paired_speedup
from lr_backend.verify.verdict import UNCOMPARED, Reason

LEARNS_FROM = 50
"""Requests that a server has answered before a mode that learns is measured."""
MIN_DECIDED_SHARE = 0.5
"""Ceilings are of a request that looks ahead all the while: of a row with fewer decided steps they say nothing."""


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
    decided = sum(map(num_decided, usages))
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


def compared(step: StepRecord) -> bool:
    """A drafted step was there and was decided on beside the target's."""
    return step.drafted_text is not None and step.target_text is not None and step.reason not in UNCOMPARED


def num_decided(usage: Usage) -> int:
    """Positions at the root with a drafted step, late ones among them. As the server counts, a draft that failed is none."""
    rejected = sum(count for reason, count in usage.num_steps_rejected.items() if reason != Reason.DRAFT_ERROR)
    return usage.num_steps_accepted + usage.num_steps_late + rejected


def looks_ahead(usages: Sequence[Usage]) -> bool:
    """At least :data:`MIN_DECIDED_SHARE` of its steps had a drafted one beside them."""
    return sum(map(num_decided, usages)) >= MIN_DECIDED_SHARE * max(1, sum(usage.num_steps for usage in usages))


def accepted_runs(usage: Usage) -> float:
    """In how many runs the accepted steps came; the server reports their mean length."""
    if not usage.mean_accepted_length:
        return float(usage.num_steps_late + sum(usage.num_steps_rejected.values()))
    return usage.num_steps_accepted / usage.mean_accepted_length


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def best_baseline(samples: Sequence[Sample], baseline: str = "ar") -> tuple[list[Sample], str]:
    """Keep the fastest of all settings of the baseline, under its plain name; also the name of that setting.

    Settings are told by their names: ``ar``, ``ar at 2 threads``.
    """
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.mode.startswith(baseline):
            totals[sample.mode] = totals.get(sample.mode, 0.0) + sample.latency_s
    best = min(totals, key=lambda name: totals[name])
    kept = [sample for sample in samples if sample.mode == best or not sample.mode.startswith(baseline)]
    return [replace(one, mode=baseline) if one.mode == best else one for one in kept], best


def mean_step_tokens(samples: Iterable[Sample], default: int = 24) -> int:
    """Mean length of a step over all answers that were written in steps."""
    usages = [sample.usage for sample in samples if sample.usage.num_steps_drafted]
    num_steps = sum(usage.num_steps for usage in usages)
    return round(sum(usage.completion_tokens for usage in usages) / num_steps) if num_steps else default
