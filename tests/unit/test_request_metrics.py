"""Requests, steps and calls as metrics: they say what the answers' own usage says, and their labels are few."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from lr_backend.clock import VirtualClockLoop
from lr_backend.engine import Role
from lr_backend.errors import Cancelled, EngineError, EngineTimeout, InvalidRequest, LookaheadError, Overloaded, PromptTooLong
from lr_backend.loop.answer import StepMark
from lr_backend.notice import Seat, Seats
from lr_backend.request import LookaheadRequest, Mode, Origin, Usage
from lr_backend.testing import run_virtual
from lr_backend.triton import metrics as metrics_module
from lr_backend.triton import request_metrics as named
from lr_backend.triton.loop_lag import LONGEST_S, watch_lag
from lr_backend.triton.metrics import Key, MetricSheet
from lr_backend.triton.request_metrics import COUNTERS, ENDS, GAUGES, HISTOGRAMS, RequestMetrics, end_of, request_metrics
from lr_backend.verify import Reason
from tests.unit.test_service import RecordedReplies, arrays, make_world, service_of


@dataclass
class Page:
    """Stands in for ``pb_utils.MetricFamily``: what Triton's page would show."""

    COUNTER: str = "counter"
    GAUGE: str = "gauge"
    HISTOGRAM: str = "histogram"
    values: dict[Key, float] = field(default_factory=dict)
    observed: dict[Key, list[float]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, description: str, kind: str) -> Any:
        assert len(description) > 10 and name not in self.kinds
        self.kinds[name] = kind
        return Family(self, name)


@dataclass
class Family:
    page: Page
    name: str
    key: Key = ("", ())

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Family:
        assert (buckets is not None) == (self.page.kinds[self.name] == self.page.HISTOGRAM)
        assert buckets is None or buckets == sorted(set(buckets))
        key = (self.name, tuple(sorted(labels.items())))
        (self.page.observed if buckets else self.page.values).setdefault(key, [] if buckets else 0.0)  # type: ignore[arg-type]
        return Family(self.page, self.name, key)

    def increment(self, value: float) -> None:
        assert value > 0
        self.page.values[self.key] += value

    def set(self, value: float) -> None:
        self.page.values[self.key] = value

    def observe(self, value: float) -> None:
        assert value >= 0
        self.page.observed[self.key].append(value)


def test_a_counter_that_falls_stands_and_ends_nothing() -> None:
    """Triton takes no negative increment, and its exception would end the sheet's thread."""
    page, falls = Page(), {("lr_some", ()): 5.0}
    sheet = MetricSheet(page, {"lr_some": "counts some things"}, {}, falls.items)
    for value in (5.0, 4.0, 7.0):
        falls["lr_some", ()] = value
        sheet.refresh()
    assert page.values == {("lr_some", ()): 7.0}
    sheet.close()


def served(
    requests: Iterable[dict[str, Any]], world: Any = None, **about: Any
) -> tuple[Page, RequestMetrics, list[RecordedReplies]]:
    """What is shown once so many requests, one after another, have ended."""
    page, service = Page(), service_of(world or make_world())
    for name, value in about.items():
        setattr(service, name, value)
    sheet = request_metrics(page, service.metrics)
    told = []
    for fields in requests:
        told.append(RecordedReplies())
        run_virtual(service.serve("id", arrays(**fields), told[-1]))
    sheet.refresh()
    sheet.close()
    return page, service.metrics, told


def ending_seat() -> Seat:
    """Of a server that is about to end."""
    seats = Seats.alone()
    seats.end()
    return seats.seat(0)


def total(page: Page, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (found, has), value in page.values.items() if found == name and wanted <= set(has))


@pytest.mark.parametrize("mode", Mode)
def test_counts_are_those_of_the_usage(mode: Mode) -> None:
    page, metrics, (replies,) = served([{"mode": mode, "max_tokens": 200}])

    usage = Usage.model_validate_json(replies.sent[-1]["usage"])
    assert usage.num_steps > 2
    assert total(page, named.REQUESTS) == total(page, named.REQUESTS, mode=mode, end=replies.sent[-1]["finish_reason"]) == 1
    assert total(page, named.STEPS) == total(page, named.DEPTHS) == usage.num_steps
    assert total(page, named.STEPS, origin=Origin.DRAFT) == usage.num_steps_accepted
    assert total(page, named.STEPS, reason=Reason.LATE) == usage.num_steps_late
    calls = {role: total(page, named.CALLS, role=role) for role in Role}
    assert calls == {
        Role.TARGET: usage.num_target_calls,
        Role.DRAFT: usage.num_draft_calls,
        Role.JUDGE: usage.num_judge_calls,
    }
    tokens = [total(page, name) for name in (named.PROMPT, named.COMPLETION, named.WASTED)]
    assert tokens == [usage.prompt_tokens, usage.completion_tokens, usage.num_wasted_tokens]
    assert metrics.num_in_flight == 0 == total(page, named.IN_FLIGHT)

    label = (("loop", "0"), ("mode", mode.value))
    (took_s,), (first_s,) = page.observed[named.REQUEST_S, label], page.observed[named.FIRST_S, label]
    between_s = page.observed[named.INTERVAL_S, label]
    assert took_s == pytest.approx(usage.latency_s) and usage.first_step_s == pytest.approx(first_s)
    assert len(between_s) == usage.num_steps - 1 and first_s + sum(between_s) <= took_s + 1e-9


def test_steps_are_timed_where_somebody_waits_for_them() -> None:
    page, _, _ = served([{"mode": "ar", "max_tokens": 200, "stream": False}])
    assert total(page, named.STEPS) > 0 and named.REQUEST_S in {name for name, _ in page.observed}
    assert not any(seconds for (name, _), seconds in page.observed.items() if name in (named.FIRST_S, named.INTERVAL_S))


@pytest.mark.parametrize(
    ("end", "stream", "is_told"),
    [*((end, True, True) for end in named.GIVEN_UP), ("engine_rejected", True, False), ("cancelled", False, False)],
)
def test_who_gives_up_before_the_first_step_has_waited_so_long(end: str, stream: bool, is_told: bool) -> None:
    """Else nobody would be slow where everybody gives up."""
    now_s = [1.0]
    metrics = RequestMetrics(1)
    meter = metrics.begin(lambda: now_s[0])
    meter.read(LookaheadRequest.parse({"text_input": "?", "stream": stream, "mode": "ar"}))
    now_s[0] = 31.0
    meter.end(end)
    assert list(metrics.measured()) == ([((named.FIRST_S, (("mode", "ar"),)), 30.0)] if is_told else [])


def test_who_gives_up_after_the_first_step_is_timed_once() -> None:
    metrics = RequestMetrics(1)
    meter = metrics.begin(lambda: 1.0)
    meter.read(LookaheadRequest.parse({"text_input": "?", "stream": True}))
    meter.step(StepMark(Origin.TARGET, Reason.NONE, 4, 0))
    meter.end("cancelled")
    assert len(list(metrics.measured())) == 1


def test_depth_is_that_at_which_the_target_was_at_work() -> None:
    alone, _, _ = served([{"mode": "ar", "max_tokens": 200}])
    assert total(alone, named.DEPTHS, depth="0") == total(alone, named.DEPTHS) > 0

    ahead, _, _ = served([{"mode": "lr", "max_depth": 3, "max_tokens": 200}])
    depths = {dict(labels)["depth"] for name, labels in ahead.values if name == named.DEPTHS}
    assert depths <= {"0", "1", "2"} and depths > {"0"}  # three target steps run at most, one of them at the root


def test_a_draft_that_fails_degrades_a_request_and_is_counted() -> None:
    world = make_world()
    world.draft.fail = lambda call: EngineError("gone")
    page, _, (replies,) = served([{"mode": "lr", "max_tokens": 200}], world)

    assert Usage.model_validate_json(replies.sent[-1]["usage"]).degraded == ("draft",)
    assert total(page, named.DEGRADED, part="draft") == 1 == total(page, named.DEGRADED)
    assert total(page, named.DEGRADED_S, part="draft") > 0
    assert total(page, named.CALLS, role=Role.DRAFT, result="failed") >= 1


@pytest.mark.parametrize(
    ("fields", "about", "mode", "end"),
    [
        ({"mode": "nonsense"}, {}, "none", "invalid_request"),
        ({"verifier": "nobody", "mode": "lr"}, {}, "lr", "invalid_request"),
        ({}, {"seat": ending_seat()}, "none", "overloaded"),
    ],
)
def test_a_refusal_has_its_end_and_no_latency(fields: dict[str, Any], about: dict[str, Any], mode: str, end: str) -> None:
    page, metrics, _ = served([fields], **about)
    assert total(page, named.REQUESTS, mode=mode, end=end) == 1 == total(page, named.REQUESTS)
    assert not page.observed and metrics.num_in_flight == 0


def test_what_alerts_look_at_is_there_before_it_happens() -> None:
    page, _, _ = served([])
    found = {name for name, _ in page.values}
    assert found == {*COUNTERS, *GAUGES} - {named.DEPTHS}
    assert total(page, named.REQUESTS) == total(page, named.CALLS) == total(page, named.DEGRADED) == 0
    assert {dict(labels)["end"] for name, labels in page.values if name == named.REQUESTS} == set(ENDS)


def hold_up(clock: VirtualClockLoop, seconds: float) -> None:
    """As work that takes so long and lets nobody else in."""
    clock._jumping.now_s += seconds


def watch(tell: Callable[[float], None], *busy: Callable[[], bool], stall_s: float, until_s: float) -> None:
    """Look every second; from 0.9 s on nobody gets to run for a while."""

    async def run() -> None:
        clock = asyncio.get_running_loop()
        assert isinstance(clock, VirtualClockLoop)
        watching = asyncio.create_task(watch_lag(tell, *busy, look_s=1.0))
        clock.call_at(0.9, hold_up, clock, stall_s)
        await asyncio.sleep(until_s)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    run_virtual(run())


def test_the_lag_is_what_holds_the_event_loop_up() -> None:
    page, metrics = Page(), RequestMetrics(1)
    busy = [False, True, False, False, True]  # at the end of each look, the last one first

    watch(metrics.lagged, busy.pop, stall_s=0.35, until_s=5.5)
    sheet = request_metrics(page, metrics)
    sheet.close()
    assert page.observed[named.LAG_S, (("loop", "0"),)] == pytest.approx([0.25, 0.0, 0.0, 0.0])


def test_a_stall_weighs_as_long_as_it_lasts() -> None:
    """One late timer in a minute of others would be none of a hundred."""
    told: list[float] = []

    watch(told.append, stall_s=3.6, until_s=5.0)
    assert told[:4] == pytest.approx([3.5, 2.5, 1.5, 0.5])


def test_a_machine_that_stood_still_is_no_load() -> None:
    told: list[float] = []

    watch(told.append, stall_s=43_200.0, until_s=43_202.0)
    assert told[0] == LONGEST_S and len(told) < LONGEST_S + 5


def test_processor_time_is_counted() -> None:
    page = Page()
    request_metrics(page, RequestMetrics(1, cpu_clock=lambda: 2.5)).close()
    assert total(page, named.CPU_S) == 2.5


def test_what_grows_while_nothing_happens_is_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody touches the sheet."""
    monkeypatch.setattr(metrics_module, "IDLE_S", 0.001)
    monkeypatch.setattr(metrics_module, "REFRESH_S", 0.001)
    page, reads, again = Page(), count(1), threading.Event()

    def values() -> Iterator[tuple[Key, float]]:
        if (read := next(reads)) > 2:
            again.set()
        yield ("lr_some", ()), float(read)

    sheet = MetricSheet(page, {"lr_some": "counts some things"}, {}, values)
    assert again.wait(20.0)
    sheet.close()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (InvalidRequest("a", 1, "b"), "invalid_request"),
        (PromptTooLong("a", "9 tokens", "8 prompt tokens"), "invalid_request"),
        (Overloaded("full"), "overloaded"),
        (Cancelled("gone"), "cancelled"),
        (EngineTimeout("late"), "internal"),
        (LookaheadError("a bug"), "internal"),
    ],
)
def test_every_failure_has_an_end(error: LookaheadError, end: str) -> None:
    assert end_of(error) == end


def test_measurements_that_nobody_shows_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MAX_WAITING", 3)
    metrics = RequestMetrics(1)
    meter = metrics.begin(lambda: 1.0)
    meter.read(LookaheadRequest.parse({"text_input": "?", "stream": True}))
    for _ in range(9):
        meter.step(StepMark(Origin.TARGET, Reason.NONE, 4, 0))
    assert len(list(metrics.measured())) == 3
    assert not list(metrics.measured())


def test_names_say_what_they_are() -> None:
    """Prometheus' conventions: counters end in _total, times in seconds, and nothing has two names."""
    names = [*COUNTERS, *GAUGES, *HISTOGRAMS]
    assert len(names) == len(set(names)) and all(name.startswith("lr_") for name in names)
    assert all(name.endswith("_total") for name in COUNTERS)
    assert not any(name.endswith("_total") for name in (*GAUGES, *HISTOGRAMS))
    assert all(name.endswith("_seconds") for name in HISTOGRAMS)
