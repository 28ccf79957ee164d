"""``lookahead serve`` with its OpenAI API, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError
from prometheus_client import Metric

from lr_backend.serve.warmup import ANSWER, QUESTION
from tests.support.deployed import BOUND_S, Served, serving
from tests.support.observed import (
    PROJECT,
    Collector,
    alert_expressions,
    answering,
    collector,
    dashboard_expressions,
    has_prometheus,
    named,
    prometheus,
    reached_within,
)

pytestmark = pytest.mark.integration

ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0.0}
ALIKE = {"lookahead": {"deterministic": True}}
RIGHT = f"\\boxed{{{ANSWER}}}"


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as taking:
        yield taking


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, spans: Collector) -> Iterator[Served]:
    around = {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with serving(tmp_path_factory.mktemp("served"), **around) as running:
        yield running


def test_openais_client_is_answered(served: Served) -> None:
    with served.client as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        first, again = (
            client.chat.completions.create(**ASKED | {"temperature": 0.6, "seed": 7}, n=2, extra_body=ALIKE) for _ in range(2)
        )
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again)]
    assert texts[0] == texts[1] and all(RIGHT in str(text) for text in texts[0])
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    assert 0 < (first.usage.completion_tokens_details.reasoning_tokens or 0) < first.usage.completion_tokens


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    lookahead = {"lookahead": {"mode": "lr_sd", "deterministic": True}}
    with served.client as client:
        whole = client.chat.completions.create(**ASKED, extra_body=lookahead)
        pieces = list(
            client.chat.completions.create(**ASKED, extra_body=lookahead, stream=True, stream_options={"include_usage": True})
        )
    said = {name: "" for name in ("content", "reasoning_content")}
    for piece in pieces:
        for choice in piece.choices:
            for name in said:
                said[name] += getattr(choice.delta, name, None) or ""
    message = whole.choices[0].message
    assert said["content"] == message.content and said["reasoning_content"] == message.reasoning_content
    assert len(pieces) > 5 and RIGHT in said["content"]
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_what_is_wrong_is_refused_by_name(served: Served) -> None:
    with served.client as client, pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(**ASKED, extra_body={"lookahead": {"depht": 3}})
    assert refused.value.code == "unknown_field" and "depht" in str(refused.value)


OF_EVERY_KIND = (
    {"mode": "auto"},
    {"mode": "sd", "proposer": "draft_model"},
    {"mode": "lr", "verifier": "judge", "audit_rate": 1.0, "risk_budget": 0.9},
    {"mode": "lr_sd"},
)
"""Requests that together make every metric exist, where somebody waits for their steps."""
LAST = (
    *("lr_false_accept_rate_high", "lr_call_duration_seconds", "lr_step_interval_seconds", "lr_event_loop_lag_seconds"),
    *("lr_engine_waiting", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
)
"""Each is there as soon as the thread that tells it, and its like, has had its turn."""


def ask_for_everything(served: Served) -> None:
    with served.client as client:
        for seed, fields in enumerate(OF_EVERY_KIND):
            waits = {"temperature": 0.6, "seed": seed, "stop": "no such words"}
            client.chat.completions.create(**ASKED | waits, extra_body={"lookahead": fields})


@pytest.fixture(scope="module")
def page(served: Served) -> dict[str, Metric]:
    """The metrics, once each of them exists; they are refreshed twice a second."""
    ask_for_everything(served)
    deadline = time.monotonic() + BOUND_S
    while not all(served.page().get(name) for name in LAST):
        assert time.monotonic() < deadline
        ask_for_everything(served)  # what is audited is drawn, so once may not do
    found = served.page()
    return found


def test_the_page_is_what_the_documentation_says(page: dict[str, Metric]) -> None:
    text = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    told = {name: (kind, labels, meaning) for name, kind, labels, meaning in rows}

    def labels_of(family: Metric) -> str:
        names = {label for sample in family.samples for label in sample.labels} - {"le"}
        return ", ".join(f"`{name}`" for name in sorted(names))

    ours = {name: family for name, family in page.items() if not name.startswith("nv_")}
    assert {name: family.samples for name, family in ours.items() if not family.samples} == {}
    found = {name: (family.type, labels_of(family), family.documentation) for name, family in ours.items()}
    assert found == {name: row for name, row in told.items() if not name.startswith("nv_")}
    theirs = {name for name in told if name.startswith("nv_")}
    assert theirs and theirs <= set(page)


def test_metrics_that_dashboard_and_alerts_ask_for_are_on_the_page(page: dict[str, Metric]) -> None:
    for name, expression in {**dashboard_expressions(), **alert_expressions()}.items():
        assert named(expression) <= set(page), name


@pytest.mark.skipif(not has_prometheus(), reason="no prometheus is installed (Debian's package prometheus)")
def test_every_expression_has_an_answer(served: Served, page: dict[str, Metric], tmp_path: Path) -> None:
    with prometheus(served.address, tmp_path) as asked:
        ask_for_everything(served)
        asked.wait_for("sum(rate(lr_requests_total[1m])) and sum(rate(lr_audits_total[1m]))")
        for name, expression in {**dashboard_expressions(), **alert_expressions()}.items():
            if name == "LookaheadRoleDown":  # of servers that are not here
                continue
            # A scrape that comes late leaves a gap.
            reached_within(BOUND_S, lambda: bool(asked.ask(answering(expression))))  # noqa: B023
        rules = asked.rules()
    assert {rule["name"] for rule in rules} == set(alert_expressions())
    assert {rule["health"] for rule in rules} == {"ok"}


def test_one_trace_goes_from_the_caller_to_the_engines(served: Served, spans: Collector) -> None:
    trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    with served.client as client:
        client.chat.completions.create(**ASKED, extra_headers=headers, extra_body={"lookahead": {"mode": "lr"}})

    door = "POST /v1/chat/completions"
    found = spans.trace(trace_id, door, "lookahead", "target", "draft")
    ids = {span.name: span.span_id for span in found}
    parents = {span.name: {one.parent_span_id for one in found if one.name == span.name} for span in found}
    assert parents[door] == {bytes.fromhex(caller)}
    assert parents["lookahead"] == {ids[door]}
    assert parents["target"] == parents["draft"] == {ids["lookahead"]}
    assert not [span for span in found if "Tom" in str(span)]


def events_of(served: Served, request_id: str) -> set[str]:
    return {line["event"] for line in served.events() if str(line.get("request_id", "")).startswith(request_id)}


def test_a_line_of_the_log_is_an_event_without_a_word_of_the_conversation(served: Served) -> None:
    canary = "Zanzibar quokka"
    with served.client as client:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": canary}],
            max_tokens=20,
            extra_headers={"X-Request-Id": "canary-1"},
        )
        with pytest.raises(BadRequestError):
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": canary}], stop=[canary] * 17)

    # The step loop is another process, which may write its line after the answer has gone out.
    deadline = time.monotonic() + BOUND_S
    while len(mine := events_of(served, "canary-1")) < 2:
        assert time.monotonic() < deadline, mine
        time.sleep(0.05)
    assert mine == {"http_request", "request_finished"}
    assert all({"event", "level", "timestamp"} <= set(line) for line in served.events())
    assert canary not in served.log.read_text(encoding="utf-8")


def test_a_server_that_is_to_end_finishes_its_streams(tmp_path: Path) -> None:
    async def run(served: Served) -> tuple[str, list[int]]:
        async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=BOUND_S) as client:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            text, statuses = "", list[int]()
            served.process.send_signal(signal.SIGTERM)
            async for piece in stream:
                text += piece.choices[0].delta.content or ""
            while not statuses:  # a short answer may be over before the signal has arrived
                try:
                    await client.chat.completions.create(**ASKED)
                except APIStatusError as error:
                    statuses.append(error.status_code)
                except Exception:  # nobody listens any more
                    statuses.append(503)
            return text, statuses

    with serving(tmp_path) as ending:
        text, statuses = asyncio.run(run(ending))
        assert ending.process.wait(BOUND_S) == 0
    assert RIGHT in text and statuses == [503]
