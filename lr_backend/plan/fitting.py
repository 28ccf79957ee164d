"""A scenario from recorded traces: what the planner needs to know, as one deployment's own requests have shown it.

An engine that runs iterations for all calls in flight gives each of them a pass an iteration, and an iteration takes longer
the more calls there are and the more roles share the cores. So a call's *effective* seconds, each instant divided by how much
longer an iteration took just then, are those of its passes alone:

    effective seconds = call_s + new prompt tokens * prompt_s + passes * token_s

with one ``call_s`` for both roles: weighted least squares, for the ``crowding`` that leaves the least error. What a call takes
before its passes takes time from the others on shared cores, so that the fit is made again with what it has found. The time in
which a call waited in the engine's queue is left out: that follows from the other calls. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from lr_backend.engine import Role
from lr_backend.errors import TraceError
from lr_backend.plan.simulation import Scenario
from lr_backend.request import Origin, StepRecord, VerifierName
from lr_backend.trace.analysis import critical_path
from lr_backend.trace.intervals import Interval
from lr_backend.trace.schema import Call, CallOutcome, Purpose, Trace
from lr_backend.verify.verdict import UNCOMPARED, Reason

MIN_CALLS = 8
"""Completed calls of target and draft each below which chance says more than the traces do."""
MAX_SPREAD = 0.95
MAX_CROWDING = 2.0
"""At 1 a batch already takes as long as its sequences one after another."""
GRID = 21
ROUNDS = 4
"""Fits, each with the hand-over that the one before has found."""
SINGULAR = 1e-9
RELATIVE_ERROR = 0.05
"""What a call's time is off by, beside the up to one iteration that it waits to join a batch."""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def fit(traces: Sequence[Trace], num_cores: float | None = None) -> Scenario:
    """The scenario that the traces were recorded in, in seconds; all traces count alike, whatever their verifier.

    Args:
        traces: of one deployment, one request at a time. Those without lookahead tell the target's time alone.
        num_cores: as in :class:`Scenario`; traces cannot tell it from slower models, so it is taken as given.

    Raises:
        TraceError: no trace with lookahead, too few calls to fit, or no drafted step that was compared.
    """
    return _fit(traces, num_cores)[0]


def _fit(traces: Sequence[Trace], num_cores: float | None) -> tuple[Scenario, list[_Recorded]]:
    ahead = [trace for trace in traces if any(call.purpose is Purpose.DRAFTED_STEP for call in trace.calls)]
    if not ahead:
        raise TraceError(
            f"no trace with lookahead among {len(traces)}: record some in mode lr or lr_sd, with max_depth of 1 or more"
        )
    acceptance = _acceptance(ahead)
    times, recorded = _times(traces, num_cores)
    lengths = [length for trace in ahead for length in _step_lengths(trace)]
    mean = fmean(lengths)
    scenario = Scenario(
        **acceptance,
        target_token_s=times.target_token_s,
        draft_token_s=times.draft_token_s,
        verdict_s=_verdict_s(recorded, times.call_s, times.crowding),
        crowding=times.crowding,
        call_s=times.call_s,
        loop_s=_between_calls_s(ahead),
        target_prompt_s=times.target_prompt_s,
        draft_prompt_s=times.draft_prompt_s,
        num_cores=num_cores,
        step_tokens=max(2, round(mean)),
        step_spread=_spread(lengths, mean),
        num_steps=max(1, round(fmean(len(_step_lengths(trace)) for trace in ahead))),
        answer_tokens=round(fmean(_answer_length(trace) for trace in ahead)),
    )
    return scenario, recorded


def fit_by_verifier(traces: Sequence[Trace], num_cores: float | None = None) -> dict[VerifierName, Scenario]:
    """A scenario for each verifier of the traces: :func:`fit`, with acceptance and verdicts from its own traces alone.

    Raises:
        TraceError: as :func:`fit`.
    """
    scenario, recorded = _fit(traces, num_cores)
    groups: dict[VerifierName, list[_Recorded]] = {}
    for trace, timeline in recorded:
        if any(_trials(record, trace) for record in trace.steps):
            groups.setdefault(trace.request.effective_verifier, []).append((trace, timeline))
    return {
        name: replace(
            scenario,
            **_acceptance([trace for trace, _ in group]),
            verdict_s=_verdict_s(group, scenario.call_s, scenario.crowding),
        )
        for name, group in groups.items()
    }


# What the draft is worth -------------------------------------------------------------------------------------------


def _acceptance(traces: Sequence[Trace]) -> dict[str, Any]:
    """The scenario's fields of what is accepted.

    Raises:
        TraceError: no drafted step was compared.
    """
    return {
        "acceptance_rate": acceptance_rate(traces),
        "sibling_acceptance_rate": sibling_acceptance_rate(traces),
        "exact_rate": _exact_rate(traces),
        "length_bias": _length_bias(traces),
    }


def acceptance_rate(traces: Sequence[Trace]) -> float:
    """Share of the first candidates at the root that were accepted, of those that were compared.

    Late drafts are left out: how many there are follows from the times.

    Raises:
        TraceError: none was compared.
    """
    accepted, compared = _accepted_and_compared(traces)
    if not compared[0]:
        raise TraceError("no drafted step was compared in any trace")
    return accepted[0] / compared[0]


def sibling_acceptance_rate(traces: Sequence[Trace]) -> float | None:
    """Share of the further candidates at the root that were accepted, of those that were compared; None where none was."""
    accepted, compared = _accepted_and_compared(traces)
    further = compared.total() - compared[0]
    return (accepted.total() - accepted[0]) / further if further else None


def _accepted_and_compared(traces: Iterable[Trace]) -> tuple[Counter[int], Counter[int]]:
    """How many candidates of each place among their siblings.

    A position whose winner is candidate i had i + 1 of them compared, one without a winner all of its width.
    """
    accepted, compared = Counter[int](), Counter[int]()
    for trace in traces:
        for record in trace.steps:
            compared.update(range(_trials(record, trace)))
            if record.origin is Origin.DRAFT:
                accepted[record.sibling or 0] += 1
    return accepted, compared


def _first_candidates(traces: Iterable[Trace]) -> Iterator[tuple[StepRecord, bool]]:
    """Each step whose first candidate was compared, and whether that was accepted."""
    for trace in traces:
        for record in trace.steps:
            if _trials(record, trace):
                yield record, record.origin is Origin.DRAFT and not record.sibling


def _exact_rate(traces: Iterable[Trace]) -> float:
    """Share of the first candidates that were the target's own steps."""
    return fmean(accepted and record.reason == Reason.EXACT.value for record, accepted in _first_candidates(traces))


def _length_bias(traces: Iterable[Trace]) -> float:
    """Slope of acceptance over length, as a share of the mean length, downwards (least squares)."""
    lengths, accepted = np.array([(record.num_tokens, one) for record, one in _first_candidates(traces)], dtype=float).T
    longer = lengths / lengths.mean() - 1.0
    spread = float((longer * longer).sum())
    return float(np.clip(-(longer * accepted).sum() / spread, -1.0, 1.0)) if spread else 0.0


def _trials(record: StepRecord, trace: Trace) -> int:
    if record.origin is Origin.DRAFT:
        return 1 + (record.sibling or 0)
    compared = record.origin is Origin.CORRECTION and record.reason not in UNCOMPARED
    width = 1 if trace.request.sampling.greedy else trace.request.width
    return width if compared else 0


# How long steps are ------------------------------------------------------------------------------------------------


def _step_lengths(trace: Trace) -> list[int]:
    """Tokens of the steps of the reasoning."""
    after = _after(trace)
    return [record.num_tokens for record in trace.steps if record.index not in after]


def _answer_length(trace: Trace) -> int:
    """Tokens after the reasoning."""
    after = _after(trace)
    return sum(record.num_tokens for record in trace.steps if record.index in after)


def _after(trace: Trace) -> set[int]:
    """Steps that the target wrote outside the step loop."""
    return {call.step for call in trace.calls if call.purpose is Purpose.ALONE}


def _spread(lengths: Sequence[int], mean: float) -> float:
    """Half the width, as a share of the mean, of a uniform distribution that varies as much."""
    return min(MAX_SPREAD, sqrt(3.0 * fmean((one - mean) ** 2 for one in lengths)) / mean)


# How long calls take -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Timeline:
    """What ran when in one trace.

    Attributes:
        edges_ms: where calls start and end, ascending, shape [N].
        counts: calls of each role that decode from each edge to the next, shape [N - 1].
        slowdowns: how much longer everything took there, the cores being shared; shape [N - 1].
    """

    edges_ms: Floats
    counts: Mapping[Role, Floats]
    slowdowns: Floats

    @classmethod
    def of(
        cls, calls: Sequence[Call], num_cores: float | None, times: _Times | None = None, before: _Timeline | None = None
    ) -> _Timeline:
        """Args: times, before: as they were known until now, which says how long hand-overs and prompts took."""
        starts, ends = (np.array([_interval(call)[side] for call in calls]) for side in (0, 1))
        joined = starts
        if times is not None and before is not None:  # a call is handed over and its prompt computed, and then it decodes
            joined = np.minimum(before.after(starts, np.array([times.before_decoding_s(call) for call in calls])), ends)
        edges = np.unique(np.concatenate([starts, joined, ends]))
        counts = {role: np.zeros(max(0, len(edges) - 1)) for role in Role}
        num_busy = np.zeros(max(0, len(edges) - 1))
        for call, span in zip(calls, np.searchsorted(edges, np.stack([starts, joined, ends], axis=1)), strict=True):
            num_busy[span[0] : span[1]] += 1.0
            counts[call.role][span[1] : span[2]] += 1.0
        num_busy += sum((count > 0.0).astype(float) for count in counts.values())
        return cls(edges, counts, np.maximum(1.0, num_busy / num_cores) if num_cores else np.ones_like(num_busy))

    def after(self, starts_ms: Floats, seconds: Floats) -> Floats:
        """When work of so many seconds, had it been alone, is done that begins at ``starts_ms``."""
        passed = np.concatenate([[0.0], np.cumsum(np.diff(self.edges_ms) / self.slowdowns)])
        begun: Floats = np.interp(starts_ms, self.edges_ms, passed)
        found: Floats = np.interp(begun + 1e3 * seconds, passed, self.edges_ms)
        return found

    def effective_s(self, bounds: Indices, role: Role, crowding: float) -> Floats:
        """Seconds that calls of one role would have taken alone.

        Args:
            bounds: of each call, the edges at which it starts and ends, shape [C, 2].
        """
        longer = self.slowdowns * (1.0 + crowding * np.maximum(0.0, self.counts[role] - 1.0))
        passed = np.concatenate([[0.0], np.cumsum(np.diff(self.edges_ms) / longer)]) / 1e3
        found: Floats = passed[bounds[:, 1]] - passed[bounds[:, 0]]
        return found


@dataclass(frozen=True)
class _Timed:
    """Completed calls of one role and kind.

    Attributes:
        seconds, passes, prompts: of each call, shape [C]; prompts: tokens that were new.
        groups: of each trace its timeline and the bounds of its calls there, in the same order.
    """

    role: Role
    seconds: Floats
    passes: Floats
    prompts: Floats
    groups: tuple[tuple[_Timeline, Indices], ...]

    @classmethod
    def of(cls, recorded: Iterable[_Recorded], role: Role, wanted: Callable[[Call], bool]) -> _Timed:
        chosen = [
            (timeline, [one for one in trace.calls if one.role is role and _is_complete(one) and wanted(one)])
            for trace, timeline in recorded
        ]
        calls = [call for _, group in chosen for call in group]
        return cls(
            role,
            np.asarray([(call.end_ms - _interval(call)[0]) / 1e3 for call in calls]),
            np.asarray([float(call.num_tokens) for call in calls]),
            np.asarray([float(_num_new(call)) for call in calls]),
            tuple((line, np.searchsorted(line.edges_ms, [_interval(call) for call in group])) for line, group in chosen if group),
        )

    def effective_s(self, crowding: float) -> Floats:
        return np.concatenate([timeline.effective_s(bounds, self.role, crowding) for timeline, bounds in self.groups])

    def __len__(self) -> int:
        return len(self.seconds)


_Recorded = tuple[Trace, _Timeline]
"""A trace and what ran when in it."""


def _with_timelines(
    traces: Sequence[Trace], num_cores: float | None, times: _Times | None = None, before: Sequence[_Recorded] = ()
) -> list[_Recorded]:
    """Each trace with what ran when; ``before``: as it was known until now, for the same traces."""
    lines: Sequence[_Timeline | None] = [line for _, line in before] or [None] * len(traces)
    return [(trace, _Timeline.of(trace.calls, num_cores, times, line)) for trace, line in zip(traces, lines, strict=True)]


@dataclass(frozen=True, slots=True)
class _Times:
    call_s: float
    target_token_s: float
    draft_token_s: float
    target_prompt_s: float
    draft_prompt_s: float
    crowding: float

    def before_decoding_s(self, call: Call) -> float:
        prompt_s = {Role.TARGET: self.target_prompt_s, Role.DRAFT: self.draft_prompt_s}.get(call.role, 0.0)
        return self.call_s + prompt_s * _num_new(call)


def _interval(call: Call) -> Interval:
    """When the engine had begun with a call, and its end."""
    return min(call.start_ms + call.queue_ms, call.end_ms), call.end_ms


def _num_new(call: Call) -> int:
    """Tokens of the prompt that had to be computed."""
    return call.num_prompt_tokens - call.num_reused_tokens


def _is_complete(call: Call) -> bool:
    begun_ms, end_ms = _interval(call)
    return call.outcome not in (CallOutcome.CANCELLED, CallOutcome.FAILED) and end_ms > begun_ms


def _decodes(call: Call) -> bool:
    """A verification of token drafts, which is one pass, takes longer than a token, by an amount that no scenario has. An engine
    that guesses by itself decodes: its tokens are so much faster."""
    is_verification = call.num_draft_tokens > 0 and call.num_tokens - call.num_accepted_tokens <= 1
    return call.purpose is not Purpose.VERDICT and not is_verification and call.num_tokens > 0


def _judges(call: Call) -> bool:
    return call.purpose is Purpose.VERDICT


def _times(traces: Sequence[Trace], num_cores: float | None) -> tuple[_Times, list[_Recorded]]:
    """Raises: TraceError: too few calls to fit."""
    recorded = _with_timelines(traces, num_cores)
    # An engine that does not say what it reused says nothing of its prompts either.
    says_reuse = any(call.num_reused_tokens for trace in traces for call in trace.calls)
    for _ in range(ROUNDS):
        target, draft = (_Timed.of(recorded, role, _decodes) for role in (Role.TARGET, Role.DRAFT))
        for found in (target, draft):
            if len(found) < MIN_CALLS:
                what = f"{len(found)} completed calls of the {found.role.value} without token drafts"
                raise TraceError(f"too few calls: {what}, {MIN_CALLS} needed")
        times = _fit_times(target, draft, with_prompts=says_reuse)
        recorded = _with_timelines(traces, num_cores, times, recorded)
    return times, recorded


def _fit_times(target: _Timed, draft: _Timed, *, with_prompts: bool) -> _Times:
    """The crowding with the least error, and the line that belongs to it. Crowds slow the draft down like the target."""
    low, high = 0.0, MAX_CROWDING
    for _ in range(3):  # a grid, and twice a finer one around its best
        grid = np.linspace(low, high, GRID)
        errors = [_fit_line(target, draft, crowding, with_prompts)[0] for crowding in grid]
        best, step = float(grid[int(np.argmin(errors))]), (high - low) / (GRID - 1)
        low, high = max(0.0, best - step), min(MAX_CROWDING, best + step)
    _, found = _fit_line(target, draft, best, with_prompts)
    call_s, target_token_s, draft_token_s, target_prompt_s, draft_prompt_s = found.tolist()
    times = _Times(call_s, target_token_s, draft_token_s, target_prompt_s, draft_prompt_s, best)
    if times.target_token_s <= 0.0 or times.draft_token_s <= 0.0:
        raise TraceError("too few calls of different lengths: they do not take longer for more tokens")
    return times


def _fit_line(target: _Timed, draft: _Timed, crowding: float, with_prompts: bool) -> tuple[float, Floats]:
    """(squared error, seconds of a call, of a target and a draft pass, of a new token of a target's and a draft's prompt)."""
    rows = np.zeros((len(target) + len(draft), 5))
    rows[:, 0] = 1.0
    rows[: len(target), 1], rows[len(target) :, 2] = target.passes, draft.passes
    if with_prompts:
        rows[: len(target), 3], rows[len(target) :, 4] = target.prompts, draft.prompts
    effective = np.concatenate([one.effective_s(crowding) for one in (target, draft)])
    weights = np.concatenate(
        [1.0 / (RELATIVE_ERROR * one.seconds + np.median(one.seconds / one.passes)) for one in (target, draft)]
    )
    # The error that counts is the one in seconds as they were.
    weights *= np.concatenate([one.seconds for one in (target, draft)]) / effective
    found = _non_negative(rows * weights[:, None], effective * weights)
    return float((((rows @ found - effective) * weights) ** 2).sum()), found


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Least squares; columns whose share would be negative are left out, the worst first. The first is a call's own cost."""
    scale = np.sqrt((rows * rows).sum(axis=0))
    kept = np.flatnonzero(scale).tolist()
    scale = np.where(scale > 0.0, scale, 1.0)
    gram, share = (rows / scale).T @ (rows / scale), (rows / scale).T @ wanted
    while True:
        part = gram[np.ix_(kept, kept)]
        if 0 in kept and np.linalg.eigvalsh(part)[0] < SINGULAR:
            kept.remove(0)  # calls of one length only: what a call costs cannot be told from its tokens
            continue
        found = np.linalg.solve(part, share[kept])
        worst = int(np.argmin(found))
        if found[worst] >= 0.0 or len(kept) == 1:
            result = np.zeros(rows.shape[1])
            result[kept] = np.maximum(0.0, found) / scale[kept]
            return result
        kept.pop(worst)


def _verdict_s(recorded: Sequence[_Recorded], call_s: float, crowding: float) -> float:
    """Mean over the verdicts that took a call, whichever role gave them; 0 where none did."""
    timed = [_Timed.of(recorded, role, _judges) for role in Role]
    seconds = [second for one in timed if len(one) for second in one.effective_s(crowding).tolist()]
    return max(0.0, fmean(seconds) - call_s) if seconds else 0.0


def _between_calls_s(traces: Iterable[Trace]) -> float:
    """What the loop takes before a call: the time in which an answer waited for none, by the calls that it waited for."""
    waited_ms = num_calls = 0.0
    for trace in traces:
        critical = critical_path(trace)
        waited_ms += sum(stretch.duration_ms for stretch in critical if stretch.call is None)
        num_calls += len({stretch.call for stretch in critical if stretch.call is not None})
    return waited_ms / 1e3 / max(1.0, num_calls)
