"""What the front end refuses, and by which name; what it asks of the server for what it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lr_client import InvalidRequest as ClientsInvalidRequest
from lr_client import Options
from lr_client.protocol import encode
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as PlainParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as PlainStreamingParams

from lr_backend.fields import REQUEST_FIELDS
from lr_backend.frontend.asked import (
    LOOKAHEAD,
    MAX_CHOICES,
    NOT_IN_CHAT,
    NOT_IN_COMPLETIONS,
    PROMPT,
    SAME,
    Asked,
    _ChatBody,
    _CompletionBody,
)
from lr_backend.frontend.body import parse_json
from lr_backend.frontend.errors import CODES, ApiError, place
from lr_backend.request import MAX_SEED
from tests.support.fake_lookahead import FakeServer, Reply
from tests.support.frontend import CHAT, COMPLETIONS, DEPLOYED, JSON, Served, frontend

Document = dict[str, Any]


def chat(**fields: Any) -> Document:
    return {"model": "demo", "messages": [{"role": "user", "content": "q"}], **fields}


def turn(**fields: Any) -> Document:
    return chat(messages=[{"role": "user", "content": "q", **fields}])


def plain(**fields: Any) -> Document:
    return {"model": "demo", "prompt": "q", **fields}


def inside(**fields: Any) -> Document:
    return chat(lookahead=fields)


def without(name: str, document: Document) -> Document:
    return {key: value for key, value in document.items() if key != name}


BAD_CHATS: list[tuple[Document, str, str | None]] = [
    (without("model", chat()), "missing_field", "model"),
    (chat(model=None), "missing_field", "model"),
    (chat(model=""), "invalid_value", "model"),
    (chat(model=7), "invalid_value", "model"),
    (chat(model="x" * 257), "invalid_value", "model"),
    (chat(model="gpt-5"), "model_not_found", "model"),
    (without("messages", chat()), "missing_field", "messages"),
    (chat(messages=[]), "invalid_value", "messages"),
    (chat(messages="q"), "invalid_value", "messages"),
    (chat(messages={}), "invalid_value", "messages"),
    (chat(messages=["q"]), "invalid_value", "messages[0]"),
    (chat(messages=[{"content": "q"}]), "missing_field", "messages[0].role"),
    (turn(role="tool"), "invalid_value", "messages[0].role"),
    (turn(role=None), "invalid_value", "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "missing_field", "messages[0].content"),
    (turn(content=None), "invalid_value", "messages[0].content"),
    (turn(content=""), "invalid_value", "messages[0].content"),
    (turn(content=7), "invalid_value", "messages[0].content"),
    (turn(content={}), "invalid_value", "messages[0].content"),
    (turn(content=[]), "invalid_value", "messages[0].content"),
    (turn(content=["q"]), "invalid_value", "messages[0].content[0]"),
    (turn(content=[{"type": "text"}]), "missing_field", "messages[0].content[0].text"),
    (turn(content=[{"type": "text", "text": ""}]), "invalid_value", "messages[0].content[0].text"),
    (turn(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "invalid_value", "messages[0].content[0].type"),
    (turn(content=[{"type": "text", "text": "q", "more": 1}]), "unknown_field", "messages[0].content[0].more"),
    (turn(name="Tom"), "unsupported_field", "messages[0].name"),
    (turn(tool_calls=[{}]), "unsupported_field", "messages[0].tool_calls"),
    (turn(tool_call_id="x"), "unknown_field", "messages[0].tool_call_id"),
    (turn(colour="red"), "unknown_field", "messages[0].colour"),
    (chat(temprature=1), "unknown_field", "temprature"),
    (chat(top_k=1), "unknown_field", "top_k"),
    (chat(mode="lr"), "unknown_field", "mode"),
    (chat(prompt="q"), "unknown_field", "prompt"),
    (chat(text_input="q"), "unknown_field", "text_input"),
    (chat(temperature="1"), "invalid_value", "temperature"),
    (chat(temperature=True), "invalid_value", "temperature"),
    (chat(temperature=-0.1), "invalid_value", "temperature"),
    (chat(temperature=5.1), "invalid_value", "temperature"),
    (chat(top_p=0), "invalid_value", "top_p"),
    (chat(top_p=1.1), "invalid_value", "top_p"),
    (chat(max_tokens=0), "invalid_value", "max_tokens"),
    (chat(max_tokens=1.5), "invalid_value", "max_tokens"),
    (chat(max_tokens="9"), "invalid_value", "max_tokens"),
    (chat(max_tokens=101), "over_limit", "max_tokens"),
    (chat(max_tokens=2**40), "invalid_value", "max_tokens"),
    (chat(max_completion_tokens=101), "over_limit", "max_completion_tokens"),
    (chat(max_completion_tokens=-1), "invalid_value", "max_completion_tokens"),
    (chat(max_tokens=9, max_completion_tokens=10), "invalid_value", "max_tokens"),
    (chat(seed=-1), "invalid_value", "seed"),
    (chat(seed=MAX_SEED + 1), "invalid_value", "seed"),
    (chat(seed=1.5), "invalid_value", "seed"),
    (chat(stop=7), "invalid_value", "stop"),
    (chat(stop=""), "invalid_value", "stop"),
    (chat(stop=["x" * 129]), "invalid_value", "stop"),
    (chat(stop=["a", 7]), "invalid_value", "stop[1]"),
    (chat(stop=list("abcde")), "invalid_value", "stop"),
    (chat(stream="yes"), "invalid_value", "stream"),
    (chat(stream=1), "invalid_value", "stream"),
    (chat(n=0), "invalid_value", "n"),
    (chat(n=MAX_CHOICES + 1), "invalid_value", "n"),
    (chat(n="2"), "invalid_value", "n"),
    (chat(n=True), "invalid_value", "n"),
    (chat(user=7), "invalid_value", "user"),
    (chat(user="x" * 257), "invalid_value", "user"),
    (chat(stream_options=[]), "invalid_value", "stream_options"),
    (chat(stream_options={"include_usage": 1}), "invalid_value", "stream_options.include_usage"),
    (chat(stream_options={"usage": True}), "unknown_field", "stream_options.usage"),
    (chat(stream_options={"include_obfuscation": True}), "invalid_value", "stream_options.include_obfuscation"),
    (chat(lookahead=[]), "invalid_value", "lookahead"),
    (inside(depth=2), "unknown_field", "lookahead.depth"),
    (inside(temperature=1), "unknown_field", "lookahead.temperature"),
    (inside(text_input="q"), "unknown_field", "lookahead.text_input"),
    (inside(mode="fast"), "invalid_value", "lookahead.mode"),
    (inside(mode=1), "invalid_value", "lookahead.mode"),
    (inside(max_depth=17), "invalid_value", "lookahead.max_depth"),
    (inside(max_depth=5), "over_limit", "lookahead.max_depth"),
    (inside(width=3), "over_limit", "lookahead.width"),
    (inside(num_draft_tokens=9), "over_limit", "lookahead.num_draft_tokens"),
    (inside(deadline_s=61), "over_limit", "lookahead.deadline_s"),
    (inside(verifier=""), "invalid_value", "lookahead.verifier"),
    (inside(proposer="x" * 65), "invalid_value", "lookahead.proposer"),
    (inside(audit_rate=1.1), "invalid_value", "lookahead.audit_rate"),
    (inside(risk_budget="0.1"), "invalid_value", "lookahead.risk_budget"),
    (inside(trace="yes"), "invalid_value", "lookahead.trace"),
    (inside(deterministic=0), "invalid_value", "lookahead.deterministic"),
    (inside(top_k=-1), "invalid_value", "lookahead.top_k"),
    (chat(tools=[{"type": "function"}]), "unsupported_field", "tools"),
    (chat(tool_choice="required"), "unsupported_field", "tool_choice"),
    (chat(functions=[{"name": "f"}]), "unsupported_field", "functions"),
    (chat(logprobs=True), "unsupported_field", "logprobs"),
    (chat(top_logprobs=2), "unsupported_field", "top_logprobs"),
    (chat(logit_bias={"7": 1}), "unsupported_field", "logit_bias"),
    (chat(frequency_penalty=0.5), "unsupported_field", "frequency_penalty"),
    (chat(frequency_penalty=False), "unsupported_field", "frequency_penalty"),
    (chat(presence_penalty=-1), "unsupported_field", "presence_penalty"),
    (chat(response_format={"type": "json_object"}), "unsupported_field", "response_format"),
    (chat(reasoning_effort="high"), "unsupported_field", "reasoning_effort"),
    (chat(modalities=["audio"]), "unsupported_field", "modalities"),
    (chat(store=True), "unsupported_field", "store"),
]
BAD_COMPLETIONS: list[tuple[Document, str, str | None]] = [
    (without("prompt", plain()), "missing_field", "prompt"),
    (plain(prompt=""), "invalid_value", "prompt"),
    (plain(prompt=[]), "invalid_value", "prompt"),
    (plain(prompt=[1, 2]), "invalid_value", "prompt[0]"),
    (plain(prompt=["q", ""]), "invalid_value", "prompt[1]"),
    (plain(prompt={}), "invalid_value", "prompt"),
    (plain(prompt=["q"] * 9), "invalid_value", "prompt"),
    (plain(prompt=["q"] * 5, n=2), "invalid_value", "prompt"),
    (plain(messages=[]), "unknown_field", "messages"),
    (plain(max_completion_tokens=5), "unknown_field", "max_completion_tokens"),
    (plain(echo=True), "unsupported_field", "echo"),
    (plain(best_of=2), "unsupported_field", "best_of"),
    (plain(suffix="end"), "unsupported_field", "suffix"),
    (plain(logprobs=1), "unsupported_field", "logprobs"),
    (plain(raw=True), "unknown_field", "raw"),
    (plain(model="x"), "model_not_found", "model"),
    (plain(max_tokens=101), "over_limit", "max_tokens"),
]
DEEP = b"[" * 100_000 + b"]" * 100_000
BAD_BODIES: list[tuple[bytes, str, str | None]] = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b"null", "invalid_json", None),
    (b'"q"', "invalid_json", None),
    (b'{"model": NaN}', "invalid_json", None),
    (b'{"temperature": -Infinity}', "invalid_json", None),
    (b'{"temperature": 1e999}', "invalid_json", None),
    (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json", None),
    (b'{"model": "a", "model": "b"}', "invalid_json", "model"),
    (b'{"lookahead": {"mode": "lr", "mode": "ar"}}', "invalid_json", "mode"),
    (b'{"user": "\xff"}', "invalid_json", None),
    (b'{"user": "\\ud800"}', "invalid_json", None),
    (b"\xef\xbb\xbf{}", "invalid_json", None),
    ('{"model": "demo"}'.encode("utf-16"), "invalid_json", None),
    (b'{"model": "demo", "messages": ' + DEEP + b"}", "invalid_json", None),
    (b'{"model": "demo"} x', "invalid_json", None),
]
ROWS = [
    *((CHAT, json.dumps(document).encode(), code, param) for document, code, param in BAD_CHATS),
    *((COMPLETIONS, json.dumps(document).encode(), code, param) for document, code, param in BAD_COMPLETIONS),
    *((CHAT, body, code, param) for body, code, param in BAD_BODIES),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Behind it stands a server that knows no question: one that reaches it is a failure of its own."""
    with FakeServer({}) as server, frontend(server.url) as running:
        yield running
        assert not server.requests


@pytest.mark.parametrize(("path", "body", "code", "param"), ROWS, ids=map(str, range(len(ROWS))))
def test_what_is_wrong_is_refused_by_name(served: Served, path: str, body: bytes, code: str, param: str | None) -> None:
    answer = served.ask("POST", path, body)

    assert (answer.status, answer.error["code"], answer.error["param"]) == (CODES[code][0], code, param)
    assert answer.error["type"] == CODES[code][1]
    assert answer.error["message"]
    assert answer.error["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"


def test_messages_about_a_prompt_do_not_quote_it(served: Served) -> None:
    for document in (turn(content=[{"type": "Zanzibar"}]), chat(stop="Zanzibar" * 20), turn(role="Zanzibar")):
        assert "Zanzibar" not in served.post(CHAT, document).raw.decode()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "unsupported_media_type"),
        ({"Content-Type": "text/plain"}, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "unsupported_media_type"),
        ({"Content-Type": "application/json; charset=latin-1"}, "unsupported_media_type"),
        ({**JSON, "Content-Encoding": "gzip"}, "unsupported_media_type"),
        ({**JSON, "X-Request-Id": "x" * 65}, "invalid_request_id"),
        ({**JSON, "X-Request-Id": "two words"}, "invalid_request_id"),
        ({**JSON, "X-Request-Id": ""}, "invalid_request_id"),
    ],
)
def test_headers_that_are_refused(served: Served, headers: dict[str, str], code: str) -> None:
    answer = served.ask("POST", CHAT, json.dumps(chat()).encode(), headers)
    assert (answer.status, answer.error["code"]) == (CODES[code][0], code)
    assert answer.error["request_id"] == answer.headers["x-request-id"] != headers.get("X-Request-Id")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/health", 405),
    ],
)
def test_routes_that_are_none(served: Served, method: str, path: str, status: int) -> None:
    answer = served.ask(method, path, None, {"X-Request-Id": "mine"})
    assert (answer.status, answer.error["request_id"], answer.headers["x-request-id"]) == (status, "mine", "mine")
    assert ("allow" in answer.headers) is (status == 405)


# ------------------------------------------------------------------------------------------------------------- what is asked for


def asked(document: Document, path: str = CHAT) -> Asked:
    read = Asked.chat_of if path == CHAT else Asked.completion_of
    return read(parse_json(json.dumps(document).encode()), DEPLOYED)


def options(document: Document, path: str = CHAT) -> Options:
    return asked(document, path).jobs[0].options


def test_a_plain_chat_leaves_everything_to_the_deployment() -> None:
    one = asked(chat())
    assert (one.chat, one.stream, one.include_usage) == (True, False, False)
    (job,) = one.jobs
    assert job.question == [{"role": "user", "content": "q"}]
    assert job.options == Options(stream=False, seed=job.options.seed)


def test_every_field_arrives_under_its_own_name() -> None:
    given_inside = {
        "top_k": 5,
        "mode": "lossless",
        "max_depth": 3,
        "width": 2,
        "num_draft_tokens": 4,
        "proposer": "ngram",
        "verifier": "exact",
        "audit_rate": 0.5,
        "risk_budget": 0.1,
        "deterministic": True,
        "deadline_s": 9,
        "trace": True,
    }
    outside = {"max_tokens": 50, "temperature": 1, "top_p": 0.5, "seed": 7, "stop": ["a", "b"], "stream": True}
    assert set(given_inside) == set(LOOKAHEAD) and set(outside) == set(SAME)
    assert {*LOOKAHEAD, *SAME, *PROMPT} == {field.name for field in REQUEST_FIELDS}
    assert options(chat(**outside, lookahead=given_inside)) == Options(**outside, **given_inside)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (chat(stop="end"), {"stop": ("end",)}),
        (chat(stop=["a", "b", "c", "d"]), {"stop": ("a", "b", "c", "d")}),
        (chat(max_completion_tokens=9), {"max_tokens": 9}),
        (chat(max_tokens=9, max_completion_tokens=9), {"max_tokens": 9}),
        (chat(max_tokens=100), {"max_tokens": 100}),
        (chat(temperature=None, stop=None, n=None, user=None, stream_options=None, lookahead=None), {}),
        (chat(user="someone", lookahead={"mode": None}), {}),
    ],
)
def test_forms_that_a_field_may_have(document: Document, expected: Document) -> None:
    found = options(document)
    assert found == Options(stream=False, seed=found.seed, **expected)


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        ({"role": "developer", "content": "q"}, ("system", "q")),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ("user", "a\nb")),
        ({"role": "assistant", "content": "a", "reasoning_content": "r"}, ("assistant", "<think>r</think>a")),
        (
            {
                "role": "assistant",
                "content": "a",
                "refusal": None,
                "tool_calls": None,
                "annotations": [],
                "reasoning_content": None,
            },
            ("assistant", "a"),
        ),
    ],
)
def test_messages_as_the_template_takes_them(message: Document, sent: tuple[str, str]) -> None:
    assert asked(chat(messages=[message])).jobs[0].question == [dict(zip(("role", "content"), sent, strict=True))]


def test_completions_are_raw_prompts_and_choices_differ_by_seed() -> None:
    one = asked(plain(prompt=["a", "b"], n=2, seed=MAX_SEED), COMPLETIONS)
    assert [(job.question, job.prompt, job.options.seed) for job in one.jobs] == [
        ("a", 0, MAX_SEED),
        ("a", 0, 0),
        ("b", 1, MAX_SEED),
        ("b", 1, 0),
    ]
    assert all(job.options.raw for job in one.jobs) and not one.chat


@given(st.none() | st.integers(0, MAX_SEED), st.integers(1, MAX_CHOICES))
def test_choices_have_seeds_of_their_own(seed: int | None, num_choices: int) -> None:
    seeds = [job.options.seed for job in asked(chat(n=num_choices, seed=seed)).jobs]
    assert len(set(seeds)) == num_choices
    assert seed is None or seeds[0] == seed
    for job in asked(chat(n=num_choices, seed=seed)).jobs:
        encode(job.question, job.options)


def test_every_parameter_of_openais_client_is_known() -> None:
    of_chat = {*CompletionCreateParamsNonStreaming.__annotations__, *CompletionCreateParamsStreaming.__annotations__}
    of_plain = {*PlainParams.__annotations__, *PlainStreamingParams.__annotations__}
    assert of_chat | set(_inherited(CompletionCreateParamsNonStreaming)) == (
        {*NOT_IN_CHAT, *SAME, *_ChatBody.model_fields} - {"lookahead"}
    )
    assert of_plain | set(_inherited(PlainParams)) == {*NOT_IN_COMPLETIONS, *SAME, *_CompletionBody.model_fields} - {"lookahead"}


def _inherited(params: Any) -> dict[str, Any]:
    return {name: hint for base in params.__orig_bases__ for name, hint in getattr(base, "__annotations__", {}).items()}


@pytest.mark.parametrize(("path", "table"), [(CHAT, NOT_IN_CHAT), (COMPLETIONS, NOT_IN_COMPLETIONS)], ids=["chat", "completions"])
def test_what_is_not_supported_may_say_that_it_is_not_wanted(path: str, table: dict[str, tuple[Any, ...]]) -> None:
    make = chat if path == CHAT else plain
    expected = options(make(seed=1), path)
    for name, harmless in table.items():
        for value in (None, *harmless):
            assert options(make(seed=1, **{name: value}), path) == expected


# --------------------------------------------------------------------------------------------------------------------- any body

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    sorted({*NOT_IN_CHAT, *SAME, *LOOKAHEAD, *_ChatBody.model_fields, *_CompletionBody.model_fields, "role", "content"})
)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text() | JSON_VALUES}), max_size=3)
DOCUMENTS = st.builds(
    lambda base, more: {**base, **more},
    st.fixed_dictionaries({}, optional={"model": st.just("demo"), "messages": TURNS, "prompt": st.text() | JSON_VALUES}),
    st.dictionaries(NAMES | st.text(max_size=8), JSON_VALUES, max_size=5),
)


def or_refusal(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except ApiError as error:
        return error


@given(DOCUMENTS | JSON_VALUES, st.sampled_from([CHAT, COMPLETIONS]))
def test_any_document_is_asked_or_refused(document: Any, path: str) -> None:
    read = Asked.chat_of if path == CHAT else Asked.completion_of
    made = or_refusal(lambda: read(parse_json(json.dumps(document).encode()), DEPLOYED))
    if isinstance(made, ApiError):
        assert made.status in (400, 404)
        json.loads(made.body("id"))
        return
    jobs = made.jobs
    assert 1 <= len(jobs) <= MAX_CHOICES
    for job in jobs:
        try:
            encode(job.question, job.options)
        except ClientsInvalidRequest as error:  # none is left for the client to find
            raise AssertionError(error) from error


@given(st.binary(max_size=64))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    made = or_refusal(lambda: parse_json(raw))
    assert isinstance(made, dict) or made.code == "invalid_json"


class Willing(FakeServer):  # type: ignore[misc, valid-type]
    """Answers everything."""

    def _script(self, seen: Any) -> list[Any]:
        return [Reply(text="a"), Reply(finish="stop", usage={"completion_tokens": 1})]


@pytest.fixture(scope="module")
def willing() -> Iterator[Served]:
    with Willing({}) as server, frontend(server.url) as running:
        yield running


@given(DOCUMENTS | JSON_VALUES, st.sampled_from([CHAT, COMPLETIONS]))
def test_no_body_is_answered_with_a_fault_of_ours(willing: Served, document: Any, path: str) -> None:
    answer = willing.ask("POST", path, json.dumps(document).encode())
    assert answer.status in (200, 400, 404)
    assert answer.status == 200 or answer.error["code"] in CODES


def test_places_read_as_they_are_written() -> None:
    numbers = count()
    assert place(("messages", next(numbers), "content", "_parts", next(numbers), "text")) == "messages[0].content[1].text"
    assert place(()) == ""
