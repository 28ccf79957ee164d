"""OpenTelemetry spans, where a deployment asks for them by OpenTelemetry's own variables; otherwise nothing of it is loaded.

A caller's context comes as W3C's ``traceparent``, in HTTP's headers, in gRPC's metadata, and from Triton as a parameter of the
request. No span holds a word of a prompt or of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""One of them asks for spans, and says where they go (OTLP over HTTP)."""
DISABLED, SERVICE, MOST_EVENTS = "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_SPAN_EVENT_COUNT_LIMIT"
MAX_EVENTS = 1 << 14
"""Of a span, unless the environment says how many: a long answer has an event for each of its steps, and OpenTelemetry's own
limit of 128 would keep the last ones alone."""
HEADERS = ("traceparent", "tracestate")
FORWARDED = "^traceparent$|^tracestate$"
"""gRPC headers that Triton hands on to its models as parameters."""
MAX_CHARS = 512
"""Of a header that is taken, as W3C asks for at least."""

Carrier = Mapping[str, str]
"""A context as headers, by lower case; empty: there is none."""
_VISIBLE = re.compile(r"[\x20-\x7e]+")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_current: ContextVar[Carrier | None] = ContextVar("context_of_the_request", default=None)
log = structlog.get_logger()


def carried(headers: Mapping[str, object]) -> dict[str, str]:
    """The context among headers or parameters, if there is one that can be one; anybody may have written them."""
    parent, state = (headers.get(name) for name in HEADERS)
    if not isinstance(parent, str) or not _TRACEPARENT.fullmatch(parent):
        return {}
    told = isinstance(state, str) and len(state) <= MAX_CHARS and _VISIBLE.fullmatch(state)
    return {"traceparent": parent} | ({"tracestate": str(state)} if told else {})


def enter(carrier: Carrier) -> None:
    """What this task calls from now on belongs to that context."""
    _current.set(carrier)


def current() -> Carrier:
    """The context that calls belong to."""
    return _current.get() or {}


class Telemetry:
    """Makes spans by a provider of OpenTelemetry's, which :meth:`close` shuts down."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._tracer = provider, provider.get_tracer("lookahead")
        self._context = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        kind: SpanKind,
        parent: Span | Carrier,
        attributes: Mapping[str, str | int | float | bool],
        start_ns: int | None = None,
    ) -> Span:
        """A span under another, or under a caller's; nanoseconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        context = self._context.extract(parent) if isinstance(parent, Mapping) else set_span_in_context(parent)
        return self._tracer.start_span(name, context, kind, attributes, start_time=start_ns)

    def carrier(self, span: Span) -> Carrier:
        """The context of a span, for what it calls."""
        from opentelemetry.trace import set_span_in_context

        headers: dict[str, str] = {}
        self._context.inject(headers, set_span_in_context(span))
        return headers

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def open_telemetry(service: str, environment: Mapping[str, str]) -> Telemetry | None:
    """None where nobody asks for spans, or what makes them is not installed, which the log then says.

    Args:
        service: name of this process among services, unless the environment has one.
        environment: the process's own: the exporter reads its settings from there itself.
    """
    if not any(environment.get(name) for name in VARIABLES) or environment.get(DISABLED, "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no_telemetry", reason=f"{error.name} is missing; pip install '.[otel]'")
        return None
    resource = Resource.create({"service.name": environment.get(SERVICE) or service})
    limits = SpanLimits(max_events=None if environment.get(MOST_EVENTS) else MAX_EVENTS)
    provider = TracerProvider(resource=resource, span_limits=limits)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Telemetry(provider)
