"""Where the time of a request went, and which failure signature it shows, if any.

Every instant of a request belongs to one call or to none: the call that the step at the root waited for (the target's step,
else the verdict, else the draft). These *critical* stretches and the *waiting* in between add up to the latency. The other time
of a call ran beside them: *overlapped* if the answer needed it, *wasted* if not. Critical + overlapped + wasted = the role's busy
time, where calls that run at once each count in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import sqrt
from statistics import median

from lr_backend.engine import Role
from lr_backend.request import Origin, StepRecord
from lr_backend.trace.intervals import Interval, at_least, common, length
from lr_backend.trace.schema import Call, CallOutcome, Purpose, Trace
from lr_backend.verify.verdict import FAILED, UNCOMPARED, Reason

PRIORITY = {Purpose.TARGET_STEP: 0, Purpose.ALONE: 0, Purpose.VERDICT: 1, Purpose.DRAFT_TOKENS: 2, Purpose.DRAFTED_STEP: 3}
"""Which of the calls that work on the step at the root it waits for first. Draft tokens may be written while the target runs."""


@dataclass(frozen=True, slots=True)
class CriticalStretch:
    """A stretch in which the step at the root waited for one call, or for none (``call`` is None)."""

    start_ms: float
    end_ms: float
    step: int
    call: int | None

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class RoleTime:
    """Time of one role's calls; calls that run at once each count in full."""

    num_calls: int = 0
    critical_ms: float = 0.0
    overlapped_ms: float = 0.0
    wasted_ms: float = 0.0

    @property
    def busy_ms(self) -> float:
        return self.critical_ms + self.overlapped_ms + self.wasted_ms


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The latency: ``waiting_ms`` plus every role's ``critical_ms``.

    Attributes:
        batched_share: of the time in which the target ran, the share with two or more calls at once; None if it never ran.
        overlap_share: of the same time, the share in which the draft ran too.
    """

    latency_ms: float
    waiting_ms: float
    roles: dict[Role, RoleTime]
    batched_share: float | None
    overlap_share: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """A failure signature that a trace shows.

    Attributes:
        evidence: what in the trace says so, a clause each.
        advice: what to try.
    """

    name: str
    evidence: tuple[str, ...]
    advice: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that is found in one trace; no findings: it is healthy."""

    breakdown: Breakdown
    critical: tuple[CriticalStretch, ...]
    findings: tuple[Finding, ...]


def analyse(trace: Trace) -> Analysis:
    """Everything that the reports show."""
    critical = critical_path(trace)
    found = breakdown(trace, critical)
    signatures = (draft_bottleneck(trace, critical), cascade_rejection(trace), verifier_drift(trace), failing_verifier(trace))
    return Analysis(found, tuple(critical), tuple(finding for finding in signatures if finding is not None))


# Where the time went -----------------------------------------------------------------------------------------------


def critical_path(trace: Trace) -> list[CriticalStretch]:
    """What the step at the root waited for, from the start to the end of the request without a gap."""
    by_step: dict[int, list[int]] = {}
    for index, call in enumerate(trace.calls):
        by_step.setdefault(call.step, []).append(index)
    stretches: list[CriticalStretch] = []
    start_ms = 0.0
    for step, record in enumerate((*trace.steps, None)):
        end_ms = trace.latency_ms if record is None else min(1e3 * record.committed_s, trace.latency_ms)
        if end_ms > start_ms:
            stretches += _root_waits(trace.calls, by_step.get(step, []), step, (start_ms, end_ms))
            start_ms = end_ms
    return stretches


def _root_waits(calls: Sequence[Call], indices: list[int], step: int, window: Interval) -> list[CriticalStretch]:
    """One window between two commits, cut at the starts and ends of the calls that work on its step."""
    edges = {time for index in indices for time in (calls[index].start_ms, calls[index].end_ms)}
    cuts = [window[0], *sorted(time for time in edges if window[0] < time < window[1]), window[1]]
    waited_for = [_first_needed(calls, indices, (start + end) / 2) for start, end in pairwise(cuts)]
    pieces = zip(pairwise(cuts), waited_for, strict=True)
    merged = [(call, [piece for piece, _ in group]) for call, group in groupby(pieces, key=lambda pair: pair[1])]
    return [CriticalStretch(group[0][0], group[-1][1], step, call) for call, group in merged]


def _first_needed(calls: Sequence[Call], indices: list[int], time_ms: float) -> int | None:
    running = [index for index in indices if calls[index].start_ms <= time_ms < calls[index].end_ms]
    return min(running, key=lambda index: (PRIORITY[calls[index].purpose], calls[index].useless, index), default=None)


def breakdown(trace: Trace, critical: Sequence[CriticalStretch]) -> Breakdown:
    """Sum up the critical stretches and what ran beside them."""
    on_path = [0.0] * len(trace.calls)
    for stretch in critical:
        if stretch.call is not None:
            on_path[stretch.call] += stretch.duration_ms
    target = _union(trace.calls, Role.TARGET)
    return Breakdown(
        latency_ms=trace.latency_ms,
        waiting_ms=sum(stretch.duration_ms for stretch in critical if stretch.call is None),
        roles={role: _role_time(trace.calls, on_path, role) for role in Role},
        batched_share=_share(length(at_least(_intervals(trace.calls, Role.TARGET), 2)), length(target)),
        overlap_share=_share(length(common(target, _union(trace.calls, Role.DRAFT))), length(target)),
    )


def _role_time(calls: Sequence[Call], on_path: Sequence[float], role: Role) -> RoleTime:
    own = [(call, critical_ms) for call, critical_ms in zip(calls, on_path, strict=True) if call.role is role]
    beside = [(call.useless, max(0.0, call.duration_ms - critical_ms)) for call, critical_ms in own]
    return RoleTime(
        num_calls=len(own),
        critical_ms=sum(critical_ms for _, critical_ms in own),
        overlapped_ms=sum(ms for useless, ms in beside if not useless),
        wasted_ms=sum(ms for useless, ms in beside if useless),
    )


def _intervals(calls: Iterable[Call], role: Role) -> list[Interval]:
    return [call.interval for call in calls if call.role is role]


def _union(calls: Iterable[Call], role: Role) -> list[Interval]:
    return at_least(_intervals(calls, role), 1)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# Failure signatures ------------------------------------------------------------------------------------------------

# From where on a signature is named. Chosen so that neither a short request nor plain chance shows one.
MIN_REJECTION_RUN = 3
REPEATED_REJECTIONS = 0.5
DEEP_WASTE = 0.5
MIN_VERDICTS = 12
LATENCY_RATIO = 1.5
ACCEPTANCE_CHANGE = 0.4
NUM_DEVIATIONS = 2.6
MIN_LATE = 3
LATE_SHARE = 0.25
DRAFT_WAIT_SHARE = 0.15
MIN_IN_DOUBT = 3
IN_DOUBT_SHARE = 0.25

IN_DOUBT = FAILED - {Reason.DRAFT_ERROR}
"""Reasons of a rejection for which there was no verdict."""
UNDECIDED = FAILED | UNCOMPARED | {Reason.RISK_BUDGET}
"""Reasons of a correction that say nothing of how the drafted step compares with the target's."""


def cascade_rejection(trace: Trace) -> Finding | None:
    """Rejections at the root come in runs, and the work below them is thrown away."""
    rejected = [_is_rejected(record) for record in trace.steps if _is_decided(record)]
    runs = [sum(1 for _ in group) for value, group in groupby(rejected) if value]
    deep = [call for call in trace.calls if call.depth > 0]
    waste = _share(sum(call.duration_ms for call in deep if call.useless), sum(call.duration_ms for call in deep))
    if not runs or waste is None:
        return None
    repeated = 1.0 - len(runs) / sum(runs)
    if max(runs) < MIN_REJECTION_RUN or repeated < REPEATED_REJECTIONS or waste < DEEP_WASTE:
        return None
    return Finding(
        "cascade rejection",
        (
            f"{sum(runs)} of {len(rejected)} compared steps were rejected, up to {max(runs)} in a row",
            f"{repeated:.0%} of the rejections follow another one",
            f"{waste:.0%} of the time spent below the root was thrown away",
        ),
        "the draft has lost the thread of such answers: lower max_depth, or use a draft closer to the target",
    )


def verifier_drift(trace: Trace) -> Finding | None:
    """Verdicts grow slower or faster, or acceptance changes, from the first half of the request to the second."""
    evidence = [clause for clause in (_latency_drift(trace), _acceptance_drift(trace)) if clause]
    if not evidence:
        return None
    advice = "compare the halves: a judge that slows down is short of capacity, one that changes its mind wants an audit"
    return Finding("verifier drift", tuple(evidence), advice)


def _latency_drift(trace: Trace) -> str | None:
    cut_short = (CallOutcome.CANCELLED, CallOutcome.FAILED)
    times = [call.duration_ms for call in trace.calls if call.purpose is Purpose.VERDICT and call.outcome not in cut_short]
    first, second = _halves(times)
    if len(times) < MIN_VERDICTS or min(median(first), median(second)) <= 0.0:
        return None
    ratio = median(second) / median(first)
    changed = not 1.0 / LATENCY_RATIO < ratio < LATENCY_RATIO
    if not changed or abs(_rank_deviations(first, second)) < NUM_DEVIATIONS:
        return None
    return f"a verdict took {median(first):.1f} ms in the first half and {median(second):.1f} ms in the second (median)"


def _acceptance_drift(trace: Trace) -> str | None:
    accepted = [float(not _is_rejected(record)) for record in trace.steps if _is_decided(record)]
    if len(accepted) < MIN_VERDICTS:
        return None
    first, second = _halves(accepted)
    before, after, overall = (sum(part) / len(part) for part in (first, second, accepted))
    noise = sqrt(overall * (1.0 - overall) * (1.0 / len(first) + 1.0 / len(second)))
    if abs(after - before) < max(ACCEPTANCE_CHANGE, NUM_DEVIATIONS * noise):
        return None
    return f"{before:.0%} of the compared steps were accepted in the first half and {after:.0%} in the second"


def draft_bottleneck(trace: Trace, critical: Sequence[CriticalStretch]) -> Finding | None:
    """The root waits for drafted steps, or goes on without them because they come too late.

    Waits for draft tokens do not count: between verifications the target always waits for them.
    """
    num_late = sum(record.reason == "late" for record in trace.steps)
    num_positions = sum(record.origin is not Origin.TARGET for record in trace.steps)
    late = _share(num_late, num_positions) or 0.0
    drafted = {index for index, call in enumerate(trace.calls) if call.purpose is Purpose.DRAFTED_STEP}
    waited = _share(sum(stretch.duration_ms for stretch in critical if stretch.call in drafted), trace.latency_ms) or 0.0
    evidence = []
    if num_late >= MIN_LATE and late >= LATE_SHARE:
        evidence.append(f"{num_late} of {num_positions} positions had no draft ready when the target's step was")
    if waited >= DRAFT_WAIT_SHARE:
        evidence.append(f"for {waited:.0%} of the latency the answer waited for a drafted step alone")
    if not evidence:
        return None
    advice = "a smaller or faster draft, a core or GPU share of its own; or mode sd, where its cost ratio is near 1"
    return Finding("draft as bottleneck", tuple(evidence), advice)


def failing_verifier(trace: Trace) -> Finding | None:
    """Drafted steps are rejected without a verdict."""
    doubts = Counter(record.reason for record in trace.steps if record.reason in IN_DOUBT)
    num_asked = doubts.total() + sum(map(_is_decided, trace.steps))
    if doubts.total() < MIN_IN_DOUBT or doubts.total() / num_asked < IN_DOUBT_SHARE:
        return None
    reasons = ", ".join(f"{num} {reason}" for reason, num in doubts.most_common())
    evidence = f"{doubts.total()} of {num_asked} drafted steps were rejected without a verdict: {reasons}"
    return Finding("failing verifier", (evidence,), "look at the judge's queue, its engine's log and the timeout of its calls")


def _is_decided(record: StepRecord) -> bool:
    """A drafted step was there and was compared with the target's."""
    return record.origin is Origin.DRAFT or _is_rejected(record)


def _is_rejected(record: StepRecord) -> bool:
    return record.origin is Origin.CORRECTION and record.reason not in UNDECIDED


def _halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]


def _rank_deviations(first: Sequence[float], second: Sequence[float]) -> float:
    """By how many standard deviations the values of ``second`` rank higher (Mann-Whitney, no correction for ties)."""
    higher = sum((b > a) + 0.5 * (b == a) for a in first for b in second)
    num = len(first) * len(second)
    return (higher - num / 2) / sqrt(num * (len(first) + len(second) + 1) / 12)
