"""Requests, steps and calls as Triton metrics of the ``lookahead`` model.

A label has few values, and all of them are known when the model loads: modes, ends, origins, reasons, roles. A counter that an
alert looks at is there from the start, since the rate of one that appears with its first event misses that event.

A counter costs a call across processes at each refresh at most. A histogram costs one for each measurement (30 microseconds of
this process, on Triton 24.10), so only what needs quantiles is one.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import lr_backend
from lr_backend.clock import Clock
from lr_backend.engine import Role
from lr_backend.errors import (
    Cancelled,
    EngineRejected,
    InvalidRequest,
    LookaheadError,
    NotFinite,
    Overloaded,
    PromptTooLong,
    TargetUnavailable,
)
from lr_backend.loop.answer import StepMark
from lr_backend.loop.ledger import CallSpan, Ledger
from lr_backend.request import FinishReason, LookaheadRequest, Mode, Origin, Usage
from lr_backend.triton.metrics import LOOP, Histogram, Key, MetricSheet
from lr_backend.verify import Reason

REQUESTS, IN_FLIGHT, LIMIT, BUILD = (
    "lr_requests_total",
    "lr_requests_in_flight",
    "lr_requests_in_flight_limit",
    "lr_build_info",
)
STEPS, PROMPT, COMPLETION, WASTED = (
    "lr_steps_total",
    "lr_prompt_tokens_total",
    "lr_completion_tokens_total",
    "lr_wasted_tokens_total",
)
CALLS, DEGRADED, DEGRADED_S = "lr_calls_total", "lr_degraded_requests_total", "lr_degraded_seconds_total"
DEPTHS, CPU_S = "lr_steps_by_depth_total", "lr_loop_cpu_seconds_total"
REQUEST_S, FIRST_S, INTERVAL_S, CALL_S, LAG_S = (
    "lr_request_duration_seconds",
    "lr_first_step_seconds",
    "lr_step_interval_seconds",
    "lr_call_duration_seconds",
    "lr_event_loop_lag_seconds",
)

COUNTERS = {
    REQUESTS: "Requests that have ended, by the mode they asked for and by how they ended; mode none: refused before it was read",
    STEPS: "Committed steps, by who wrote them (draft, correction, target) and by why a drafted step was taken or not",
    DEPTHS: "Committed steps, by how many steps ahead the target was at work when they were decided; 0: it wrote alone",
    PROMPT: "Prompt tokens of answered requests",
    COMPLETION: "Tokens of answers, reasoning included",
    WASTED: "Tokens that target or draft wrote for answered requests and that are in no answer",
    CALLS: "Engine calls of requests that have come to their end, by role and result; those of audits are not among them",
    DEGRADED: "Requests that went on without draft, judge or verifier, because it failed",
    DEGRADED_S: "Seconds that requests have gone on without it, all requests added up",
    CPU_S: "Seconds of processor time that a process of the step loop has taken, engines that it runs itself included",
}
GAUGES = {
    IN_FLIGHT: "Requests that this process of the step loop is answering",
    LIMIT: "Its share of the requests that the server answers at a time; what comes beyond the sum is refused as overloaded",
    BUILD: "Always 1; the label is the version of the server",
}
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 7.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
HISTOGRAMS = {
    REQUEST_S: Histogram(
        "Seconds from a request's arrival at the step loop to the end of its answer",
        (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0),
    ),
    FIRST_S: Histogram(
        "Seconds from a request's arrival at the step loop to its first step, where somebody waits for steps; of one given up "
        "before that, to its end",
        _SHORT_S,
    ),
    INTERVAL_S: Histogram("Seconds between two committed steps, where somebody waits for steps", _SHORT_S),
    CALL_S: Histogram("Seconds that one engine call took, its wait before the engine included", _SHORT_S),
    LAG_S: Histogram(
        "Seconds by which the step loop's event loop was late for a timer, while it answered requests",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    ),
}

NO_MODE = "none"
"""Of a request that was refused before its mode was known."""
ENDS = (
    *(FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE),
    *("invalid_request", "engine_rejected", "overloaded", "cancelled", "target_unavailable", "not_finite", "internal"),
)
RESULTS = ("completed", "cancelled", "failed")
ACCEPTING = (Reason.EXACT, Reason.SAME_TEXT, Reason.NONE)
"""Reasons that no correction has."""
GIVEN_UP = (FinishReason.DEADLINE, "cancelled", "target_unavailable")
"""Ends of a request that may have waited in vain. One without a step has waited for its first at least until then."""
PARTS = ("draft", "judge", "verifier")
"""What an answer may go on without."""
MAX_WAITING = 1 << 16
"""Measurements that wait to be shown; beyond, the oldest are forgotten."""

_END_OF = {
    InvalidRequest: "invalid_request",
    PromptTooLong: "invalid_request",
    EngineRejected: "engine_rejected",
    Overloaded: "overloaded",
    Cancelled: "cancelled",
    TargetUnavailable: "target_unavailable",
    NotFinite: "not_finite",
}


def end_of(error: LookaheadError) -> str:
    """The end of a request that this error has ended."""
    return _END_OF.get(type(error), "internal")


@dataclass
class RequestMetrics:
    """What the requests of one process of the step loop came to. Any thread may add and read.

    Attributes:
        max_in_flight: this process' share of the requests at a time.
        on_change: called after every change; must not block.
        cpu_clock: seconds of processor time that this process has taken.
    """

    max_in_flight: float
    on_change: Callable[[], None] = lambda: None
    cpu_clock: Clock = time.process_time
    num_in_flight: int = 0
    _counts: defaultdict[Key, float] = field(default_factory=lambda: defaultdict(float))
    _measured: deque[tuple[Key, float]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        modes = (*Mode, NO_MODE)
        zeros = [_key(REQUESTS, mode=mode, end=end) for mode in modes for end in ENDS]
        zeros += [_key(CALLS, role=role, result=result) for role in Role for result in RESULTS]
        zeros += [_key(name, part=part) for name in (DEGRADED, DEGRADED_S) for part in PARTS]
        zeros += [_key(STEPS, origin=Origin.CORRECTION, reason=reason) for reason in Reason if reason not in ACCEPTING]
        zeros += [_key(STEPS, origin=Origin.DRAFT, reason=reason) for reason in ACCEPTING if reason is not Reason.NONE]
        zeros += [_key(name) for name in (PROMPT, COMPLETION, WASTED)]
        self._counts.update(dict.fromkeys(zeros, 0.0))

    def begin(self, clock: Clock) -> RequestMeter:
        """A request has arrived."""
        self.num_in_flight += 1
        self.on_change()
        return RequestMeter(self, clock, clock())

    def add(self, counts: dict[Key, float], measured: tuple[tuple[Key, float], ...] = ()) -> None:
        """Count, and keep measurements until they are shown."""
        with self._lock:
            for key, count in counts.items():
                self._counts[key] += count
            self._measured.extend(measured)
        self.on_change()

    def lagged(self, seconds: float) -> None:
        """The event loop was late by so much."""
        self.add({}, ((_key(LAG_S), seconds),))

    def values(self) -> Iterator[tuple[Key, float]]:
        """Every counter and gauge as it stands."""
        with self._lock:
            counts = dict(self._counts)
        yield from counts.items()
        yield _key(IN_FLIGHT), float(self.num_in_flight)
        yield _key(LIMIT), self.max_in_flight
        yield _key(CPU_S), self.cpu_clock()
        yield _key(BUILD, version=lr_backend.__version__), 1.0

    def measured(self) -> Iterator[tuple[Key, float]]:
        """What was measured since the last time; it is handed out once."""
        with self._lock:
            found, self._measured = self._measured, deque(maxlen=MAX_WAITING)
        yield from found


@dataclass
class RequestMeter:
    """One request, from its arrival to its one end."""

    _metrics: RequestMetrics
    _clock: Clock
    _began_s: float
    mode: str = NO_MODE
    _is_watched: bool = False
    """Else the target may write a whole answer as one step."""
    _last_step_s: float | None = None

    def read(self, request: LookaheadRequest) -> None:
        """The request is known."""
        self.mode, self._is_watched = request.mode, request.is_watched

    def began(self, ledger: Ledger) -> None:
        """The loop begins."""

    def step(self, mark: StepMark) -> None:
        """A step was committed."""
        now_s = self._clock()
        timed: tuple[tuple[Key, float], ...] = ()
        if self._is_watched:
            name, since_s = (FIRST_S, self._began_s) if self._last_step_s is None else (INTERVAL_S, self._last_step_s)
            timed = ((_key(name, mode=self.mode), now_s - since_s),)
        self._last_step_s = now_s
        steps = {_key(STEPS, origin=mark.origin, reason=mark.reason): 1.0, _key(DEPTHS, depth=str(mark.depth)): 1.0}
        self._metrics.add(steps, timed)

    def call(self, span: CallSpan) -> None:
        """An engine call has come to its end."""
        assert span.finished_s is not None
        result = "failed" if span.failed else "cancelled" if span.cancelled else "completed"
        timed = ((_key(CALL_S, role=span.role), span.finished_s - span.started_s),) if result == "completed" else ()
        self._metrics.add({_key(CALLS, role=span.role, result=result): 1.0}, timed)

    def degraded(self, seconds: Mapping[str, float]) -> None:
        """What the answer went on without, and for how long."""
        counts = {_key(DEGRADED, part=part): 1.0 for part in seconds}
        self._metrics.add(counts | {_key(DEGRADED_S, part=part): lasted_s for part, lasted_s in seconds.items()})

    def answered(self, usage: Usage) -> None:
        """The answer is complete; :meth:`end` follows."""
        tokens = {PROMPT: usage.prompt_tokens, COMPLETION: usage.completion_tokens, WASTED: usage.num_wasted_tokens}
        taken_s = (_key(REQUEST_S, mode=self.mode), self._clock() - self._began_s)
        self._metrics.add({_key(name): float(number) for name, number in tokens.items()}, (taken_s,))

    def end(self, end: str) -> None:
        """The request is over, however; once."""
        assert end in ENDS, end
        self._metrics.num_in_flight -= 1
        timed: tuple[tuple[Key, float], ...] = ()
        if self._is_watched and self._last_step_s is None and end in GIVEN_UP:
            timed = ((_key(FIRST_S, mode=self.mode), self._clock() - self._began_s),)
        self._metrics.add({_key(REQUESTS, mode=self.mode, end=end): 1.0}, timed)


def _key(name: str, **labels: str) -> Key:
    return name, tuple(sorted((label, str(value)) for label, value in labels.items()))


def request_metrics(family: Any, metrics: RequestMetrics, loop: int = 0) -> MetricSheet:
    """The metrics, all of those that are known to come shown at once."""
    about = {LOOP: str(loop)}
    sheet = MetricSheet(family, COUNTERS, GAUGES, metrics.values, about, histograms=HISTOGRAMS, measured=metrics.measured)
    sheet.refresh()
    return sheet
