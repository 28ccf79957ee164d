"""What audits found, as metrics: counters only grow, gauges follow, and nothing is sent twice."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lr_backend.audit.desk import AuditCounts, Recent
from lr_backend.audit.interval import FalseAccepts
from lr_backend.triton.audit_metrics import AUDITS, COUNTERS, GAUGES, RATE, RATE_HIGH, RATE_LOW, SPENT, audit_metrics
from lr_backend.triton.metrics import MetricSheet
from tests.support.observed import WAIT_S
from tests.support.waiting import until


@dataclass
class Metrics:
    """Stands in for ``pb_utils.MetricFamily``."""

    COUNTER: str = "counter"
    GAUGE: str = "gauge"
    values: dict[tuple[str, ...], float] = field(default_factory=dict)
    num_calls: int = 0

    def __call__(self, name: str, description: str, kind: str) -> Any:
        assert description
        assert kind == (self.COUNTER if name in COUNTERS else self.GAUGE)
        return Family(self, name)


@dataclass
class Family:
    metrics: Metrics
    name: str
    key: tuple[str, ...] = ()

    def Metric(self, labels: dict[str, str]) -> Family:
        assert labels["loop"] == "1"
        key = (self.name, *(labels[name] for name in sorted(labels) if name != "loop"))
        assert key not in self.metrics.values, "made twice"
        self.metrics.values[key] = 0.0
        return Family(self.metrics, self.name, key)

    def increment(self, value: float) -> None:
        assert self.name in COUNTERS and value > 0
        self.metrics.values[self.key] += value
        self.metrics.num_calls += 1

    def set(self, value: float) -> None:
        assert self.name in GAUGES
        self.metrics.values[self.key] = value
        self.metrics.num_calls += 1


@pytest.fixture
def counts() -> dict[str, AuditCounts]:
    return {}


@pytest.fixture
def shown(counts: dict[str, AuditCounts]) -> Iterator[tuple[Metrics, MetricSheet]]:
    family = Metrics()
    metrics = audit_metrics(family, lambda: counts, 1)
    yield family, metrics
    metrics.close()


def test_what_nobody_audits_has_no_metrics(shown: tuple[Metrics, MetricSheet]) -> None:
    family, metrics = shown
    metrics.refresh()
    assert not family.values


def test_results_and_the_rate_with_its_interval(counts: dict[str, AuditCounts], shown: tuple[Metrics, MetricSheet]) -> None:
    family, metrics = shown
    judge = counts["judge"] = AuditCounts(FalseAccepts(200), Recent(200))
    for number in range(4):
        judge.false_accepts.add(number == 0)
    judge.num_right, judge.num_false_accepts, judge.num_failed, judge.num_requests_spent = 3, 1, 2, 1

    metrics.refresh()

    estimate = judge.false_accepts.estimate
    expected: dict[tuple[str, ...], float | None] = {
        (AUDITS, "right", "judge"): 3.0,
        (AUDITS, "false_accept", "judge"): 1.0,
        (AUDITS, "failed", "judge"): 2.0,
        (AUDITS, "dropped", "judge"): 0.0,
        (AUDITS, "cleared", "judge"): 0.0,
        (SPENT, "judge"): 1.0,
        (RATE, "judge"): estimate.rate,
        (RATE_LOW, "judge"): 0.0,  # by four audits nobody is to be alarmed
        (RATE_HIGH, "judge"): estimate.high,
    }
    assert family.values == expected
    num_calls = family.num_calls
    metrics.refresh()
    assert family.num_calls == num_calls

    for number in range(30):
        judge.false_accepts.add(number % 2 == 0)
    judge.num_right, judge.num_dropped = 5, 1
    metrics.touch()
    metrics.close()
    estimate = judge.false_accepts.estimate
    found = {(RATE, "judge"): estimate.rate, (RATE_LOW, "judge"): estimate.low, (RATE_HIGH, "judge"): estimate.high}
    assert family.values == expected | found | {(AUDITS, "right", "judge"): 5.0, (AUDITS, "dropped", "judge"): 1.0}
    assert estimate.low > 0.0


def test_a_metric_that_cannot_be_sent_now_is_sent_later() -> None:
    class Full(Metrics):
        is_full = True

        def __call__(self, name: str, description: str, kind: str) -> Any:
            if name == SPENT and self.is_full:
                return self
            return Family(self, name)

        def Metric(self, labels: dict[str, str]) -> Family:
            if self.is_full:
                failed.set()
                raise RuntimeError("no shared memory")
            self.values[(SPENT,)] = 0.0
            return Family(self, SPENT, (SPENT,))

    failed, metrics = threading.Event(), Full()
    sheet = MetricSheet(metrics, {SPENT: "spent"}, {}, lambda: [((SPENT, ()), 3.0)])
    sheet.touch()
    assert failed.wait(WAIT_S)
    metrics.is_full = False

    def is_sent() -> bool:
        sheet.touch()
        return metrics.values == {(SPENT,): 3.0}

    until(is_sent)
    sheet.close()


def test_a_gauge_that_is_nought_from_the_start_is_sent() -> None:
    """The process before may have died, and Triton still shows what it said."""

    class Left(Metrics):
        def __call__(self, name: str, description: str, kind: str) -> Any:
            return LeftFamily(self, name)

    class LeftFamily(Family):
        def Metric(self, labels: dict[str, str]) -> Family:
            self.metrics.values[(self.name,)] = 7.0
            return Family(self.metrics, self.name, (self.name,))

    metrics = Left()
    values = [((SPENT, ()), 0.0), ((RATE, ()), 0.0)]
    sheet = MetricSheet(metrics, {SPENT: "spent"}, {RATE: "rate"}, lambda: values)
    sheet.refresh()
    sheet.refresh()
    assert metrics.values == {(SPENT,): 7.0, (RATE,): 0.0} and metrics.num_calls == 1
    sheet.close()


def test_a_closed_sheet_keeps_nothing_of_tritons() -> None:
    """What lived until the process ends would ask Triton to forget it over a connection that is gone."""
    made: list[weakref.ref[Family]] = []

    class Seen(Metrics):
        def __call__(self, name: str, description: str, kind: str) -> Any:
            family = SeenFamily(self, name)
            made.append(weakref.ref(family))
            return family

    class SeenFamily(Family):
        def Metric(self, labels: dict[str, str]) -> Family:
            self.metrics.values[(self.name,)] = 0.0
            metric = Family(self.metrics, self.name, (self.name,))
            made.append(weakref.ref(metric))
            return metric

    sheet = MetricSheet(Seen(), {SPENT: "spent"}, {RATE: "rate"}, lambda: [((SPENT, ()), 1.0), ((RATE, ()), 1.0)])
    sheet.refresh()
    assert len(made) == 4 and all(one() for one in made)
    sheet.close()
    assert not any(one() for one in made)
