"""The front end over HTTP, before the client's fake server: answers, streams, failures, limits, and clients that go away."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lr_client import AsyncStream, Event
from openai import APIError, AuthenticationError, BadRequestError, InternalServerError, OpenAI

from lr_backend.errors import ConfigError
from lr_backend.frontend import answering, wire
from lr_backend.frontend.app import Frontend
from lr_backend.frontend.body import LINGER_BYTES_A_S, Lingering, parse_json
from lr_backend.frontend.errors import CODES, ApiError
from lr_backend.frontend.limits import Caller, Gate, Keys, Rate
from lr_backend.frontend.process import FrontendError, FrontendProcess
from lr_backend.frontend.settings import Settings
from lr_backend.notice import post
from lr_backend.testing import run_virtual
from lr_backend.triton.service import CANCEL_POLL_S
from tests.support.fake_lookahead import Fail, FakeServer, Reply
from tests.support.fake_lookahead import Gate as Pause
from tests.support.frontend import CHAT, COMPLETIONS, DEPLOYED, JSON, WAIT_S, Served, frontend
from tests.support.waiting import until

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "reasoning_tokens": 1, "num_steps": 2, "seed": 7}
FINISH = Reply(finish="stop", usage=USAGE)
ANSWER = [Reply(text="<think>a"), Reply(text=" b</thi"), Reply(text="nk>\n\nyes"), FINISH]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FAILURES = [
    ("LR_PROMPT_TOO_LONG: text_input='2000 tokens': This model's maximum ...", "context_length_exceeded", "messages"),
    ("LR_INVALID_REQUEST: verifier='x': this server has exact", "invalid_value", "lookahead.verifier"),
    ("LR_INVALID_REQUEST: max_tokens=9: too many", "invalid_value", "max_completion_tokens"),
    ("LR_ENGINE_REJECTED: too long", "engine_rejected", None),
    ("LR_OVERLOADED: 64 requests are in flight", "overloaded", None),
    ("LR_TARGET_UNAVAILABLE: gone", "unavailable", None),
    ("LR_CANCELLED: the server is shutting down", "unavailable", None),
    ("LR_NOT_FINITE: target: secret insides", "not_finite", None),
    ("LR_INTERNAL: secret insides", "internal", None),
    ("LR_SOMETHING_NEW: secret insides", "internal", None),
    ("no code at all: secret insides", "internal", None),
]


@pytest.fixture
def pause() -> Pause:
    return Pause()


@pytest.fixture
def server(pause: Pause) -> Iterator[Any]:
    scripts: dict[str, list[Any]] = {
        "q": ANSWER,
        "held": [Reply(text="<think>a"), pause, *ANSWER[1:]],
        "late": [pause, *ANSWER],
        "calls": [Reply(text="<think>a</think>\n\n<tool_"), Reply(text=CALL[len("<tool_") :]), FINISH],
        "fails midway": [Reply(text="<think>a"), Fail("LR_TARGET_UNAVAILABLE: secret"), Pause()],
        "crashes midway": [Reply(text="<think>a"), Fail("oops: secret"), Pause()],
        "broken": [Reply(text="a"), Reply(finish="stop", usage={"num_steps": "many"})],
        **{message: [Fail(message), Pause()] for message, _, _ in FAILURES},
    }
    with FakeServer(scripts) as running:
        yield running


@pytest.fixture
def served(server: Any) -> Iterator[Served]:
    with frontend(server.url) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with openai_client(served) as one:
        yield one


def openai_client(served: Served, key: str = "none", max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=key, max_retries=max_retries, timeout=WAIT_S)


def user(question: str) -> Any:
    return [{"role": "user", "content": question}]


# -------------------------------------------------------------------------------------------------------------------- answering


def test_a_chat_is_answered_by_openais_client(server: Any, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=user("q"),
        temperature=0.5,
        max_tokens=9,
        extra_headers={"X-Request-Id": "my-id"},
        extra_body={"lookahead": {"mode": "lossless", "top_k": 3}},
    )
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == ("\n\nyes", {"reasoning_content": "<think>a b"[len("<think>") :]})
    assert (answer.choices[0].finish_reason, answer._request_id, answer.id) == ("stop", "my-id", "chatcmpl-my-id")
    seen = server.request()
    assert seen.request_id == "my-id-0"
    seed = seen.inputs.pop("seed")
    assert seed and seen.inputs == {
        "messages": [json.dumps([{"role": "user", "content": "q"}])],
        "temperature": [0.5],
        "max_tokens": [9],
        "stream": [False],
        "mode": ["lossless"],
        "top_k": [3],
    }


ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


def test_a_tool_is_shown_called_and_answered_by_openais_client(server: Any, client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=user("calls"), tools=[ADD], tool_choice="auto")
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert json.loads(server.request().inputs["tools"][0])[0]["function"]["name"] == "add"

    came_to: Any = {"role": "tool", "tool_call_id": call.id, "content": "q"}
    again = client.chat.completions.create(
        model="demo", messages=[*user("calls"), choice.message.model_dump(), came_to], tools=[ADD]
    )
    assert (again.choices[0].finish_reason, again.choices[0].message.content) == ("stop", "\n\nyes")
    _, made, result = json.loads(server.request(1).inputs["messages"][0])
    assert made["tool_calls"] == [{"id": call.id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert (made["reasoning_content"], result["tool_call_id"]) == ("a", call.id)


def test_a_call_is_streamed_as_openais_client_reads_it_and_sent_back_as_it_has_it(client: OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=user("calls"), tools=[ADD]) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert (call.function.name, call.function.arguments, message.content or None) == ("add", '{"a": 1}', None)
    sent: Any = [*user("calls"), message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "q"}]
    again = client.chat.completions.create(model="demo", messages=sent, tools=[ADD])
    assert again.choices[0].message.content == "\n\nyes"


def test_without_tools_a_call_is_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=user("calls"))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (f"\n\n{CALL}", "stop")


def test_a_stream_brings_text_as_it_is_committed(server: Any, client: OpenAI, pause: Pause) -> None:
    with client.chat.completions.create(model="demo", messages=user("held"), stream=True) as chunks:
        opening, first = next(chunks), next(chunks)
        assert (opening.choices[0].delta.role, opening.choices[0].delta.content) == ("assistant", "")
        assert first.choices[0].delta.model_extra == {"reasoning_content": "a"}
        pause.opened.set()
        rest = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "\n\nyes"
    assert rest[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in rest)
    assert server.request().inputs["stream"] == [True]


def test_a_stream_tells_its_usage_where_it_is_asked_to(served: Served) -> None:
    answer = served.chat("q", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.events[-1] == ("", "[DONE]")
    *chunks, last = answer.chunks
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    assert {chunk["id"] for chunk in answer.chunks} == {f"chatcmpl-{answer.headers['x-request-id']}"}


def test_no_line_of_a_stream_ends_inside_a_text(server: Any, served: Served) -> None:
    """Clients that read lines of text take more characters for the end of one than the standard of events does."""
    said = "a\x85b\u2028c\u2029d"
    server.scripts["breaks"] = [Reply(text=said), FINISH]
    answer = served.chat("breaks", stream=True)
    assert all(line.startswith("data: ") for line in answer.raw.decode().splitlines() if line)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in answer.chunks) == said


@pytest.mark.parametrize("stream", [True, False])
def test_choices_run_side_by_side_with_seeds_of_their_own(server: Any, served: Served, pause: Pause, stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(served.chat, "late", n=3, seed=5, stream=stream)
        seen = [server.request(number) for number in range(3)]  # all of them are there before one is answered
        pause.opened.set()
        answer = asking.result(WAIT_S)
    assert sorted(one.inputs["seed"][0] for one in seen) == [5, 6, 7]
    assert {one.request_id.rpartition("-")[2] for one in seen} == {"0", "1", "2"}
    choices = [one for chunk in answer.chunks for one in chunk["choices"]] if stream else answer.document["choices"]
    assert {one["index"] for one in choices} == {0, 1, 2}
    for index in range(3):
        mine = [one.get("delta", one.get("message")) for one in choices if one["index"] == index]
        assert "".join(one.get("content") or "" for one in mine) == "\n\nyes"
    if not stream:
        assert (answer.document["usage"]["prompt_tokens"], answer.document["usage"]["completion_tokens"]) == (2, 9)


class SecondFirst(FakeServer):  # type: ignore[misc, valid-type]
    """Says nothing of the first choice before the second has come to its end."""

    def __init__(self) -> None:
        super().__init__({})
        self.wait = Pause()

    def _script(self, seen: Any) -> list[Any]:
        return [self.wait, *ANSWER] if seen.request_id.endswith("-0") else ANSWER


def test_openais_client_puts_the_choices_of_a_stream_together_in_whatever_order_they_come() -> None:
    asked: Any = {"model": "demo", "messages": user("q"), "n": 2}
    with ExitStack() as opened:
        server = opened.enter_context(SecondFirst())
        client = opened.enter_context(openai_client(opened.enter_context(frontend(server.url))))
        stream = opened.enter_context(client.chat.completions.stream(**asked))
        for event in stream:
            if event.type == "chunk" and any(one.finish_reason for one in event.chunk.choices):
                server.wait.opened.set()
        answer = stream.get_final_completion()
    assert [(one.index, one.message.role, one.message.content) for one in answer.choices] == [
        (0, "assistant", "\n\nyes"),
        (1, "assistant", "\n\nyes"),
    ]


def test_completions_take_a_prompt_as_it_is(server: Any, client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="q", stop=["x"])
    assert answer.choices[0].text == "<think>a b</think>\n\nyes"
    assert server.request().inputs["raw"] == [True]
    assert "".join(one.choices[0].text for one in client.completions.create(model="demo", prompt="q", stream=True)) == (
        "<think>a b</think>\n\nyes"
    )


def test_the_models_are_told(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").to_dict()["root"] == "demo"


def test_it_is_live_and_ready_as_far_as_that_is_true(server: Any, served: Served) -> None:
    assert served.ask("GET", "/health").status == served.ask("GET", "/ready").status == 200
    server.models.clear()
    not_ready = served.ask("GET", "/ready")
    assert (not_ready.status, not_ready.headers["retry-after"]) == (503, "1")
    server.die()
    assert (served.ask("GET", "/health").status, served.ask("GET", "/ready").status) == (200, 503)
    gone = served.chat("q")
    assert (gone.status, gone.error["code"]) == (503, "unavailable")
    assert "localhost" not in gone.raw.decode()


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models"])
def test_what_can_be_got_can_be_looked_at(served: Served, path: str) -> None:
    """As some gateways and monitors look whether a server lives."""
    got, looked = served.ask("GET", path), served.ask("HEAD", path)
    assert (looked.status, looked.headers["content-type"], looked.raw) == (200, got.headers["content-type"], b"")


# --------------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("message", "code", "param"), FAILURES)
def test_what_the_server_says_has_a_status_before_the_first_event(
    served: Served, message: str, code: str, param: str | None, stream: bool
) -> None:
    answer = served.chat(message, stream=stream, max_completion_tokens=9)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (CODES[code][0], code, param)
    assert ("retry-after" in answer.headers) is (answer.status == 503)
    assert "secret" not in answer.raw.decode()


class FullAtFirst(FakeServer):  # type: ignore[misc, valid-type]
    """Refuses so many calls, and answers those that follow."""

    def __init__(self, num_refused: int) -> None:
        super().__init__({})
        self.num_refused = num_refused

    def _script(self, seen: Any) -> list[Any]:
        full = len(self.requests) <= self.num_refused
        return [Fail("LR_OVERLOADED: 64 requests are in flight"), Pause()] if full else ANSWER


def test_openais_client_asks_a_full_server_again_and_has_its_answer() -> None:
    with FullAtFirst(2) as server, frontend(server.url) as served, openai_client(served, max_retries=2) as client:
        answer = client.chat.completions.create(model="demo", messages=user("q"))
        assert answer.choices[0].message.content == "\n\nyes"
        assert len(server.requests) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_place_that_the_step_loop_has_not_seen_come_free_is_waited_for(stream: bool) -> None:
    """Whose client left it a moment ago; the loop looks for that now and then."""
    assert answering.AGAIN_S > CANCEL_POLL_S
    with FullAtFirst(1) as server, frontend(server.url) as served:
        assert served.chat("q", stream=stream).status == 200
        assert len(server.requests) == 2


def test_an_answer_that_has_begun_is_not_begun_anew(server: Any, served: Served) -> None:
    server.scripts["begun"] = [Reply(text="a"), Fail("LR_OVERLOADED: an engine's queue is full"), Pause()]
    assert json.loads(served.chat("begun", stream=True).events[-1][1])["error"]["code"] == "overloaded"
    assert len(server.requests) == 1


def test_openais_client_does_not_ask_again_for_what_would_fail_again(server: Any, served: Served) -> None:
    with openai_client(served, max_retries=2) as client, pytest.raises(InternalServerError) as raised:
        client.chat.completions.create(model="demo", messages=user("LR_NOT_FINITE: target: secret insides"))
    assert raised.value.code == "not_finite"
    assert len(server.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_does_not_come_in_its_time_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr("lr_backend.frontend.app.GRACE_S", 0.05)
    for request_s in (0.1, 1.0, 5.0):  # a busy machine may not even have connected within the first
        with frontend(server.url, deployed=DEPLOYED.model_copy(update={"request_s": request_s})) as served:
            answer = served.chat("late", stream=stream)
            assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (504, "timeout", "false")
            if server.requests:
                break
    assert server.request().was_cancelled()


@pytest.mark.parametrize(("question", "code"), [("fails midway", "unavailable"), ("crashes midway", "internal")])
def test_a_later_failure_is_the_last_event(served: Served, client: OpenAI, question: str, code: str) -> None:
    answer = served.chat(question, stream=True)
    assert (answer.status, answer.chunks[1]["choices"][0]["delta"]["reasoning_content"]) == (200, "a")
    kind, data = answer.events[-1]
    error = json.loads(data)["error"]
    assert (kind, error["code"], error["request_id"]) == ("error", code, answer.headers["x-request-id"])
    assert "secret" not in data
    with pytest.raises(APIError) as raised:
        list(client.chat.completions.create(model="demo", messages=user(question), stream=True))
    assert raised.value.code == code


def test_openais_client_raises_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=user("q"), temperature=9)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "temperature")
    with pytest.raises(InternalServerError) as full:
        client.chat.completions.create(model="demo", messages=user("LR_OVERLOADED: 64 requests are in flight"))
    assert (full.value.status_code, full.value.code) == (503, "overloaded")


def test_an_unreadable_answer_is_a_fault_of_ours(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    answer = served.chat("broken", {"X-Request-Id": "broken-False"})
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert "internal" in served.chat("broken", {"X-Request-Id": "broken-True"}, stream=True).raw.decode()
    said = capsys.readouterr().out
    assert said.count("request_crashed") == 2 and "broken-False" in said and "broken-True" in said


def test_a_call_that_fails_in_whatever_way_ends_its_request(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(self: AsyncStream) -> Event:
        raise ValueError("oops")

    with monkeypatch.context() as broken:
        broken.setattr(AsyncStream, "__anext__", breaks)
        answer = served.chat("q", n=DEPLOYED.max_in_flight)
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert "oops" in capsys.readouterr().out
    assert served.chat("q", n=DEPLOYED.max_in_flight).status == 200, "its places are free again"


def test_what_would_fail_again_is_not_asked_again(served: Served) -> None:
    """OpenAI's client asks twice more after any error of a server that does not say so."""
    assert served.chat("LR_NOT_FINITE: target").headers["x-should-retry"] == "false"
    assert "x-should-retry" not in served.chat("LR_OVERLOADED: 64 requests are in flight").headers


def test_an_answer_without_a_word_may_be_sent_back(served: Served) -> None:
    for content in ("", None):
        turns = [*user("q"), {"role": "assistant", "content": content}, *user("q")]
        assert served.post(CHAT, {"model": "demo", "messages": turns}).status == 200
    assert served.chat("").status == 400


def test_the_log_tells_requests_and_no_words(served: Served, server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.scripts["Zanzibar"] = [Reply(text="quokka"), FINISH]
    served.chat("Zanzibar", {"X-Request-Id": "told"}, stream=True)
    served.chat("Zanzibar", {"X-Request-Id": "refused"}, colour="Zanzibar", quokka="Zanzibar")
    served.ask("GET", "/Zanzibar")
    said = capsys.readouterr().out
    assert "told" in said and "refused" in said and "unknown_field" in said
    assert "Zanzibar" not in said and "quokka" not in said


# ----------------------------------------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("question", ["late", "held"])
def test_when_the_client_goes_every_call_is_cancelled(
    server: Any, served: Served, pause: Pause, question: str, stream: bool, n: int
) -> None:
    connection = served.connect()
    body = {"model": "demo", "messages": user(question), "stream": stream, "n": n}
    connection.request("POST", CHAT, json.dumps(body), JSON)
    seen = [server.request(number) for number in range(n)]
    if stream and question == "held":
        connection.getresponse().readline()
    assert pause.reached.wait(WAIT_S)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()

    assert all(one.was_cancelled() for one in seen)
    assert served.chat("q").status == 200


@pytest.mark.parametrize(("ahead", "leaves"), [(b"G", True), (b"G" * (2 * wire.MAX_AHEAD_BYTES), False)])
def test_who_has_sent_more_behind_a_request_is_heard_too(server: Any, served: Served, ahead: bytes, leaves: bool) -> None:
    """It is noticed that the client goes; and one that goes on sending is let go."""
    body = json.dumps({"model": "demo", "messages": user("late")}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with served.raw_connection() as connection:
        connection.sendall(head.encode() + body)
        seen = server.request()
        with suppress(ConnectionError):  # it may have been let go before the last byte
            connection.sendall(ahead)
        if leaves:
            connection.close()
        assert seen.was_cancelled()


def test_one_choice_that_fails_ends_the_others(server: Any, served: Served) -> None:
    """The second prompt fails while the first one waits."""
    waited: list[Any] = []
    for _ in range(20):  # on a busy machine the second may have failed before the first was sent
        answer = served.post(COMPLETIONS, {"model": "demo", "prompt": ["late", "LR_OVERLOADED: 64 requests are in flight"]})
        assert answer.status == 503
        if waited := [one for one in server.requests if one.inputs["text_input"] == ["late"]]:
            break
    assert waited and all(one.was_cancelled() for one in waited)


# ------------------------------------------------------------------------------------------------------------------------ limits

SMALL = Settings(max_body_bytes=2000)


@pytest.fixture
def strict(server: Any) -> Iterator[Served]:
    with frontend(server.url, SMALL) as running:
        yield running


def padded(num_bytes: int) -> bytes:
    body = json.dumps({"model": "demo", "messages": user("q")}).encode()
    return body + b" " * (num_bytes - len(body))


def test_a_body_may_have_so_many_bytes_and_no_more(strict: Served, server: Any) -> None:
    assert strict.ask("POST", CHAT, padded(2000)).status == 200
    answer = strict.ask("POST", CHAT, padded(2001))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("sent", [2001, 20_000_000])
def test_a_client_that_goes_on_sending_is_told_too(strict: Served, sent: int, chunked: bool) -> None:
    connection = strict.connect()
    body = padded(sent)
    parts = (body[start : start + 100_000] for start in range(0, sent, 100_000))
    connection.request("POST", CHAT, parts if chunked else body, JSON, encode_chunked=chunked)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (413, "body_too_large")
    connection.close()
    assert strict.chat("q").status == 200


@pytest.mark.parametrize(("num_bytes", "lingers"), [(2001, False), (20_000_000, True)])
def test_a_long_body_behind_any_refusal_is_read_no_faster(
    server: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int, lingers: bool
) -> None:
    """It needs no valid key to send one, and a server that is full must not be kept busy so."""
    read: list[int] = []
    pause = Lingering._pause

    async def counted(num_bytes: int) -> None:
        read.append(num_bytes)
        await pause(num_bytes)

    monkeypatch.setattr(Lingering, "_pause", staticmethod(counted))
    with frontend(server.url, keys=KEYS) as served:
        connection = served.connect()
        connection.request("POST", CHAT, padded(num_bytes), JSON)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (401, "invalid_api_key")
        assert (response.headers["connection"] == "close") == lingers
        connection.close()
        assert served.chat("q", {"Authorization": f"Bearer {KEYS[0]}"}).status == 200
    assert bool(read) == lingers


def test_of_many_names_the_one_that_is_said_twice_is_found_at_once() -> None:
    """Looking each of them up in all others would stop every answer for minutes."""
    names = [f'"{number}":0' for number in range(150_000)]
    with pytest.raises(ApiError) as refused:
        parse_json(("{" + ",".join([*names, names[-1]]) + "}").encode())
    assert refused.value.param == "149999"


def test_who_stops_sending_is_not_waited_for(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.body.LINGER_S", 0.1)
    with socket.create_connection(("127.0.0.1", strict.port), WAIT_S) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 3000\r\n\r\n".encode())
        heard = b"".join(iter(partial(raw.recv, 1 << 16), b""))  # until the server closes
    assert heard.startswith(b"HTTP/1.1 413 ")


def test_what_was_refused_is_thrown_away_at_one_pace_however_many_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lingering, "_free_s", 0.0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((asyncio.get_running_loop().time(), message.get("more_body")))

    async def refuse() -> None:
        parts = iter([True] * 128)  # 32 MiB

        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(1 << 18), "more_body": next(parts, False)}

        await Lingering(b"no", 413)({}, receive, send)

    async def three() -> None:
        await asyncio.gather(*(refuse() for _ in range(3)))

    run_virtual(three())
    assert [at_s for at_s, more in sent if more] == [0.0] * 3  # the answer does not wait
    assert max(at_s for at_s, _ in sent) == pytest.approx(3 * (32 << 20) / LINGER_BYTES_A_S)


@pytest.mark.parametrize("declared", ["3000", "99999999999999999999"])
def test_a_declared_length_is_enough_to_be_refused(strict: Served, declared: str) -> None:
    assert first_line(strict, f"Content-Length: {declared}", b"") == 413


@pytest.mark.parametrize("declared", ["-1", "1e3", "two", "1, 2"])
def test_a_length_that_is_none_is_refused(strict: Served, declared: str) -> None:
    assert first_line(strict, f"Content-Length: {declared}", b"{}") == 400


def test_a_body_that_does_not_come_is_not_waited_for(server: Any) -> None:
    with frontend(server.url, Settings(max_body_s=0.2)) as hasty:
        assert first_line(hasty, "Content-Length: 900", b'{"model"') == 408


def test_bodies_on_their_way_hold_no_place_and_no_more_than_their_room(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.body.SMALL_BYTES", 512)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode()
    with frontend(server.url, Settings(max_in_flight=2, max_body_bytes=1024)) as served, ExitStack() as slow:
        for _ in range(4):
            slow.enter_context(served.raw_connection()).sendall(head + b" " * 999)
        until(lambda: served.frontend._room.num_bytes == 2 * 1024 - 4 * (999 - 512))
        assert first_line(served, "Content-Length: 1000", b" " * 999) == 503
        assert served.chat("q", n=2).status == 200, "they are not answers, and leave small ones their way"
        slow.close()
        until(lambda: served.frontend._room.num_bytes == 2 * 1024)


def test_a_body_that_comes_while_the_server_drains_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.body.SMALL_BYTES", 0)
    with frontend(server.url) as served, served.raw_connection() as slow, slow.makefile("rb") as answer:
        body = json.dumps({"model": "demo", "messages": user("q")}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        room = served.frontend._room.num_bytes
        slow.sendall(head.encode() + body[:-1])
        until(lambda: served.frontend._room.num_bytes < room)
        served.frontend.draining = True
        slow.sendall(body[-1:])
        assert answer.readline().split()[1] == b"503" and not server.requests


def first_line(served: Served, header: str, body: bytes) -> int:
    """The status of a request written by hand."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{header}\r\n\r\n"
    with served.raw_connection() as connection:
        connection.sendall(head.encode() + body)
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def test_so_many_answers_at_a_time(server: Any, pause: Pause) -> None:
    with frontend(server.url, Settings(max_in_flight=2)) as served:
        never = served.chat("q", n=3)
        assert (never.status, never.error["code"], never.error["param"]) == (400, "over_limit", "n"), "it is not worth a retry"
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(served.chat, "late", n=2)
            assert server.request(1)
            full = served.chat("q")
            assert (full.status, full.error["code"], full.headers["retry-after"]) == (503, "overloaded", "1")
            assert served.ask("GET", "/health").status == 200
            pause.opened.set()
            assert held.result(WAIT_S).status == 200
        assert served.chat("q", n=2, stream=True).status == 200
        assert served.chat("q", n=2, colour=1).status == 400
        assert served.chat("q", n=2).status == 200, "places are given back, whatever became of the request"


def test_ready_is_who_can_answer(server: Any) -> None:
    """Triton itself is not ready while any model is loaded anew; without the draft the target answers alone."""
    server.ready, server.models = False, {"lookahead", "target"}
    with frontend(server.url, deployed=DEPLOYED.model_copy(update={"needs": ("lookahead", "target")})) as served:
        assert served.ask("GET", "/ready").status == 200
        server.models.remove("target")
        assert served.ask("GET", "/ready").status == 503


def test_who_looks_whether_it_is_ready_is_told_of_a_target_that_is_loaded_anew(server: Any, tmp_path: Path) -> None:
    """A health check that ends the server for it would throw the load away."""
    notice, needs = tmp_path / "notice", DEPLOYED.model_copy(update={"needs": ("lookahead", "target")})
    server.models = {"lookahead"}
    with frontend(server.url, deployed=needs, notice_file=notice) as served:
        assert "x-lookahead-waits-for" not in served.ask("GET", "/ready").headers
        post(notice, ["target"])
        answer = served.ask("GET", "/ready")
        assert (answer.status, answer.headers["x-lookahead-waits-for"]) == (503, "target")


def test_a_target_that_lives_elsewhere_has_to_be_ready_too(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its servers is enough."""
    monkeypatch.setattr("lr_backend.frontend.app.TARGET_READY_S", 20.0)
    server.models = {"lookahead", "target"}
    with frontend(server.url, targets=("127.0.0.1:1", server.url)) as served:
        assert served.ask("GET", "/ready").status == 200
        server.models.remove("target")
        assert served.ask("GET", "/ready").status == 503
    with frontend(server.url, targets=("127.0.0.1:1",)) as served:
        assert served.ask("GET", "/ready").status == 503


def test_a_target_that_is_ready_is_enough_while_another_is_silent(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.app.TARGET_READY_S", 20.0)
    server.models = {"lookahead", "target"}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, and says nothing
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with frontend(server.url, targets=(url, server.url)) as served:
            assert served.ask("GET", "/ready").status == 200


def test_who_waits_for_another_server_says_so(server: Any) -> None:
    with frontend(server.url, targets=("127.0.0.1:1",)) as served:
        assert served.ask("GET", "/ready").headers["x-lookahead-waits-for"] == "target"


def test_a_process_that_dies_before_it_listens_is_told_of() -> None:
    with FrontendProcess(Settings()) as process:
        process.start()
        assert process._process is not None
        process._process.kill()
        process._process.wait()
        with pytest.raises(FrontendError, match="ended with status -9"):
            process.open(DEPLOYED, "127.0.0.1:1", "127.0.0.1:1", drain_s=1.0, timeout_s=WAIT_S)


def test_a_process_that_is_to_end_before_it_has_listened_ends_at_once() -> None:
    with FrontendProcess(Settings()) as process:
        process.start()
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_a_process_takes_as_many_connections_as_the_system_lets_it(server: Any) -> None:
    before = _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    try:
        with FrontendProcess(Settings()) as process:
            process.start()
            process.open(DEPLOYED, server.url, server.url, drain_s=WAIT_S, timeout_s=60.0)
            assert process._process is not None
            assert resource.prlimit(process._process.pid, resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_is_to_end_says_so_to_the_end_and_finishes_what_it_has(server: Any, pause: Pause) -> None:
    with FrontendProcess(Settings()) as process, ThreadPoolExecutor(1) as pool:
        process.start()
        with pytest.raises(ConnectionRefusedError):  # nobody is answered before the models have been
            socket.create_connection(("127.0.0.1", process.port), timeout=WAIT_S)
        process.open(DEPLOYED, server.url, server.url, drain_s=WAIT_S, timeout_s=60.0)
        served = Served(process.port, None)  # type: ignore[arg-type]
        idle = served.connect()
        assert probed(idle) == 200
        held = pool.submit(served.chat, "held", stream=True)
        assert server.request(0)
        process.terminate()
        until(lambda: probed(idle) != 200)
        late = served.chat("q")
        assert (late.status, late.error["code"], late.headers["retry-after"]) == (503, "draining", "5")
        assert late.headers["connection"] == "close"  # the next try may reach another server
        assert served.ask("GET", "/ready").status == 503
        other = served.connect()
        other.request("GET", "/health")
        response = other.getresponse()
        assert response.read() and response.status == 200
        assert process.wait(0.0) is None
        assert idle.sock is None and other.sock is not None
        pause.opened.set()
        # The other connection is idle and open still, and holds nothing up.
        assert process.wait(WAIT_S) == 0
        assert held.result(WAIT_S).events[-1] == ("", "[DONE]")
        other.close()


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 503)])
def test_an_answer_that_the_end_of_the_server_cuts_off_has_its_line_in_the_log(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bool, status: int
) -> None:
    monkeypatch.setattr(wire, "CLOSING_S", 0)
    with frontend(server.url) as served:
        connection = served.connect()
        asked = {"model": "demo", "messages": user("held"), "stream": stream}
        connection.request("POST", CHAT, json.dumps(asked), JSON)
        if stream:
            connection.getresponse()
        assert server.request(0)
    connection.close()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "http_request" in line)
    assert f"status={status}" in line and "code=unavailable" in line


def probed(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/ready")
    response = connection.getresponse()
    response.read()
    return response.status


def ends_of(server: Any, pause: Pause, num_asked: int, limit: int) -> Counter[int]:
    """The statuses of so many requests, of which none ends before each has been taken or refused."""
    with frontend(server.url, Settings(max_in_flight=limit)) as served, ThreadPoolExecutor(num_asked) as pool:
        asked = [pool.submit(served.chat, "late") for _ in range(num_asked)]
        until(lambda: len(server.requests) + sum(one.done() for one in asked) >= num_asked)
        pause.opened.set()
        answers = [one.result(WAIT_S) for one in asked]
    assert all(one.headers["retry-after"] == "1" for one in answers if one.status == 503)
    return Counter(one.status for one in answers)


SPLIT = Counter({200: 3, 503: 5})


def test_three_places_and_eight_requests_are_three_answers_and_five_refusals(server: Any, pause: Pause) -> None:
    assert ends_of(server, pause, 8, 3) == SPLIT


def test_a_door_that_counts_no_places_is_found(server: Any, pause: Pause, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""
    monkeypatch.setattr(Gate, "places", lambda self, *wanted: nullcontext())
    assert ends_of(server, pause, 8, 3) != SPLIT


KEYS = ("a-key-of-16-chars", "another-key-of-mine")


def test_keys_open_all_but_the_probes(server: Any) -> None:
    with frontend(server.url, keys=KEYS) as served:
        assert served.ask("GET", "/health").status == served.ask("GET", "/ready").status == 200
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}):
            for answer in (served.chat("q", given), served.ask("GET", "/v1/models", None, given)):
                assert (answer.status, answer.error["code"], answer.headers["www-authenticate"]) == (
                    401,
                    "invalid_api_key",
                    "Bearer",
                )
        assert [served.chat("q", {"Authorization": f"Bearer {key}"}).status for key in KEYS] == [200, 200]
        with openai_client(served, KEYS[1]) as good, openai_client(served, "wrong") as bad:
            assert [model.id for model in good.models.list()] == ["demo"]
            with pytest.raises(AuthenticationError):
                bad.models.list()


def test_so_many_requests_a_minute_of_each_key(server: Any) -> None:
    with frontend(server.url, Settings(max_requests_a_minute=2), keys=KEYS) as served:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in KEYS)
        assert [served.chat("q", mine).status, served.chat("q", mine, colour=1).status] == [200, 400]
        answer = served.chat("q", mine)
        assert (answer.status, answer.error["code"]) == (429, "rate_limited")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert served.chat("q", other).status == 200


def test_a_refusal_for_want_of_places_takes_nothing_of_the_minute(server: Any, pause: Pause) -> None:
    settings = Settings(max_requests_a_minute=2, max_in_flight=1)
    with frontend(server.url, settings) as served, ThreadPoolExecutor(1) as pool:
        held = pool.submit(served.chat, "late")
        assert server.request(0)
        assert [served.chat("q").error["code"] for _ in range(3)] == ["overloaded"] * 3
        pause.opened.set()
        assert held.result(WAIT_S).status == 200
        assert [served.chat("q").status for _ in range(2)] == [200, 429]


def test_what_is_given_back_is_the_request_that_was_counted_then() -> None:
    now = [0.0]
    rate = Rate(2, lambda: now[0])
    first_s = rate.count(0)
    now[0] = 30.0
    rate.count(0)
    rate.give_back(0, first_s)
    rate.count(0)
    rate.give_back(0, first_s)
    with pytest.raises(ApiError) as refused:
        rate.count(0)
    assert refused.value.headers == {"retry-after": "60"}
    Rate(None, lambda: 0.0).give_back(0, 0.0)


def test_a_minute_slides() -> None:
    now = [0.0]
    rate = Rate(2, lambda: now[0])
    for at in (0.0, 30.0, 60.0, 90.0):
        now[0] = at
        rate.count(0)
    with pytest.raises(ApiError) as refused:
        rate.count(0)
    assert refused.value.headers == {"retry-after": "30"}
    Rate(None, lambda: 0.0).count(0)


def test_places_are_counted() -> None:
    gate = Gate(2)
    with gate.places(1), gate.places(1), gate.places(0), pytest.raises(ApiError), gate.places(1):
        pass
    assert gate.num_in_flight == 0


class Crowd:
    """Callers that hold places of a gate, on a clock of the test's."""

    def __init__(self, limit: int, num_kept: int = 0) -> None:
        self.now_s = 0.0
        self.gate = Gate(limit, num_kept, lambda: self.now_s)
        self._held: dict[Caller, list[ExitStack]] = {}

    def ask(self, caller: Caller, times: int = 1) -> int:
        """How many of so many requests are let in."""
        num = 0
        for _ in range(times):
            with suppress(ApiError), ExitStack() as place:
                place.enter_context(self.gate.places(1, caller))
                self._held.setdefault(caller, []).append(place.pop_all())
                num += 1
        return num

    def end(self, caller: Caller, times: int = 1) -> None:
        for _ in range(times):
            self._held[caller].pop().close()


def test_one_key_alone_may_have_all_places_and_gives_them_up_to_others() -> None:
    crowd, first, second, third = Crowd(12), *map(Caller, range(3))
    assert crowd.ask(first, 20) == 12
    assert crowd.ask(second, 5) == 0, "no answer is cut off for another"
    for _ in range(6):
        crowd.end(first)
        assert (crowd.ask(first), crowd.ask(second)) == (0, 1), "what comes free is for who has less than a share"
    crowd.end(first)
    assert (crowd.ask(second), crowd.ask(first)) == (0, 1)
    assert crowd.ask(third) == 0
    crowd.end(first, 2), crowd.end(second, 2)
    assert (crowd.ask(first, 9), crowd.ask(second, 9), crowd.ask(third, 9)) == (0, 0, 4)
    crowd.end(second, 4), crowd.end(third, 4)
    crowd.now_s = 60.0
    assert crowd.ask(first, 20) == 8, "nobody else asks any more"


def test_a_place_that_comes_free_is_left_to_who_was_refused_before() -> None:
    """Of eight places four keys have two each, which is no more than a share of five; the fifth asks again once a second."""
    crowd, *keys = Crowd(8), *map(Caller, range(5))
    *others, last = keys
    assert [crowd.ask(each, 2) for each in others] == [2] * 4
    num_answered = Counter[Caller]()
    for second in range(1, 40):
        crowd.now_s = float(second)
        num_answered[last] += crowd.ask(last)
        busy = others[second % 4]
        crowd.end(busy)
        crowd.now_s += 0.1
        num_answered[busy] += crowd.ask(busy)  # it reads the end of its answer, and asks on
        if second % 4 == 0 and num_answered[last]:
            with suppress(IndexError):
                crowd.end(last)
    assert num_answered[last] >= 5
    crowd.now_s += 60.0
    crowd.end(others[0])
    assert crowd.ask(others[0]) == 1, "who asks no more waits for nothing"


def test_places_that_are_kept_are_no_part_of_what_the_others_share() -> None:
    """Of four common places two keys have two each, however many are kept besides."""
    crowd, one, other = Crowd(8, num_kept=4), Caller(0), Caller(1)
    assert crowd.ask(one, 9) == 4
    assert crowd.ask(other) == 0
    crowd.end(one)
    assert (crowd.ask(one), crowd.ask(other)) == (0, 1), "it holds three, and another asks"
    with crowd.gate.places(0, one):
        pass  # a request that holds its place wants no more


def test_places_that_are_kept_go_to_keys_of_priority_alone() -> None:
    crowd, common, urgent = Crowd(8, num_kept=3), Caller(0), Caller(1, has_priority=True)
    assert crowd.ask(common, 20) == 5
    assert crowd.ask(urgent, 20) == 3
    crowd.end(common)
    assert (crowd.ask(common), crowd.ask(urgent)) == (0, 1), "four of eight are the share of either"


def test_many_others_take_nothing_of_the_places_that_are_kept() -> None:
    crowd, urgent = Crowd(8, num_kept=4), Caller(99, has_priority=True)
    for second in range(3):
        crowd.now_s = float(second)
        assert sum(crowd.ask(Caller(number)) for number in range(second * 4, 12)) == (0 if second else 4)
    crowd.now_s += 0.5
    assert crowd.ask(urgent, 9) == 4


def test_a_request_of_several_choices_waits_its_turn_too() -> None:
    """It takes its first place before it is known how many it wants."""
    crowd, one, several = Crowd(4), Caller(0), Caller(1)
    assert crowd.ask(one, 4) == 4
    for second in range(1, 4):
        crowd.now_s = float(second)
        crowd.end(one)
        with crowd.gate.places(1, several, are_all=False), suppress(ApiError), crowd.gate.places(1, several):
            break
        crowd.now_s += 0.1
        crowd.ask(one)
    else:
        raise AssertionError
    assert second <= 3


def lets_in(gate: Gate, caller: Caller, num_choices: int) -> bool:
    """Whether a request of so many choices is answered; its places are free again then."""
    with suppress(ApiError), gate.places(1, caller, are_all=False), gate.places(num_choices - 1, caller, own=1):
        return True
    return False


def test_a_request_of_more_choices_than_a_share_is_let_in_where_they_are_free() -> None:
    """Another key asks now and then, so the share is four of eight."""
    crowd, several, other = Crowd(8), Caller(0), Caller(1)
    assert crowd.ask(other) == 1 and not lets_in(crowd.gate, several, 8), "only seven are free"
    crowd.end(other)
    with crowd.gate.places(1, several, are_all=False), crowd.gate.places(7, several, own=1):
        assert crowd.ask(other, 2) == 0
    crowd.now_s = 1.0
    assert not lets_in(crowd.gate, several, 8), "the other one was refused before"
    assert crowd.ask(other) == 1
    crowd.end(other)
    assert lets_in(crowd.gate, several, 8)
    assert crowd.ask(several) == 1 and not lets_in(crowd.gate, several, 5), "it holds another place"


def test_a_request_of_many_choices_has_none_of_the_places_that_are_kept() -> None:
    crowd, several, other = Crowd(8, num_kept=2), Caller(0), Caller(1)
    assert crowd.ask(other) == 1
    crowd.end(other)
    assert [lets_in(crowd.gate, several, number) for number in (7, 6)] == [False, True]


def test_no_place_stands_empty_for_long_because_many_were_refused() -> None:
    """None of them comes back."""
    crowd = Crowd(8)
    assert sum(crowd.ask(Caller(number)) for number in range(40)) == 8
    for number in range(8):
        crowd.end(Caller(number))
    crowd.now_s = 0.5
    assert sum(crowd.ask(Caller(100 + number)) for number in range(8)) == 8


def test_a_key_in_excess_of_its_share_is_told(server: Any, pause: Pause) -> None:
    mine, other = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    with frontend(server.url, Settings(max_in_flight=4), keys=KEYS) as served, ThreadPoolExecutor(3) as pool:
        held = [pool.submit(served.chat, "late", mine) for _ in range(3)]
        assert server.request(2)
        assert served.chat("q", other).status == 200
        refused = served.chat("q", mine)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "1")
        assert "share of 2" in refused.error["message"]
        assert served.chat("q", other).status == 200
        pause.opened.set()
        assert [one.result(WAIT_S).status for one in held] == [200] * 3


def test_places_cannot_all_be_kept(server: Any) -> None:
    with pytest.raises(ConfigError, match="kept_for_priority"):
        Frontend(Settings(kept_for_priority=6), DEPLOYED, None, Keys(()))  # type: ignore[arg-type]


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{KEYS[0]}\n\n  {KEYS[1]}  \n", encoding="utf-8")
    keys = Keys.read(file)
    assert [keys.caller_of(f"Bearer {key}") for key in KEYS] == [Caller(1), Caller(2)]
    assert Keys.read(None).caller_of("") == Caller()
    file.write_text(f"{KEYS[0]}\n{KEYS[1]}  priority\n", encoding="utf-8")
    assert [Keys.read(file).caller_of(f"Bearer {key}") for key in KEYS] == [Caller(1), Caller(2, has_priority=True)]
    for bad in (
        "",
        "# none\n",
        "short\n",
        "x" * 257,
        "a key with blanks in it\n",
        f"{KEYS[0]} important\n",
        "ключ-из-русских-букв\n",
    ):
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(ConfigError, match="key") as refused:
            Keys.read(file)
        assert not bad or "short" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read(tmp_path / "missing")


def test_a_process_looks_at_its_keys_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: the API keys cannot be read"):
        FrontendProcess(Settings(keys_file=tmp_path / "missing"))


# ---------------------------------------------------------------------------------------------------------------------- settings


def test_beyond_this_machine_it_wants_keys_or_to_be_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="keys_file"):
            Settings.load(None, host=host)
        assert Settings.load(None, host=host, keys_file=keys).keys_file == keys
    file = tmp_path / "openai.toml"
    file.write_text("open_to_network = true\nmax_requests_a_minute = 60\n", encoding="utf-8")
    assert Settings.load(file, host="0.0.0.0", keys_file=None).max_requests_a_minute == 60
    assert Settings.load(None, host="localhost").host == "localhost"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_body_byte = 1", "max_body_byte"),
        ("max_in_flight = 0", "max_in_flight"),
        ("port = 1", "said by an option"),
        ("max_body_s = ", "openai.toml"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "openai.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        Settings.load(file, host="127.0.0.1", port=0, keys_file=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        Settings.load(tmp_path / "missing")


def test_the_deployments_limits_are_what_it_admits() -> None:
    assert DEPLOYED.max_in_flight == 6
    assert http.client.responses[CODES["body_too_large"][0]]
