import json
import math
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from fake_server import Reply, decode_inputs, stream_response
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from lr_client import (
    Cancelled,
    ClientError,
    Event,
    FinishEvent,
    InvalidRequest,
    Message,
    Options,
    Overloaded,
    RequestTimeout,
    Result,
    ServerError,
    ServerUnreachable,
    StepEvent,
    StepRecord,
    TargetUnavailable,
    TextEvent,
    Usage,
)
from lr_client._wire import (
    channel_options,
    checked_id,
    checked_timeout,
    checked_url,
    infer_request,
    metadata_pairs,
    outputs_of,
)
from lr_client.client import DEFAULT_TIMEOUT_S
from lr_client.protocol import (
    INPUTS,
    Collector,
    Decoder,
    encode,
    error_from_status,
    error_from_text,
    read_at_once,
    read_record,
    read_steps,
)
from lr_client.reasoning import MARKS, ReasoningSplitter

QUICK = settings(max_examples=50, deadline=None)
TEXT = st.text(st.characters(codec="utf-8"))
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = {
    "BYTES": TEXT,
    "INT32": INT32,
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": FLOAT32,
    "BOOL": st.booleans(),
}


@st.composite
def option_fields(draw: st.DrawFn) -> dict[str, Any]:
    strategies = {item.name: VALUES[INPUTS[item.name]] for item in fields(Options)}
    strategies["stop"] = st.lists(TEXT, min_size=1, max_size=4).map(tuple)
    return {name: draw(values) for name, values in strategies.items() if draw(st.booleans())}


@QUICK
@given(TEXT, option_fields())
def test_every_option_reaches_the_server_as_it_was_given(question: str, given_fields: dict[str, Any]) -> None:
    request = infer_request("lookahead", "id", encode(question, Options(**given_fields)))
    wanted = {"text_input": question} | given_fields
    assert decode_inputs(request) == {
        name: list(value) if name == "stop" else [value] for name, value in wanted.items()
    }
    assert {tensor.name: tensor.datatype for tensor in request.inputs} == {
        name: INPUTS[name] for name in wanted
    }


@QUICK
@given(st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT})))
def test_messages_travel_as_json(messages: list[Any]) -> None:
    (tensor,) = encode(messages, Options())
    assert tensor.name == "messages"
    assert json.loads(tensor.values[0]) == messages


def test_none_and_no_stop_strings_stay_at_home() -> None:
    assert [tensor.name for tensor in encode("q", Options(stop=[], seed=None))] == ["text_input"]


def test_one_stop_string_is_not_taken_apart() -> None:
    assert Options(stop="END").stop == ("END",)


@pytest.mark.parametrize("stop", [5, True, 0.5])
def test_a_stop_that_is_no_text_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop=") as refused:
        Options(stop=stop)
    assert refused.value.field == "stop"


def test_numpy_numbers_are_numbers() -> None:
    sent = encode("q", Options(max_tokens=np.int64(5), temperature=np.float64(0.5)))  # type: ignore[arg-type]
    assert [tensor.values.tolist() for tensor in sent[1:]] == [[5], [0.5]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "7"),
        ("num_draft_tokens", "7"),
        ("seed", -1),
        ("seed", 2**64),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("trace", 1),
        ("mode", "\ud800"),
        ("mode", 3),
        ("stop", ["a", 3]),
    ],
)
def test_what_would_be_bent_on_the_wire_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode("q", Options(**{name: value}))
    assert caught.value.field == name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["depth", "lossless", "segmenter"])
def test_what_is_no_field_is_no_option(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Options(**{name: 1})


@pytest.mark.parametrize("question", [[{"role": "user"}], [3], 5, [{"role": "user", "content": b"x"}]])
def test_a_malformed_question_is_refused(question: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(question, Options())
    assert caught.value.field == "messages"


def test_a_key_that_no_message_has_is_refused_by_name() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [], "refusal": None, "name": "a"}
    with pytest.raises(InvalidRequest, match="messages: unknown name, refusal") as caught:
        encode([{"role": "user", "content": "q"}, turn], Options())  # type: ignore[list-item]
    assert caught.value.field == "messages"


def test_calls_of_tools_go_both_ways() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns: list[Message] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    for options in (
        Options(tools=[tool], chat_template_kwargs={"a": "\u00e9"}),
        Options(tools=json.dumps([tool]), chat_template_kwargs='{"a": "\u00e9"}'),
    ):
        sent = {tensor.name: tensor.values for tensor in encode(turns, options)}
        assert json.loads(sent["messages"][0]) == turns
        assert json.loads(sent["tools"][0]) == [tool]
        assert sent["chat_template_kwargs"].tolist() == ['{"a": "\u00e9"}'.encode()]


def test_what_json_cannot_say_is_refused() -> None:
    for value in ({1, 2}, [{"a": object()}]):
        with pytest.raises(InvalidRequest, match=r"^tools=.*: give what JSON can say") as caught:
            Options(tools=value)  # type: ignore[arg-type]
        assert caught.value.field == "tools"


@pytest.mark.parametrize("options", [{"seed": 7}, {}, 7])
def test_what_is_no_options_is_refused(options: Any) -> None:
    for take in (read_at_once, lambda options: encode("q", options)):
        with pytest.raises(InvalidRequest, match=r"give Options\(\.\.\.\)") as caught:
            take(options)
        assert caught.value.field == "options"


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 1e9, 10**400, "60", 1j])
def test_a_wait_without_a_bound_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_timeout(timeout_s)
    assert caught.value.field == "timeout_s"


@pytest.mark.parametrize("request_id", ["", "a b", "é", "a" * 81, 7, b"a"])
def test_an_id_that_no_log_can_hold_is_refused(request_id: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_id(request_id)
    assert caught.value.field == "request_id"


def test_an_id_is_kept_or_made() -> None:
    assert checked_id("a" * 80) == "a" * 80
    assert checked_id(None) != checked_id(None)


@pytest.mark.parametrize("url", ["", "http://localhost:8000", None, 8001, b"localhost:8001"])
def test_a_url_that_grpc_would_misread_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequest):
        checked_url(url)


def test_a_dead_connection_is_noticed_within_what_triton_allows() -> None:
    options = dict(channel_options("server:8001", None))
    # Triton's --grpc-http2-min-recv-ping-interval-without-data is 300000 unless it is set.
    assert 300_000 <= options["grpc.keepalive_time_ms"] < 1000 * DEFAULT_TIMEOUT_S
    assert options["grpc.keepalive_timeout_ms"] == 20_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.http2.max_pings_without_data"] == 0  # no bound: else the third ping is never sent


RATES = st.none() | st.floats(0, 1)
COUNTS = st.integers(0, 2**53)
UNKNOWN = st.dictionaries(TEXT.map("x_{}".format), st.none() | st.integers() | TEXT, max_size=3)
USAGES = st.builds(
    Usage,
    completion_tokens=COUNTS,
    num_steps_rejected=st.dictionaries(TEXT, COUNTS, max_size=3),
    step_acceptance_rate=RATES,
    mean_accepted_length=RATES,
    latency_s=st.floats(0, 1e6) | st.integers(0, 9).map(float),
    mode=TEXT,
    degraded=st.lists(TEXT, max_size=2).map(tuple),
)
STEPS = st.builds(
    StepRecord,
    index=COUNTS,
    origin=TEXT,
    text=TEXT,
    reason=TEXT,
    sibling=st.none() | COUNTS,
    drafted_text=st.none() | TEXT,
    committed_s=st.floats(0, 1e6),
)


@QUICK
@given(USAGES, UNKNOWN)
def test_usage_survives_json_and_unknown_keys(usage: Usage, unknown: dict[str, Any]) -> None:
    assert read_record(Usage, json.dumps(asdict(usage) | unknown).encode()) == usage


@QUICK
@given(STEPS, UNKNOWN)
def test_step_records_survive_json_and_unknown_keys(step: StepRecord, unknown: dict[str, Any]) -> None:
    assert read_record(StepRecord, json.dumps(asdict(step) | unknown).encode()) == step


def test_missing_counts_are_zero_and_missing_rates_none() -> None:
    assert read_record(Usage, b"{}") == Usage()
    assert Usage().tokens_per_s is None


@QUICK
@given(st.binary().filter(lambda raw: raw.strip() != b"[]"))
def test_garbage_records_are_a_server_error(raw: bytes) -> None:
    with pytest.raises(ServerError):
        read_record(StepRecord, raw)
    with pytest.raises(ServerError):
        read_steps(raw)


def test_steps_come_one_by_one_or_as_a_list() -> None:
    one, two = (StepRecord(index=n, origin="draft", text="a") for n in (0, 1))
    assert read_steps(json.dumps(asdict(one)).encode()) == [one]
    assert read_steps(json.dumps([asdict(one), asdict(two)]).encode()) == [one, two]
    assert read_steps(b"[]") == []
    with pytest.raises(ServerError):
        read_steps(b"[1]")


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"null",
        b'{"latency_s": "fast"}',
        b'{"num_steps": true}',
        b'{"num_steps": 1.5}',
        b'{"degraded": "draft"}',
        b'{"num_steps_rejected": {"judge": "many"}}',
        b"[" * 100_000,
    ],
)
def test_a_value_of_the_wrong_type_is_a_server_error(raw: bytes) -> None:
    with pytest.raises(ServerError, match="unreadable Usage"):
        read_record(Usage, raw)


def test_a_response_becomes_its_step_then_its_text_then_its_finish() -> None:
    step = {"index": 0, "origin": "draft", "text": "a"}
    reply = Reply(text="a", num_reasoning_chars=1, step=step, finish="stop", usage={"num_steps": 1})
    assert Decoder().feed(outputs_of(stream_response(reply.outputs()))) == (
        StepEvent(StepRecord(index=0, origin="draft", text="a")),
        TextEvent("a", 1),
        FinishEvent("stop", Usage(num_steps=1)),
    )


def test_empty_and_missing_outputs_make_no_events() -> None:
    assert Decoder().feed({}) == ()
    assert Decoder().feed({"text_output": b"", "step": b"", "finish_reason": b"", "usage": b""}) == ()


def test_a_finish_may_come_without_usage() -> None:
    assert Decoder().feed({"finish_reason": b"length"}) == (FinishEvent("length", Usage()),)


def test_nothing_may_follow_the_finish_but_empty_responses() -> None:
    decoder = Decoder()
    decoder.feed({"finish_reason": b"stop"})
    assert decoder.feed({}) == ()
    decoder.end()
    with pytest.raises(ServerError):
        decoder.feed({"text_output": b"more", "num_reasoning_chars": 0})


def test_a_server_that_does_not_say_what_is_reasoning_is_too_old() -> None:
    with pytest.raises(ServerError, match="update the older one"):
        Decoder().feed({"text_output": b"<think>why</think>42"})


def test_an_end_before_the_finish_is_an_error() -> None:
    with pytest.raises(ServerError):
        Decoder().end()


@QUICK
@given(st.binary(), st.integers(0, 5))
def test_garbage_tensors_are_a_server_error_or_some_bytes(raw: bytes, num: int) -> None:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[num])
    response.infer_response.raw_output_contents.append(raw)
    try:
        assert set(outputs_of(response)) <= {"text_output"}
    except ServerError as error:
        assert "unreadable" in error.message


CODES: dict[str, type[ClientError]] = {
    "LR_INTERNAL": ServerError,
    "LR_INVALID_REQUEST": InvalidRequest,
    "LR_PROMPT_TOO_LONG": InvalidRequest,
    "LR_OVERLOADED": Overloaded,
    "LR_CANCELLED": ServerUnreachable,
    "LR_TARGET_UNAVAILABLE": TargetUnavailable,
    "LR_ENGINE_ERROR": ServerError,
    "LR_ENGINE_REJECTED": ServerError,
    "LR_OF_TOMORROW": ServerError,
}
WRAPS = [
    "{}",
    "Failed to process the request(s) for model 'lookahead_0_0', message: {}",
    "in ensemble 'x', TritonModelException: {}\n\nAt:\n  /models/lookahead/1/model.py(12): execute\n",
]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_every_code_becomes_its_error_whatever_is_around_it(code: str, wrap: str) -> None:
    error = error_from_text(wrap.format(f"{code}: something, said: plainly"))
    assert type(error) is CODES[code]
    assert (error.code, error.message) == (code, "something, said: plainly")
    assert error.advice


def test_the_field_of_an_invalid_request_is_named() -> None:
    error = error_from_text("LR_INVALID_REQUEST: messages.0.role='bot': Input should be 'system', 'user'")
    assert isinstance(error, InvalidRequest)
    assert error.field == "messages.0.role"
    other = error_from_text("LR_INVALID_REQUEST: no way")
    assert isinstance(other, InvalidRequest)
    assert other.field is None


def test_triton_s_unknown_model_says_to_check_its_name() -> None:
    error = error_from_text("Request for unknown model: 'nope' is not found")
    assert type(error) is ServerError
    assert "model's name" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "Request for unknown model: 'lookahead' has no available versions",
        "Stub process 'lookahead_0_0' is not healthy.",
        "in ensemble 'x', model is not ready",
        "Server is stopping, scheduler for model has stopped accepting new inference requests",
    ],
)
def test_triton_s_words_for_a_model_that_is_away_say_to_come_back(text: str) -> None:
    error = error_from_text(text)
    assert type(error) is ServerUnreachable
    assert "again" in str(error)


@QUICK
@given(st.text())
def test_any_message_becomes_an_error_that_says_something(text: str) -> None:
    assert isinstance(error_from_text(text), ClientError)
    assert str(error_from_text(text)).strip()


@pytest.mark.parametrize(
    ("status", "details", "cancelled", "kind"),
    [
        ("UNAVAILABLE", "connection refused", False, ServerUnreachable),
        ("CANCELLED", "", True, Cancelled),
        ("CANCELLED", "", False, ServerUnreachable),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", False, RequestTimeout),
        ("RESOURCE_EXHAUSTED", "", False, Overloaded),
        ("INVALID_ARGUMENT", "bad", False, InvalidRequest),
        ("UNIMPLEMENTED", "", False, ServerError),
        ("INTERNAL", "oops", False, ServerError),
        ("UNKNOWN", "oops", False, ServerError),
        ("UNKNOWN", "Stream removed", False, ServerUnreachable),
        ("UNAVAILABLE", "LR_OVERLOADED: queue full", False, Overloaded),
    ],
)
def test_every_status_becomes_its_error(
    status: str, details: str, cancelled: bool, kind: type[ClientError]
) -> None:
    error = error_from_status(status, details, url="here:1", timeout_s=2.0, cancelled=cancelled)
    assert type(error) is kind


def test_timeouts_and_lost_connections_are_python_s_own_kinds_too() -> None:
    assert issubclass(RequestTimeout, TimeoutError)
    assert issubclass(ServerUnreachable, ConnectionError)
    assert str(RequestTimeout("late", advice="")) == "late"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer key\n"),
        ("x-name", "Jos\u00e9"),
        ("x name", "1"),
        ("", "1"),
        ("x-tenant", 7),
        (7, "1"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(name: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="metadata: header") as refused:
        metadata_pairs({name: value})
    assert len(str(value)) < 2 or value.strip() not in str(refused.value)
    assert metadata_pairs({"X-Name": "a b"}) == (("x-name", "a b"),)


@pytest.mark.parametrize("metadata", ["authorization", [("a", "b")], 7])
def test_metadata_that_is_no_mapping_is_refused(metadata: Any) -> None:
    with pytest.raises(InvalidRequest, match="give a mapping") as refused:
        metadata_pairs(metadata)
    assert refused.value.field == "metadata"
    with pytest.raises(InvalidRequest, match="header 'authorization'"):
        metadata_pairs({"authorization": None})  # type: ignore[dict-item]


def result_of(*events: Event) -> Result:
    collector = Collector()
    for event in (*events, FinishEvent("stop", Usage())):
        collector.add(event)
    return collector.result()


@pytest.mark.parametrize(
    ("reasoning", "answer", "parts"),
    [
        ("<think>\nwhy\n</think>", "\n\n42", ("why", "42")),
        ("\n<think>why</think>", "42", ("why", "42")),
        ("[THINK]why[/THINK]", "Use </think>", ("why", "Use </think>")),
        ("<think>It writes </think> and goes on</think>", "42", ("It writes </think> and goes on", "42")),
        ("why</think>", "42", ("why", "42")),  # the prompt has opened it
        ("why, ", "42", ("why,", "42")),  # a tokenizer may keep its marks out of texts
        ("<think>why", "", ("why", "")),
        ("<think></think>", "42", ("", "42")),
        ("", "Close it with </think>.", ("", "Close it with </think>.")),
        ("", "<think> is a tag", ("", "<think> is a tag")),
        ("", "", ("", "")),
    ],
)
def test_the_server_says_what_is_reasoning_and_its_marks_are_left_out(
    reasoning: str, answer: str, parts: tuple[str, str]
) -> None:
    result = result_of(TextEvent(reasoning + answer, len(reasoning)))
    assert (result.text, (result.reasoning, result.answer)) == (reasoning + answer, parts)


PIECES = st.lists(st.sampled_from([*"</think>ab<[/THINK]", "</think>", "[/THINK]"]) | TEXT)


@QUICK
@given(st.sampled_from(["", *(opening for opening, _ in MARKS)]), PIECES, st.booleans(), PIECES)
def test_the_splitter_takes_the_marks_away_whatever_the_pieces(
    opening: str, reasoning: list[str], is_closed: bool, answer: list[str]
) -> None:
    closing = "</think>" if is_closed else ""
    told = [*opening, *reasoning, *closing]
    splitter = ReasoningSplitter()
    parts = [splitter.feed(piece, len(piece)) for piece in told]
    parts += [splitter.feed(piece, 0) for piece in answer if piece]
    parts.append(splitter.flush())
    found, said = ("".join(part) for part in zip(*parts, strict=True))
    assert said == "".join(answer)
    text = "".join(told)
    begins = next((text.lstrip()[len(one) :] for one, _ in MARKS if text.lstrip().startswith(one)), text)
    ending = next((one for _, one in MARKS if begins.endswith(one)), "")
    assert found == begins.removesuffix(ending)


def test_blank_lines_before_the_reasoning_are_none_of_the_answer() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("\n\n", 0) == ("", "")
    assert splitter.feed("<think>why</think>", 18) == ("why", "")
    assert splitter.feed("\n\n42", 0) == ("", "\n\n42")
    splitter = ReasoningSplitter()
    assert splitter.feed("\n", 0) == ("", "")
    assert splitter.feed("42", 0) == ("", "\n42")
    assert splitter.flush() == ("", "")


def test_a_result_is_the_sum_of_its_events() -> None:
    collector = Collector()
    step = StepRecord(index=0, origin="target", text="a")
    events: list[Event] = [
        StepEvent(step),
        TextEvent("a</th", 5),
        TextEvent("ink>b", 4),
        FinishEvent("stop", Usage(num_steps=1)),
    ]
    for event in events:
        collector.add(event)
    result = collector.result()
    assert (result.text, result.reasoning, result.answer) == ("a</think>b", "a", "b")
    assert (result.finish_reason, result.usage.num_steps, result.steps) == ("stop", 1, (step,))
