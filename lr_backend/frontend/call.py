"""One HTTP request while it is answered: its id, its line in the log, and the one form in which it fails."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from lr_client import ClientError
from starlette.requests import Request
from starlette.responses import Response

from lr_backend.frontend.body import Lingering, is_long
from lr_backend.frontend.errors import CODES, ApiError, from_client
from lr_backend.frontend.limits import Caller
from lr_backend.frontend.metrics import COMPLETED, DoorMetrics
from lr_backend.telemetry import Carrier, Telemetry, carried

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,64}")
SERVERS_FAULT = frozenset(code for code, (status, _) in CODES.items() if status >= 500)
log = structlog.get_logger()


@dataclass(slots=True)
class Call:
    """No line of its log holds a word of a prompt or of an answer.

    Attributes:
        request_id: the client's; one of ours, where it gave none, or one that is long or holds what no log should.
    """

    request: Request
    metrics: DoorMetrics
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: float = field(default_factory=time.monotonic)
    caller: Caller = field(default_factory=Caller)
    context: Carrier = field(default_factory=dict)
    """The caller's, or that of the span that :meth:`trace` has begun."""
    has_body: bool = False
    """The body was read to its end."""
    _span: Span | None = None
    _is_logged: bool = False

    def __post_init__(self) -> None:
        given = self.request.headers.get("x-request-id", "")
        if _REQUEST_ID.fullmatch(given):
            self.request_id = given

    def trace(self, telemetry: Telemetry | None) -> None:
        """Go on in the caller's context; in a span of its own, where there are spans. It ends with the line of the log."""
        self.context = carried(self.request.headers)
        if telemetry is not None:
            from opentelemetry.trace import SpanKind

            about = {
                "http.request.method": self.request.method,
                "http.route": self._route,
                "lookahead.request_id": self.request_id,
            }
            name = f"{self.request.method} {self._route}"
            self._span = telemetry.begin(name, SpanKind.SERVER, self.context, about)
            self.context = telemetry.carrier(self._span)

    @property
    def _route(self) -> str:
        """Not the path that was asked for, which may be anything."""
        return getattr(self.request.scope.get("route"), "path", "")

    @property
    def headers(self) -> dict[str, str]:
        """Of every answer."""
        return {"x-request-id": self.request_id}

    def response(self, body: bytes, status: int = 200) -> Response:
        return Response(body, status, self.headers, "application/json")

    def failed(self, error: ApiError) -> Response:
        self.log(error.status, code=error.code)
        headers, kind = self.headers | error.headers, Response
        # While draining too: who asks again does so over a new connection, which a balancer may take elsewhere.
        if error.code in ("body_too_large", "draining") or (not self.has_body and is_long(self.request)):
            headers, kind = {**headers, "connection": "close"}, Response if self.has_body else Lingering
        return kind(error.body(self.request_id), error.status, headers, "application/json")

    def log(self, status: int, **said: Any) -> None:
        """The one line of this request, and its place in the metrics: the first end that it comes to."""
        if self._is_logged:
            return
        self._is_logged = True
        code, seconds = said.get("code", COMPLETED), time.monotonic() - self.started_s
        self.metrics.ended(self._route, status, code, seconds)
        if self._span is not None:
            self._end_span(self._span, status, code)
        log.info(
            "http_request",
            request_id=self.request_id,
            method=self.request.method,
            path=self._route,
            status=status,
            key=self.caller.number,
            seconds=round(seconds, 4),
            **said,
        )

    @staticmethod
    def _end_span(span: Span, status: int, code: str) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("http.response.status_code", status)
        if code != COMPLETED:
            span.set_attribute("error.type", code)
        if code in SERVERS_FAULT:
            span.set_status(StatusCode.ERROR, code)
        span.end()

    def told_as(self, error: ClientError, param_of: Callable[[str], str]) -> ApiError:
        """What the server said. Of what is no more than an internal error to the client, the log has more."""
        told = from_client(error, param_of)
        if told.code == "internal":
            self.crashed(error)
        return told

    def crashed(self, error: Exception) -> None:
        """A bug of ours."""
        log.error("request_crashed", request_id=self.request_id, exc_info=error)
