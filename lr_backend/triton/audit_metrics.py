"""What audits found, as Triton metrics of the ``lookahead`` model. A verifier that nobody has audited has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lr_backend.audit.desk import Book
from lr_backend.request import VerifierName
from lr_backend.triton.refresher import Refresher

AUDITS = "lr_audits_total"
SPENT = "lr_risk_budget_spent_total"
RATE, RATE_LOW, RATE_HIGH = "lr_false_accept_rate", "lr_false_accept_rate_low", "lr_false_accept_rate_high"
COUNTERS = {
    AUDITS: "Audits of accepted steps by result: right, false_accept, failed, dropped, cleared",
    SPENT: "Requests that accepted equal tokens only, because their risk budget was spent",
}
GAUGES = {
    RATE: "Share of accepted steps that were wrong, by audits: corrected for the auditor's errors, older ones for less",
    RATE_LOW: "Lower bound of its 95 % interval",
    RATE_HIGH: "Upper bound of its 95 % interval",
}
Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and labels."""


class AuditMetrics(Refresher):
    """Keeps ``lr_audits_total`` and ``lr_false_accept_rate*`` up to date.

    Attributes:
        books: what is shown, by verifier, which becomes a label. Given once, when there is a desk.
    """

    def __init__(self, family: Any) -> None:
        """``family`` is ``pb_utils.MetricFamily``."""
        self.books: Mapping[VerifierName, Book] = {}
        self._families = {name: family(name=name, description=text, kind=family.COUNTER) for name, text in COUNTERS.items()}
        self._families |= {name: family(name=name, description=text, kind=family.GAUGE) for name, text in GAUGES.items()}
        self._metrics: dict[Key, Any] = {}
        self._shown: dict[Key, float] = {}
        super().__init__("audit-metrics", self._send_changes)

    def _send_changes(self) -> None:
        for verifier, book in self.books.items():
            for key, value in _values(verifier.value, book):
                before = self._shown.get(key, 0.0 if key[0] in COUNTERS else None)
                if value == before:
                    continue
                metric = self._metrics.get(key) or self._families[key[0]].Metric(labels=dict(key[1]))
                self._metrics[key] = metric
                self._shown[key] = value
                if key[0] in COUNTERS:
                    metric.increment(value - (before or 0.0))
                else:
                    metric.set(value)


def _values(verifier: str, book: Book) -> Iterator[tuple[Key, float]]:
    results = {
        "right": book.num_right,
        "false_accept": book.num_false_accepts,
        "failed": book.num_failed,
        "dropped": book.num_dropped,
        "cleared": book.num_cleared,
    }
    label = ("verifier", verifier)
    for result, count in results.items():
        yield (AUDITS, (("result", result), label)), float(count)
    yield (SPENT, (label,)), float(book.num_requests_spent)
    estimate = book.false_accepts.estimate
    if estimate.rate is not None:
        for name, value in ((RATE, estimate.rate), (RATE_LOW, estimate.low), (RATE_HIGH, estimate.high)):
            yield (name, (label,)), value
