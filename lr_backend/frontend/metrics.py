"""The page that Prometheus reads: what the front end counts, and behind it Triton's own page as it is.

So one port is scraped, by key where there are keys. Where Triton does not answer, the front end's own part is still told.
"""

from __future__ import annotations

import asyncio
import http.client
from itertools import product

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from lr_backend.frontend.errors import CODES
from lr_backend.frontend.limits import Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT_S = 2.0
"""For Triton's page; a scrape has ten seconds by default."""
BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0),
    *(900.0, 1800.0, 3600.0),
)
"""Up to what a new spec of a CPU gives a request."""
COMPLETED, NO_ROUTE = "ok", "none"
ANSWERING = ("/v1/chat/completions", "/v1/completions")
FAILED = ("overloaded", "unavailable", "timeout", "internal", "not_finite")
SHOWN_FROM_THE_START = ((200, COMPLETED), *((status, code) for code in FAILED for status in (CODES[code][0], 200)))
"""What alerts look at, of streams that fail midway too: the rate of a counter that appears with its first event misses it."""
log = structlog.get_logger()

disable_created_metrics()  # type: ignore[no-untyped-call]  # one series more for each, and nobody asks when a counter was made


class DoorMetrics:
    """Counts of one front end. ``triton``: ``host:port`` of Triton's page; None: there is none to add."""

    def __init__(self, gate: Gate, triton: str | None) -> None:
        self._triton = triton
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "lr_http_requests_total",
            "Requests that the OpenAI API has answered or refused, by route, HTTP status and code; a stream that fails midway "
            "has status 200 and the code of its failure",
            ("route", "status", "code"),
            registry=self._registry,
        )
        for route, (status, code) in product(ANSWERING, SHOWN_FROM_THE_START):
            self._requests.labels(route, str(status), code)
        self._seconds = Histogram(
            "lr_http_request_duration_seconds",
            "Seconds from a request's head to the last byte of its answer, refusals left out",
            ("route",),
            buckets=BOUNDS_S,
            registry=self._registry,
        )
        in_flight = Gauge("lr_http_answers_in_flight", "Answers that the OpenAI API is giving", registry=self._registry)
        in_flight.set_function(lambda: float(gate.num_in_flight))
        limit = Gauge(
            "lr_http_answers_in_flight_limit", "Answers that it gives at a time; the next is refused", registry=self._registry
        )
        limit.set(gate.limit)
        self._up = Gauge("lr_triton_up", "1 if Triton's metrics answered this scrape, else 0", registry=self._registry)

    def ended(self, route: str, status: int, code: str, seconds: float) -> None:
        """A request is over."""
        route = route or NO_ROUTE
        self._requests.labels(route, str(status), code).inc()
        if code == COMPLETED:
            self._seconds.labels(route).observe(seconds)

    async def page(self) -> bytes:
        """All of it, in Prometheus' text format."""
        theirs = await asyncio.to_thread(_read, self._triton) if self._triton is not None else b""
        self._up.set(1.0 if theirs else 0.0)
        ours: bytes = generate_latest(self._registry)
        return ours + theirs


def _read(address: str) -> bytes:
    """Triton's page; empty where there is none."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else b""
    except (OSError, http.client.HTTPException) as error:
        log.warning("triton_metrics_unreadable", error=type(error).__name__)
        return b""
    finally:
        connection.close()
