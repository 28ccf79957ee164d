"""What audits found, as Triton metrics of the ``lookahead`` model. A verifier that nobody has audited has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lr_backend.audit.desk import AuditCounts
from lr_backend.audit.interval import LEAST_AUDITS
from lr_backend.triton.metrics import LOOP, Key, MetricSheet

AUDITS = "lr_audits_total"
SPENT = "lr_risk_budget_spent_total"
RATE, RATE_LOW, RATE_HIGH = "lr_false_accept_rate", "lr_false_accept_rate_low", "lr_false_accept_rate_high"
COUNTERS = {
    AUDITS: "Audits of accepted steps by result: right, false_accept, failed, dropped, cleared",
    SPENT: "Requests that accepted equal tokens only, because their risk budget was spent",
}
GAUGES = {
    RATE: "Share of accepted steps that were wrong, by audits: corrected for the auditor's errors, older ones for less",
    RATE_LOW: "Lower end of the 95 % interval of lr_false_accept_rate; 0 until 20 audits have been made",
    RATE_HIGH: "Upper end of the 95 % interval of lr_false_accept_rate",
}


def audit_metrics(family: Any, counts: Callable[[], Mapping[str, AuditCounts]], loop: int = 0) -> MetricSheet:
    """``lr_audits_total`` and ``lr_false_accept_rate*`` of the counts, which are by verifier and of one process."""

    def values() -> Iterator[tuple[Key, float]]:
        for verifier, one in counts().items():
            yield from _values(verifier, one)

    return MetricSheet(family, COUNTERS, GAUGES, values, {LOOP: str(loop)})


def _values(verifier: str, counts: AuditCounts) -> Iterator[tuple[Key, float]]:
    results = {
        "right": counts.num_right,
        "false_accept": counts.num_false_accepts,
        "failed": counts.num_failed,
        "dropped": counts.num_dropped,
        "cleared": counts.num_cleared,
    }
    label = ("verifier", verifier)
    for result, count in results.items():
        yield (AUDITS, (("result", result), label)), float(count)
    yield (SPENT, (label,)), float(counts.num_requests_spent)
    estimate = counts.false_accepts.estimate
    if estimate.rate is not None:
        # An alert looks at it all the time, and of many looks at a few audits one would be wrong.
        low = estimate.low if estimate.num >= LEAST_AUDITS else 0.0
        for name, value in ((RATE, estimate.rate), (RATE_LOW, low), (RATE_HIGH, estimate.high)):
            yield (name, (label,)), value
