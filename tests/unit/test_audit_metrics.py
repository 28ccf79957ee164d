"""What audits found, as metrics: counters only grow, gauges follow, and nothing is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lr_backend.audit.desk import Book, FalseAccepts
from lr_backend.request import VerifierName
from lr_backend.triton.audit_metrics import AUDITS, COUNTERS, GAUGES, RATE, RATE_HIGH, RATE_LOW, SPENT, AuditMetrics


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
        key = (self.name, *(labels[name] for name in sorted(labels)))
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
def books() -> dict[VerifierName, Book]:
    return {name: Book(FalseAccepts(200)) for name in VerifierName}


@pytest.fixture
def shown(books: dict[VerifierName, Book]) -> Iterator[tuple[Metrics, AuditMetrics]]:
    family = Metrics()
    metrics = AuditMetrics(family)
    metrics.books = books
    yield family, metrics
    metrics.close()


def test_what_nobody_audits_has_no_metrics(shown: tuple[Metrics, AuditMetrics]) -> None:
    family, metrics = shown
    metrics.refresh()
    assert not family.values


def test_results_and_the_rate_with_its_interval(books: dict[VerifierName, Book], shown: tuple[Metrics, AuditMetrics]) -> None:
    family, metrics = shown
    book = books[VerifierName.JUDGE]
    for number in range(4):
        book.false_accepts.add(number == 0)
    book.num_right, book.num_false_accepts, book.num_failed, book.num_requests_spent = 3, 1, 2, 1

    metrics.refresh()

    estimate = book.false_accepts.estimate
    expected: dict[tuple[str, ...], float | None] = {
        (AUDITS, "right", "judge"): 3.0,
        (AUDITS, "false_accept", "judge"): 1.0,
        (AUDITS, "failed", "judge"): 2.0,
        (SPENT, "judge"): 1.0,
        (RATE, "judge"): estimate.rate,
        (RATE_LOW, "judge"): estimate.low,
        (RATE_HIGH, "judge"): estimate.high,
    }
    assert family.values == expected
    num_calls = family.num_calls
    metrics.refresh()
    assert family.num_calls == num_calls

    book.num_right, book.num_dropped = 5, 1
    metrics.touch()
    metrics.close()
    assert family.values == expected | {(AUDITS, "right", "judge"): 5.0, (AUDITS, "dropped", "judge"): 1.0}
