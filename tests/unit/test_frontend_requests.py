"""What the front end refuses, and by which name; what it asks of the server for what it takes."""

from __future__ import annotations

import json
import re
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
from pydantic import ValidationError

from lr_backend.engine.request import MAX_SEED
from lr_backend.fields import REQUEST_FIELDS
from lr_backend.frontend.asked import (
    LOOKAHEAD,
    MAX_CHOICES,
    NOT_IN_CHAT,
    NOT_IN_COMPLETIONS,
    OF_OTHERS,
    PROMPT,
    SAME,
    Asked,
    _ChatBody,
    _CompletionBody,
    _refused,
)
from lr_backend.frontend.body import parse_json
from lr_backend.frontend.errors import CODES, ApiError, place
from lr_backend.request import LookaheadRequest
from lr_backend.triton.tensors import request_fields
from tests.support.bad_input import (
    DOCUMENTS,
    DOOR_ROWS,
    GOOD_BODY,
    JSON_VALUES,
    LOOP_ROWS,
    ROWS,
    Document,
    DoorRow,
    chat,
    inside,
    plain,
    turn,
)
from tests.support.examples import answers
from tests.support.fake_lookahead import FakeServer, Reply
from tests.support.frontend import CHAT, COMPLETIONS, DEPLOYED, Served, frontend


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Behind it stands a server that knows no question: one that reaches it is a failure of its own."""
    with FakeServer({}) as server, frontend(server.url) as running:
        yield running
        assert not server.requests


@pytest.mark.parametrize("row", DOOR_ROWS, ids=map(str, range(len(DOOR_ROWS))))
def test_what_is_wrong_is_refused_by_name(served: Served, row: DoorRow) -> None:
    answer = served.ask(row.method, row.path, row.body, row.headers)

    assert (answer.status, answer.error["code"], answer.error["param"]) == (CODES[row.code][0], row.code, row.param)
    assert answer.error["type"] == CODES[row.code][1]
    assert answer.error["message"]
    assert answer.error["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    assert ("allow" in answer.headers) is (row.code == "method_not_allowed")


def test_the_table_is_long_and_says_nothing_twice() -> None:
    assert len(ROWS) >= 250
    assert len({repr(row) for row in ROWS}) == len(ROWS)
    asked = {(row.method, row.path, row.body, *sorted(row.headers.items())) for row in DOOR_ROWS}
    assert len(asked) == len(DOOR_ROWS), "a request has one code"
    assert len({repr(row.inputs) for row in LOOP_ROWS}) == len(LOOP_ROWS)


def test_messages_about_a_prompt_do_not_quote_it(served: Served) -> None:
    for document in (turn(content=[{"type": "Zanzibar"}]), chat(stop="Zanzibar" * 20), turn(role="Zanzibar")):
        assert "Zanzibar" not in served.post(CHAT, document).raw.decode()


def test_a_route_that_is_none_keeps_the_clients_id(served: Served) -> None:
    for method, path in (("GET", "/v1"), ("GET", CHAT)):
        answer = served.ask(method, path, None, {"X-Request-Id": "mine"})
        assert answer.error["request_id"] == answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("name", ["x" * 65, "x" * 10_000, "two words", "", "a\tb", "../../x y", "caf\xe9", "a,b", '"a"'])
def test_an_id_that_no_log_should_hold_is_replaced(served: Served, name: str) -> None:
    """A proxy may write one of its own into every request, the probes of /ready too."""
    for path, status in (("/health", 200), ("/ready", 200), ("/v1", 404)):
        answer = served.ask("GET", path, None, {"X-Request-Id": name})
        assert answer.status == status and re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


# ------------------------------------------------------------------------------------------------------------- what is asked for


def asked(document: Document, path: str = CHAT) -> Asked:
    read = Asked.chat_of if path == CHAT else Asked.completion_of
    return read(parse_json(json.dumps(document).encode()), DEPLOYED)


def options(document: Document, path: str = CHAT) -> Options:
    return asked(document, path).jobs[0].options


@pytest.mark.parametrize("said", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
def test_the_limit_of_a_chat_without_one_is_the_deployments(said: Document) -> None:
    assert options(chat(**said)).max_tokens is None
    assert options(chat(max_completion_tokens=5)).max_tokens == 5


def test_a_plain_chat_leaves_everything_else_to_the_deployment() -> None:
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
        "chat_template_kwargs": {"enable_thinking": False},
        "thinking_token_budget": 20,
    }
    outside = {"max_tokens": 50, "temperature": 1, "top_p": 0.5, "seed": 7, "stop": ["a", "b"], "stream": True}
    assert set(given_inside) == set(LOOKAHEAD) and set(outside) == set(SAME)
    assert {*LOOKAHEAD, *SAME, *PROMPT} == {field.name for field in REQUEST_FIELDS}
    assert options(chat(**outside, lookahead=given_inside)) == Options(**outside, **given_inside)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (chat(stop="end"), {"stop": ("end",)}),
        (chat(stop=[*"abcdefghijklmnop"]), {"stop": tuple("abcdefghijklmnop")}),
        (chat(max_completion_tokens=9), {"max_tokens": 9}),
        (chat(max_tokens=9, max_completion_tokens=9), {"max_tokens": 9}),
        (chat(max_tokens=100), {"max_tokens": 100}),
        (chat(top_k=20), {"top_k": 20}),
        (chat(top_k=-1), {"top_k": 0}),
        (chat(top_k=20, lookahead={"top_k": 20}), {"top_k": 20}),
        (chat(thinking_token_budget=20), {"thinking_token_budget": 20}),
        (chat(chat_template_kwargs={}), {"chat_template_kwargs": {}}),
        (chat(chat_template_kwargs={"a": "b"}), {"chat_template_kwargs": {"a": "b"}}),
        (chat(temperature=None, stop=None, n=None, user=None, stream_options=None, lookahead=None), {}),
        (chat(user="someone", lookahead={"mode": None}), {}),
        (chat(prompt_cache_key="k", safety_identifier="me", metadata={"a": "b"}), {}),
        (chat(stream_options={"include_usage": True, "chunk_size": None}), {}),
        (chat(prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"}), {}),
        (chat(stream_options={"continuous_usage_stats": True}), {}),
        (chat(stream_options={"include_usage": None, "include_obfuscation": None, "continuous_usage_stats": None}), {}),
    ],
)
def test_forms_that_a_field_may_have(document: Document, expected: Document) -> None:
    found = options(document)
    assert found == Options(stream=False, seed=found.seed, **expected)


@pytest.mark.parametrize(
    ("document", "code", "message"),
    [
        (chat(top_k=20, lookahead={"top_k": 5}), "invalid_value", "one field and differ"),
        (chat(mode="sd"), "unknown_field", "belongs in the object lookahead"),
        (chat(ignore_eos=True), "unsupported_field", "ignore_eos: not supported by this server"),
    ],
)
def test_fields_of_other_servers_are_taken_or_refused_with_where_they_belong(document: Document, code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(document)
    assert refused.value.code == code and message in refused.value.message


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        ({"role": "developer", "content": "q"}, ("system", "q")),
        ({"role": "user", "content": "q", "name": "Tom"}, ("user", "q")),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ("user", "a\nb")),
        ({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]}, ("user", "b")),
        ({"role": "user", "content": "q", "tool_call_id": None, "name": None}, ("user", "q")),
        ({"role": "user", "content": [{"type": "text", "text": "q", "image_url": None}]}, ("user", "q")),
        (
            {"role": "user", "content": [{"type": "text", "text": "q", "prompt_cache_breakpoint": {"ttl": "5m"}}]},
            ("user", "q"),
        ),
        ({"role": "assistant"}, ("assistant", "")),
        ({"role": "assistant", "content": [{"type": "text", "text": ""}]}, ("assistant", "")),
        ({"role": "assistant", "reasoning_content": "cut"}, ("assistant", "", "cut")),
        ({"role": "assistant", "content": "a", "reasoning_content": "r"}, ("assistant", "a", "r")),
        ({"role": "assistant", "content": "", "reasoning_content": "cut"}, ("assistant", "", "cut")),
        ({"role": "assistant", "content": None, "reasoning_content": "cut"}, ("assistant", "", "cut")),
        ({"role": "assistant", "content": "a", "reasoning": "r"}, ("assistant", "a", "r")),
        ({"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}, ("assistant", "a", "r")),
        (
            {
                "role": "assistant",
                "content": "a",
                "provider_specific_fields": {"refusal": None},
                "thinking_blocks": [{"type": "thinking", "thinking": "r"}],
            },
            ("assistant", "a"),
        ),
        (
            {
                "role": "assistant",
                "content": "a",
                "refusal": None,
                "tool_calls": None,
                "annotations": [],
                "reasoning_content": None,
                "parsed": None,
            },
            ("assistant", "a"),
        ),
        ({"role": "assistant", "reasoning_content": "r", "reasoning": None, "content": "a"}, ("assistant", "a", "r")),
        ({"role": "user", "content": "hi", "type": "text"}, ("user", "hi")),
        ({"role": "assistant", "content": "a", "type": "text"}, ("assistant", "a")),
    ],
)
def test_messages_as_the_server_takes_them(message: Document, sent: tuple[str, ...]) -> None:
    names = ("role", "content", "reasoning_content")
    assert asked(chat(messages=[message])).jobs[0].question == [dict(zip(names, sent, strict=False))]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


def test_tools_and_their_calls_arrive_as_the_template_takes_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "1"},
    ]
    strict = {**TOOL, "function": {**TOOL["function"], "description": None, "strict": True}}  # type: ignore[dict-item]
    one = asked(chat(messages=turns, tools=[strict], tool_choice="auto", chat_template_kwargs={"enable_thinking": False}))
    (job,) = one.jobs
    given = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}
    assert job.question == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [given]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    sent = {tensor.name: tensor.values for tensor in encode(job.question, job.options)}
    request = LookaheadRequest.parse(request_fields(sent, 10_000))
    assert request.conversation == job.question
    assert request.tools is not None and [tool.model_dump(exclude_none=True) for tool in request.tools] == [TOOL]
    assert request.chat_template_kwargs == {"enable_thinking": False}
    assert one.new_calls is not None


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tools": [TOOL], "tool_choice": "none"}])
def test_where_no_tools_are_wanted_none_are_shown(fields: Document) -> None:
    one = asked(chat(**fields))
    assert one.new_calls is None and one.jobs[0].options.tools is None


def test_an_empty_system_turn_is_none() -> None:
    for content in ("", [{"type": "text", "text": ""}]):
        question = asked(chat(messages=[{"role": "system", "content": content}, *chat()["messages"]])).jobs[0].question
        assert question == chat()["messages"]


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


@pytest.mark.parametrize(
    ("document", "field", "param"),
    [
        (chat(thinking_token_budget=9), "thinking_token_budget", "thinking_token_budget"),
        (inside(thinking_token_budget=9), "thinking_token_budget", "lookahead.thinking_token_budget"),
        (chat(chat_template_kwargs={"a": 1}), "chat_template_kwargs.a", "chat_template_kwargs.a"),
        (inside(chat_template_kwargs={"a": 1}), "chat_template_kwargs.a", "lookahead.chat_template_kwargs.a"),
        (chat(max_completion_tokens=9), "max_tokens", "max_completion_tokens"),
        (chat(max_tokens=9), "max_tokens", "max_tokens"),
    ],
)
def test_what_the_server_refuses_is_told_by_its_place_in_the_document(document: Document, field: str, param: str) -> None:
    assert asked(document).param_of(field) == param


def test_every_parameter_of_openais_client_is_known() -> None:
    of_chat = {*CompletionCreateParamsNonStreaming.__annotations__, *CompletionCreateParamsStreaming.__annotations__}
    of_plain = {*PlainParams.__annotations__, *PlainStreamingParams.__annotations__}
    assert of_chat | set(_inherited(CompletionCreateParamsNonStreaming)) == (
        {*NOT_IN_CHAT, *SAME, *_ChatBody.model_fields} - {"lookahead"}
    )
    ours = {"lookahead", "chat_template_kwargs"}
    assert of_plain | set(_inherited(PlainParams)) == {*NOT_IN_COMPLETIONS, *SAME, *_CompletionBody.model_fields} - ours


def _inherited(params: Any) -> dict[str, Any]:
    return {name: hint for base in params.__orig_bases__ for name, hint in getattr(base, "__annotations__", {}).items()}


@pytest.mark.parametrize(
    ("path", "table"),
    [(CHAT, NOT_IN_CHAT | OF_OTHERS), (COMPLETIONS, NOT_IN_COMPLETIONS | OF_OTHERS)],
    ids=["chat", "completions"],
)
def test_what_is_not_supported_may_say_that_it_is_not_wanted(path: str, table: dict[str, tuple[Any, ...]]) -> None:
    make = chat if path == CHAT else plain
    expected = options(make(seed=1), path)
    for name, harmless in table.items():
        for value in (None, *harmless):
            assert options(make(seed=1, **{name: value}), path) == expected


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]]])
def test_token_ids_are_refused_as_such(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        asked(plain(prompt=prompt), COMPLETIONS)
    assert refused.value.message == "prompt[0]: token ids are not taken, send text"


MANY = 1000
UNKNOWN_NAMES = {str(number): 1 for number in range(MANY)}


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (chat(messages=[{}] * MANY), "messages[0].role"),
        (turn(content=[{}] * MANY), "messages[0].content[0].type"),
        (chat(**UNKNOWN_NAMES), "0"),
        (turn(**UNKNOWN_NAMES), "messages[0].0"),
        (chat(stream_options=UNKNOWN_NAMES), "stream_options.0"),
        (plain(prompt=[1] * MANY), "prompt[0]"),
        (plain(prompt=["q"] * MANY), "prompt"),
    ],
)
def test_of_a_document_full_of_faults_few_are_collected(document: Document, param: str) -> None:
    """The event loop waits while they are."""
    with pytest.raises(ValidationError) as found:
        (_CompletionBody if "prompt" in document else _ChatBody).model_validate(document)
    assert found.value.error_count() <= 3
    assert _refused(found.value).param == param


@pytest.mark.parametrize("message", [{}, {"role": "user", "content": "q", **UNKNOWN_NAMES}])
def test_of_messages_full_of_faults_few_are_collected(message: Document) -> None:
    with pytest.raises(ValidationError) as found:
        LookaheadRequest.model_validate({"messages": [message] * MANY}, strict=False)
    assert found.value.error_count() <= 3


# --------------------------------------------------------------------------------------------------------------------- any body


def or_refusal(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except ApiError as error:
        return error


def test_any_document_is_asked_or_refused() -> None:
    ends: set[str] = set()

    @answers(300)
    @given(DOCUMENTS | JSON_VALUES, st.sampled_from([CHAT, COMPLETIONS]))
    def one_does(document: Any, path: str) -> None:
        read = Asked.chat_of if path == CHAT else Asked.completion_of
        made = or_refusal(lambda: read(parse_json(json.dumps(document).encode()), DEPLOYED))
        ends.add("refused" if isinstance(made, ApiError) else path)
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

    one_does()
    assert ends == {CHAT, COMPLETIONS, "refused"}


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


def test_no_body_is_answered_with_a_fault_of_ours(willing: Served) -> None:
    seen: set[int] = set()

    @given(DOCUMENTS | JSON_VALUES, st.sampled_from([CHAT, COMPLETIONS]))
    def is_none(document: Any, path: str) -> None:
        answer = willing.ask("POST", path, json.dumps(document).encode())
        seen.add(answer.status)
        assert answer.status in (200, 400, 404)
        assert answer.status == 200 or answer.error["code"] in CODES
        good = willing.ask("POST", CHAT, GOOD_BODY)
        assert (good.status, good.document["choices"][0]["message"]["content"]) == (200, "a")

    is_none()
    assert {200, 400} <= seen


def test_places_read_as_they_are_written() -> None:
    numbers = count()
    assert place(("messages", next(numbers), "content", "_parts", next(numbers), "text")) == "messages[0].content[1].text"
    assert place(()) == ""
