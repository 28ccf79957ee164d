"""Spans with OpenTelemetry's in-memory exporter: the caller's context through the front end and the step loop to engine calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lr_backend.errors import EngineError, NotFinite
from lr_backend.request import Usage
from lr_backend.telemetry import MOST_EVENTS, VARIABLES, Telemetry, carried, current, open_telemetry
from lr_backend.testing import run_virtual
from tests.support.fake_lookahead import Fail, FakeServer, Gate, Reply
from tests.support.frontend import frontend
from tests.support.world import LETTERS
from tests.unit.test_service import RecordedReplies, arrays, make_world, service_of

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "reasoning_tokens": 1, "num_steps": 2, "seed": 7}
SCRIPTS = {
    "q": [Reply(text="yes"), Reply(finish="stop", usage=USAGE)],
    "down": [Fail("LR_TARGET_UNAVAILABLE: gone"), Gate()],
}


@dataclass(frozen=True)
class Seen:
    telemetry: Telemetry
    exporter: InMemorySpanExporter

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.spans() if span.name == name)
        return span


@pytest.fixture
def seen() -> Iterator[Seen]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider)
    yield Seen(telemetry, exporter)
    telemetry.close()


def served(seen: Seen, world: Any = None, context: dict[str, str] | None = None, **fields: Any) -> RecordedReplies:
    service, replies = service_of(world or make_world()), RecordedReplies()
    service.telemetry = seen.telemetry
    run_virtual(service.serve("id-1", arrays(**{"max_tokens": 200, **fields}), replies, context))
    return replies


def hexed(number: int, digits: int) -> str:
    return f"{number:0{digits}x}"


@pytest.mark.parametrize("mode", ["ar", "sd", "lr", "lr_sd"])
def test_every_engine_call_hangs_under_the_request_and_that_under_the_caller(seen: Seen, mode: str) -> None:
    replies = served(seen, context={"traceparent": PARENT}, mode=mode)
    usage = Usage.model_validate_json(replies.sent[-1]["usage"])

    request = seen.one("lookahead")
    assert request.parent is not None and request.context is not None
    assert (hexed(request.context.trace_id, 32), hexed(request.parent.span_id, 16)) == (TRACE, CALLER)
    calls = [span for span in seen.spans() if span is not request]
    assert {span.parent.span_id for span in calls if span.parent} == {request.context.span_id}
    assert {span.context.trace_id for span in calls if span.context} == {request.context.trace_id}
    assert all(span.kind is SpanKind.CLIENT for span in calls)
    by_role = {role: sum(span.name == role for span in calls) for role in ("target", "draft", "judge")}
    assert by_role == {"target": usage.num_target_calls, "draft": usage.num_draft_calls, "judge": usage.num_judge_calls}
    assert len(request.events) == usage.num_steps
    assert request.attributes is not None
    assert request.attributes["lookahead.mode"] == mode and request.attributes["lookahead.end"] == "stop"
    assert request.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens


def test_a_call_lasts_as_long_as_it_took(seen: Seen) -> None:
    world = make_world()
    replies = served(seen, world, mode="ar", stream=False, max_tokens=40)
    usage = Usage.model_validate_json(replies.sent[-1]["usage"])

    (call,) = (span for span in seen.spans() if span.name == "target")
    assert call.start_time is not None and call.end_time is not None
    assert (call.end_time - call.start_time) / 1e9 == pytest.approx(usage.latency_s, rel=0.01)
    assert call.attributes is not None and call.attributes["lookahead.tokens"] == usage.completion_tokens


def test_what_fails_is_an_error_and_what_is_cancelled_is_not(seen: Seen) -> None:
    world = make_world()
    world.draft.fail = lambda call: EngineError("gone")
    served(seen, world, mode="lr")
    assert {span.status.status_code for span in seen.spans() if span.name == "draft"} == {StatusCode.ERROR}
    request = seen.one("lookahead")
    assert request.status.status_code is StatusCode.UNSET  # the answer came
    assert request.attributes is not None and request.attributes["lookahead.degraded"] == "draft"

    for failure in (EngineError("gone"), NotFinite("target: NaN")):
        seen.exporter.clear()
        world = make_world()
        world.target.fail = lambda call, failure=failure: failure  # type: ignore[misc]
        served(seen, world, mode="lr")
        assert seen.one("lookahead").status.status_code is StatusCode.ERROR


def test_no_span_holds_a_word_of_the_conversation(seen: Seen) -> None:
    def told() -> list[str]:
        """Letters of the conversation in what is exported, which is escaped."""
        exported = "".join(span.to_json() for span in seen.spans())
        return [letter for letter in LETTERS if json.dumps(letter)[1:-1] in exported]

    replies = served(seen, mode="lr")
    assert set(LETTERS[:2]) <= set("".join(response["text_output"] for response in replies.sent))
    assert told() == []
    seen.telemetry.begin("planted", SpanKind.CLIENT, {}, {"text": f"say {LETTERS[3]}"}).end()
    assert told() == [LETTERS[3]]


def test_without_a_callers_context_a_trace_begins_here(seen: Seen) -> None:
    served(seen)
    assert seen.one("lookahead").parent is None


def test_calls_elsewhere_are_told_the_requests_context(seen: Seen) -> None:
    world, told = make_world(), list[str]()

    def look(call: object) -> None:
        told.append(current()["traceparent"])

    world.target.fail = look
    served(seen, world, context={"traceparent": PARENT})
    context = seen.one("lookahead").context
    assert context is not None
    assert set(told) == {f"00-{TRACE}-{hexed(context.span_id, 16)}-01"}
    assert current() == {}


def test_the_front_end_goes_on_in_the_callers_context(seen: Seen) -> None:
    with FakeServer(SCRIPTS) as upstream, frontend(upstream.url, telemetry=seen.telemetry) as door:
        door.chat("q", {"traceparent": PARENT, "tracestate": "vendor=1"})
        door.chat("q", {"traceparent": PARENT}, stream=True)
        door.chat("down")
        sent = [one.metadata for one in upstream.requests]
    spans = seen.spans()
    assert [span.name for span in spans] == ["POST /v1/chat/completions"] * 3
    for span, metadata in zip(spans, sent, strict=True):
        assert span.context is not None
        trace_id, span_id = hexed(span.context.trace_id, 32), hexed(span.context.span_id, 16)
        assert metadata["traceparent"].startswith(f"00-{trace_id}-{span_id}-")
    assert [bool(span.parent) for span in spans] == [True, True, False]
    assert sent[0]["tracestate"] == "vendor=1"
    about = [span.attributes or {} for span in spans]
    assert [one["http.response.status_code"] for one in about] == [200, 200, 503]
    assert about[2]["error.type"] == "unavailable" and spans[2].status.status_code is StatusCode.ERROR


def test_without_spans_of_its_own_the_front_end_passes_the_callers_on() -> None:
    with FakeServer(SCRIPTS) as upstream, frontend(upstream.url) as door:
        door.chat("q", {"traceparent": PARENT})
        door.chat("q", {"traceparent": "anything else"})
        sent = [one.metadata.get("traceparent") for one in upstream.requests]
    assert sent == [PARENT, None]


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=b", "x": "y"}, {"traceparent": PARENT, "tracestate": "a=b"}),
        ({"traceparent": PARENT, "tracestate": "a=\x00"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a" * 513}, {"traceparent": PARENT}),
        ({"traceparent": PARENT.upper()}, {}),
        ({"traceparent": PARENT + "\n"}, {}),
        ({"traceparent": 7}, {}),
        ({"tracestate": "a=b"}, {}),
    ],
)
def test_a_context_is_taken_only_if_it_can_be_one(headers: dict[str, object], taken: dict[str, str]) -> None:
    assert carried(headers) == taken


def test_spans_are_off_unless_an_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {VARIABLES[0]: "http://127.0.0.1:9"}
    assert open_telemetry("x", {}) is None
    assert open_telemetry("x", named | {"OTEL_SDK_DISABLED": "true"}) is None

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert open_telemetry("x", named) is None  # not installed: the log says so


def test_an_exporter_that_is_named_is_opened_under_the_services_name() -> None:
    environment = {VARIABLES[1]: "http://127.0.0.1:9/v1/traces", "OTEL_SERVICE_NAME": "mine"}
    telemetry = open_telemetry("x", environment)
    assert telemetry is not None
    try:
        span = telemetry.begin("a", SpanKind.SERVER, {}, {})
        assert isinstance(span, ReadableSpan) and span.resource.attributes["service.name"] == "mine"
    finally:
        telemetry.close()


@pytest.mark.parametrize(("said", "num_kept"), [(None, 1000), ("16", 16)])
def test_every_step_of_a_long_answer_is_kept_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch, said: str | None, num_kept: int
) -> None:
    environment = {VARIABLES[1]: "http://127.0.0.1:9/v1/traces"}
    monkeypatch.delenv(MOST_EVENTS, raising=False)
    if said is not None:
        environment[MOST_EVENTS] = said
        monkeypatch.setenv(MOST_EVENTS, said)
    telemetry = open_telemetry("x", environment)
    assert telemetry is not None
    try:
        span = telemetry.begin("a", SpanKind.SERVER, {}, {})
        for _ in range(1000):
            span.add_event("step")
        assert isinstance(span, ReadableSpan) and len(span.events) == num_kept
    finally:
        telemetry.close()
