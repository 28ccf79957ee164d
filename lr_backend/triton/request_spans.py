"""One request as OpenTelemetry sees it: a span of its own, a span for each engine call, an event for each committed step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lr_backend.loop.answer import StepMark
from lr_backend.loop.ledger import CallSpan, Ledger
from lr_backend.request import LookaheadRequest, Usage
from lr_backend.telemetry import Carrier, Telemetry, enter

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FAILED_ENDS = ("target_unavailable", "not_finite", "internal", "overloaded")
"""Ends that are this server's fault."""


@dataclass
class RequestSpan:
    """From a request's arrival to its one end. ``wall_ns``: nanoseconds since 1970."""

    telemetry: Telemetry
    context: Carrier
    request_id: str
    wall_ns: Callable[[], int] = time.time_ns
    _span: Span = field(init=False)
    _origin_ns: int = 0

    def __post_init__(self) -> None:
        from opentelemetry.trace import SpanKind

        attributes = {"lookahead.request_id": self.request_id, "gen_ai.operation.name": "chat"}
        self._span = self.telemetry.begin("lookahead", SpanKind.SERVER, self.context, attributes, self.wall_ns())
        enter(self.telemetry.carrier(self._span))

    def read(self, request: LookaheadRequest) -> None:
        """The request is known."""
        self._set({"lookahead.mode": request.mode.value, "lookahead.verifier": request.effective_verifier})

    def began(self, ledger: Ledger) -> None:
        """The loop begins; calls are timed from here."""
        self._origin_ns = self.wall_ns() - _ns(ledger.now_s())

    def step(self, mark: StepMark) -> None:
        """A step was committed."""
        about: dict[str, str | int] = {"origin": mark.origin.value, "reason": mark.reason.value}
        self._span.add_event("step", about | {"num_tokens": mark.num_tokens, "depth": mark.depth}, self.wall_ns())

    def call(self, call: CallSpan) -> None:
        """An engine call has come to its end."""
        from opentelemetry.trace import SpanKind, StatusCode

        assert call.finished_s is not None
        about: dict[str, int | bool] = {
            "lookahead.step": call.index,
            "lookahead.prompt_tokens": call.num_prompt_tokens,
            "lookahead.tokens": call.num_tokens,
            "lookahead.draft_tokens": call.num_proposed,
            "lookahead.accepted_tokens": call.num_accepted,
            "lookahead.drafts_tokens": call.drafts_tokens,
            "lookahead.cancelled": call.cancelled,
        }
        if call.num_reused_tokens is not None:
            about["lookahead.reused_tokens"] = call.num_reused_tokens
        start_ns = self._origin_ns + _ns(call.started_s)
        span = self.telemetry.begin(call.role.value, SpanKind.CLIENT, self._span, about, start_ns)
        if call.failed:
            span.set_status(StatusCode.ERROR)
        span.end(self._origin_ns + _ns(call.finished_s))

    def degraded(self, seconds: Mapping[str, float]) -> None:
        """What the answer went on without."""
        if seconds:
            self._set({"lookahead.degraded": ",".join(seconds)})

    def answered(self, usage: Usage) -> None:
        """The answer is complete."""
        self._set(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "lookahead.steps": usage.num_steps,
                "lookahead.steps_accepted": usage.num_steps_accepted,
                "lookahead.wasted_tokens": usage.num_wasted_tokens,
            }
        )

    def end(self, end: str) -> None:
        """The request is over."""
        from opentelemetry.trace import StatusCode

        self._set({"lookahead.end": end})
        if end in FAILED_ENDS:
            self._span.set_status(StatusCode.ERROR, end)
        self._span.end(self.wall_ns())

    def _set(self, attributes: Mapping[str, str | int]) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
