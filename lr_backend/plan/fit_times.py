"""How long engines take, from recorded traces: a machine as one deployment's own requests have shown it.

An engine that runs iterations for all calls in flight gives each of them a pass an iteration, and an iteration takes longer
the more calls there are and the more roles share the cores. So a call's *effective* seconds, each instant divided by how much
longer an iteration took just then, are those of its passes alone:

    effective seconds = call_s + new prompt tokens * prompt_s + passes * token_s

where the prompts are its own and those that join the batch meanwhile, with one ``call_s`` for both roles: weighted least
squares, for the ``crowding`` that leaves the least error. What a call takes before its passes takes time from the others on
shared cores, so that the fit is made again with what it has found. The time in which a call waited in the engine's queue is left
out: that follows from the other calls. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from lr_backend.engine import Role
from lr_backend.errors import TraceError
from lr_backend.hardware.machine import LinearTimes
from lr_backend.trace.analysis import critical_path
from lr_backend.trace.schema import Call, CallOutcome, Purpose, Trace

LEAST_CALLS = 1
"""Completed calls of target and draft each below which nothing can be fitted."""
FEW_CALLS = 8
"""Below so many of either, what a prompt and a crowd take cannot be told from chance, and is left out."""
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


@dataclass(frozen=True)
class TimedTraces:
    """Traces of one deployment, with the times that fit all of them.

    Attributes:
        rough: they hold few calls: only what a call and a token take was fitted.
    """

    times: LinearTimes
    recorded: Sequence[_Recorded]
    rough: bool = False

    @classmethod
    def of(cls, traces: Sequence[Trace], num_cores: float | None = None) -> TimedTraces:
        """Args: num_cores: as in :class:`LinearTimes`; traces cannot tell it from slower models, so it is taken as given.

        Raises:
            TraceError: too few calls to fit.
        """
        passes, recorded, rough = _passes(traces, num_cores)
        times = LinearTimes(
            target_token_s=passes.target_token_s,
            draft_token_s=passes.draft_token_s,
            verdict_s=_verdict_s(recorded, passes.call_s, passes.crowding),
            verification_s=_verification_s(recorded, passes),
            crowding=passes.crowding,
            call_s=passes.call_s,
            loop_s=_between_calls_s(traces),
            target_prompt_s=passes.target_prompt_s,
            draft_prompt_s=passes.draft_prompt_s,
            num_cores=num_cores,
        )
        return cls(times, recorded, rough)

    def verdict_s(self, traces: Sequence[Trace]) -> float:
        """What a verdict takes in some of the traces."""
        chosen = {id(trace) for trace in traces}
        own = [(trace, timeline) for trace, timeline in self.recorded if id(trace) in chosen]
        return _verdict_s(own, self.times.call_s, self.times.crowding)


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
        starts, ends = (np.array([call.begun_interval[side] for call in calls]) for side in (0, 1))
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
        seconds, passes, prompts, drafts: of each call, shape [C]; prompts: new tokens of its own prompt and of those that joined
            the batch while it ran, since an iteration computes them for all; drafts: draft tokens that came with it.
        groups: of each trace its timeline and the bounds of its calls there, in the same order.
    """

    role: Role
    seconds: Floats
    passes: Floats
    prompts: Floats
    drafts: Floats
    groups: tuple[tuple[_Timeline, Indices], ...]

    @classmethod
    def of(cls, recorded: Iterable[_Recorded], role: Role, wanted: Callable[[Call], bool]) -> _Timed:
        chosen = []
        prompts: list[float] = []
        for trace, timeline in recorded:
            of_role = [call for call in trace.calls if call.role is role]
            group = [call for call in of_role if call.completed and wanted(call)]
            chosen.append((timeline, group))
            prompts += _num_new_within(group, of_role, trace.calls)
        calls = [call for _, group in chosen for call in group]
        return cls(
            role,
            np.asarray([(call.end_ms - call.begun_interval[0]) / 1e3 for call in calls]),
            np.asarray([float(call.num_tokens) for call in calls]),
            np.asarray(prompts),
            np.asarray([float(call.num_draft_tokens) for call in calls]),
            tuple(
                (line, np.searchsorted(line.edges_ms, [call.begun_interval for call in group])) for line, group in chosen if group
            ),
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


def _num_new(call: Call) -> int:
    """Tokens of the prompt that had to be computed."""
    return call.num_prompt_tokens - (call.num_reused_tokens or 0)


def _num_new_within(calls: Iterable[Call], of_role: Iterable[Call], of_all: Iterable[Call]) -> list[float]:
    """For each call the new tokens of all calls of its role that begin while it runs, its own among them."""
    by_begin = sorted(of_role, key=lambda call: call.begun_interval[0])
    begins = [call.begun_interval[0] for call in by_begin]
    written: dict[int, list[Call]] = {}
    for call in sorted(of_all, key=lambda call: call.end_ms):
        if call.num_tokens and call.role is not Role.JUDGE:
            written.setdefault(call.num_prompt_tokens + call.num_tokens, []).append(call)
    passed = [0]
    for number, call in enumerate(by_begin):
        num_new = _num_new(call)
        if call.outcome in (CallOutcome.CANCELLED, CallOutcome.FAILED):  # no answer says what it reused
            num_new = _num_probably_new(call, written.get(call.num_prompt_tokens, ()), by_begin[:number])
        passed.append(passed[-1] + num_new)
    bounds = (call.begun_interval for call in calls)
    return [float(passed[bisect_left(begins, end)] - passed[bisect_left(begins, begin)]) for begin, end in bounds]


def _num_probably_new(call: Call, ending_there: Iterable[Call], earlier: Sequence[Call]) -> int:
    """New tokens of a call's prompt by where its text comes from.

    Args:
        ending_there: calls whose texts end where this one begins, by their end.
        earlier: of its role.
    """
    sources = [one for one in ending_there if one.end_ms <= call.start_ms]
    if sources:  # what an engine wrote itself it has in memory, but for the last token
        return 1 if sources[-1].role is call.role else sources[-1].num_tokens
    shorter = (one.num_prompt_tokens for one in reversed(earlier) if one.num_prompt_tokens < call.num_prompt_tokens)
    return call.num_prompt_tokens - next(shorter, 0)


def _verifies(call: Call) -> bool:
    """One pass over draft tokens that came with the call. An engine that drafts by itself decodes, only so much faster."""
    return call.role is Role.TARGET and call.num_draft_tokens > 0 and 0 < call.num_tokens <= call.num_accepted_tokens + 1


def _decodes(call: Call) -> bool:
    return call.purpose is not Purpose.VERDICT and not _verifies(call) and call.num_tokens > 0


def _judges(call: Call) -> bool:
    return call.purpose is Purpose.VERDICT


def _passes(traces: Sequence[Trace], num_cores: float | None) -> tuple[_Times, list[_Recorded], bool]:
    """The times, what ran when by them, and whether there were few calls. Raises: TraceError: too few calls to fit."""
    recorded = _with_timelines(traces, num_cores)
    # Engines that do not say of each call what they reused say nothing of their prompts either.
    told = [call.num_reused_tokens for trace in traces for call in trace.calls if _decodes(call)]
    says_reuse = any(told) and None not in told
    for _ in range(ROUNDS):
        target, draft = (_Timed.of(recorded, role, _decodes) for role in (Role.TARGET, Role.DRAFT))
        for found in (target, draft):
            if len(found) < LEAST_CALLS:
                what = f"{len(found)} completed calls of the {found.role.value} without draft tokens"
                raise TraceError(f"too few calls: {what}, {LEAST_CALLS} needed: record a longer answer, or give more traces")
        rough = min(len(target), len(draft)) < FEW_CALLS
        times = _fit_rough(target, draft) if rough else _fit_passes(target, draft, with_prompts=says_reuse)
        recorded = _with_timelines(traces, num_cores, times, recorded)
    return times, recorded, rough


def _fit_rough(target: _Timed, draft: _Timed) -> _Times:
    """What a call and a token take, where calls are few. Where even these cannot be told apart, a call itself takes nothing."""
    _, found = _fit_line(target, draft, 0.0, with_prompts=False)
    call_s, target_token_s, draft_token_s = found[:3].tolist()
    if target_token_s <= 0.0 or draft_token_s <= 0.0:
        call_s = 0.0
        target_token_s, draft_token_s = (float(np.sum(one.seconds) / np.sum(one.passes)) for one in (target, draft))
    return _Times(call_s, target_token_s, draft_token_s, 0.0, 0.0, 0.0)


def _fit_passes(target: _Timed, draft: _Timed, *, with_prompts: bool) -> _Times:
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


def _verification_s(recorded: Sequence[_Recorded], times: _Times) -> float:
    """Mean over the verifications of what each takes beyond a token and the tokens that it computes; 0 where there is none."""
    timed = _Timed.of(recorded, Role.TARGET, _verifies)
    if not len(timed):
        return 0.0
    # All but the last of a verification's passes are draft tokens, which are computed like a prompt's.
    computed = timed.prompts + timed.drafts
    beyond = timed.effective_s(times.crowding) - times.call_s - times.target_token_s - computed * times.target_prompt_s
    return max(0.0, float(beyond.mean()))


def _between_calls_s(traces: Iterable[Trace]) -> float:
    """What the loop takes before a call: the time in which an answer waited for none, by the calls that it waited for."""
    waited_ms = num_calls = 0.0
    for trace in traces:
        critical = critical_path(trace)
        waited_ms += sum(stretch.duration_ms for stretch in critical if stretch.call is None)
        num_calls += len({stretch.call for stretch in critical if stretch.call is not None})
    return waited_ms / 1e3 / max(1.0, num_calls)
