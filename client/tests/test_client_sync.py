import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_server import WAIT_S, FakeServer, Gate, Reply

from lr_client import (
    Cancelled,
    Client,
    ClientError,
    FinishEvent,
    InvalidRequest,
    Message,
    Options,
    Overloaded,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    StepEvent,
    TargetUnavailable,
    TextEvent,
)

NOBODY = "localhost:1"


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, timeout_s=WAIT_S) as opened:
        yield opened


def test_ask_gives_text_parts_numbers_and_steps(client: Client) -> None:
    result = client.ask("steps", Options(trace=True))
    assert result.text == "one. two. three. </think>\n\n42"
    assert (result.reasoning, result.answer) == ("one. two. three.", "42")
    assert (result.finish_reason, result.usage.num_wasted_tokens) == ("stop", 12)
    assert result.usage.tokens_per_s == 20.0
    assert [step.origin for step in result.steps] == ["draft", "correction", "target"]
    assert result.trace is None
    assert client.ask("traced", Options(trace=True)).trace == '{"schema": "é"}'


def test_events_come_in_order_and_empty_responses_make_none(client: Client) -> None:
    *texts, finish = client.stream("plain")
    assert texts == [TextEvent("a"), TextEvent("b")]
    assert isinstance(finish, FinishEvent)
    kinds = [type(event) for event in client.stream("steps")]
    assert kinds == [StepEvent, TextEvent] * 3 + [TextEvent, FinishEvent]


def test_events_come_as_they_are_committed(client: Client, server: FakeServer, gate: Gate) -> None:
    with client.stream("held") as events:
        assert next(events) == TextEvent("a")  # the server holds the rest back until now
        gate.opened.set()
        assert next(events) == TextEvent("b")
        assert isinstance(next(events), FinishEvent)
        assert next(events, None) is None
    assert not server.request().was_cancelled()


def test_the_server_sees_question_options_model_id_and_metadata(server: FakeServer) -> None:
    question = [Message(role="system", content="be brief"), Message(role="user", content="plain")]
    with Client(server.url, metadata={"Authorization": "Bearer x"}) as client:
        stream = client.stream(question, Options(max_depth=2, stop=["x", "y"], seed=2**64 - 1))
        assert len(list(stream)) == 3
    seen = server.request()
    assert seen.inputs["max_depth"] == [2]
    assert seen.inputs["stop"] == ["x", "y"]
    assert seen.inputs["seed"] == [2**64 - 1]
    assert set(seen.inputs) == {"messages", "max_depth", "stop", "seed"}
    assert (seen.model, seen.request_id) == ("lookahead", stream.request_id)
    assert seen.metadata["authorization"] == "Bearer x"


def test_only_a_stream_is_written_step_by_step(client: Client, server: FakeServer) -> None:
    """Where nobody reads along, a call for each step would be for nothing."""
    client.ask("plain")
    client.ask("plain", Options(stream=True, seed=7))
    list(client.stream("plain"))
    assert [seen.inputs.get("stream") for seen in server.requests] == [[False], [True], None]
    assert server.request(1).inputs["seed"] == [7]


def test_an_answer_in_one_piece_makes_the_same_result(client: Client, server: FakeServer) -> None:
    streamed = client.ask("steps", Options(trace=True, stream=True))
    *steps, last, finish = server.scripts["steps"]
    records = [each.step for each in steps]
    text = "".join(each.text or "" for each in (*steps, last))
    server.scripts["steps"] = [replace(finish, text=text, step=records)]
    assert client.ask("steps", Options(trace=True)) == streamed


def test_headers_of_one_request_go_beside_the_clients_own(server: FakeServer) -> None:
    with Client(server.url, metadata={"Authorization": "Bearer x"}) as client:
        client.ask("plain", metadata={"Traceparent": "00-1-2-01"})
        client.ask("plain")
    first, second = (seen.metadata for seen in server.requests)
    assert (first["traceparent"], first["authorization"]) == ("00-1-2-01", "Bearer x")
    assert "traceparent" not in second


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("overloaded", Overloaded),
        ("invalid", InvalidRequest),
        ("aborts", ServerError),
        ("cut short", ServerError),
        ("garbage", ServerError),
    ],
)
def test_what_goes_wrong_on_the_server_has_its_type(
    client: Client, question: str, kind: type[ClientError]
) -> None:
    with pytest.raises(kind) as caught:
        client.ask(question)
    assert type(caught.value) is kind


def test_an_error_midway_comes_after_the_text_and_ends_the_call(client: Client, server: FakeServer) -> None:
    stream = client.stream("fails midway")
    assert next(stream) == TextEvent("a")
    with pytest.raises(TargetUnavailable, match="gone"):
        next(stream)
    assert next(stream, None) is None
    assert server.request().was_cancelled()  # the script would wait forever


def test_a_complete_answer_counts_though_the_call_ends_badly(client: Client) -> None:
    assert client.ask("aborts after the finish").text == "a"


def test_cancel_reaches_the_server_and_the_iteration(client: Client, server: FakeServer) -> None:
    stream = client.stream("held")
    assert next(stream) == TextEvent("a")
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert next(stream, None) is None
    assert server.request().was_cancelled()


def test_nothing_comes_after_the_cancellation(client: Client, server: FakeServer) -> None:
    server.scripts["two at once"] = [
        Reply(text="a", step={"index": 0, "origin": "draft", "text": "a"}),
        Gate(),
    ]
    stream = client.stream("two at once")
    assert isinstance(next(stream), StepEvent)  # the text of the same response waits
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert list(stream) == []


def test_cancel_from_another_thread_wakes_the_one_that_waits(
    client: Client, server: FakeServer, gate: Gate
) -> None:
    stream = client.stream("held")

    def cancel_when_held() -> None:
        assert gate.reached.wait(WAIT_S)
        stream.cancel()

    with ThreadPoolExecutor() as pool, pytest.raises(Cancelled):
        pool.submit(cancel_when_held)
        list(stream)
    assert server.request().was_cancelled()


def test_leaving_the_with_block_cancels(client: Client, server: FakeServer) -> None:
    with client.stream("held") as events:
        for _ in events:
            break
    assert server.request().was_cancelled()


def test_breaking_out_of_an_unnamed_stream_cancels(client: Client, server: FakeServer) -> None:
    for _ in client.stream("held"):
        break
    gc.collect()
    assert server.request().was_cancelled()


def test_an_exception_in_the_loop_cancels(client: Client, server: FakeServer) -> None:
    with pytest.raises(ZeroDivisionError), client.stream("held") as events:
        for _ in events:
            raise ZeroDivisionError
    assert server.request().was_cancelled()


def test_closing_the_client_cancels_open_streams(server: FakeServer) -> None:
    client = Client(server.url)
    stream = client.stream("held")
    assert next(stream) == TextEvent("a")
    client.close()
    client.close()
    with pytest.raises(Cancelled):
        next(stream)
    assert server.request().was_cancelled()
    for use in (lambda: client.ask("plain"), client.is_ready):
        with pytest.raises(ClientError, match="closed"):
            use()


def test_cancel_after_the_end_is_harmless(client: Client, server: FakeServer) -> None:
    stream = client.stream("plain")
    assert len(list(stream)) == 3
    stream.cancel()
    assert next(stream, None) is None
    assert not server.request().was_cancelled()


def test_cancel_at_the_end_takes_nothing_away(client: Client, server: FakeServer) -> None:
    """The last event is here before the call is over."""
    stream = client.stream("plain")
    events = []
    for event in stream:
        events.append(event)
        if isinstance(event, FinishEvent):
            stream.cancel()
    assert len(events) == 3
    assert not server.request().was_cancelled()


def test_no_end_in_time_is_a_timeout_and_stops_the_server(client: Client, server: FakeServer) -> None:
    for limit_s in (0.2, 1.0, 5.0, 20.0):  # a busy machine may not even have connected by the first
        with pytest.raises(RequestTimeout, match=rf"{limit_s:g} s") as caught:
            client.ask("held", timeout_s=limit_s)
        assert isinstance(caught.value, TimeoutError)
        if server.requests:
            break
    assert server.request().was_cancelled()


def test_nobody_there_is_a_connection_error() -> None:
    with Client(NOBODY, timeout_s=WAIT_S) as client:
        with pytest.raises(ServerUnreachable, match=NOBODY) as caught:
            client.ask("plain")
        assert isinstance(caught.value, ConnectionError)


def test_a_server_gone_midway_is_a_connection_error(client: Client, server: FakeServer) -> None:
    stream = client.stream("held")
    assert next(stream) == TextEvent("a")
    server.die()
    with pytest.raises(ServerUnreachable):
        next(stream)


def test_streams_of_one_client_run_at_a_time_and_do_not_mix(server: FakeServer) -> None:
    names = [f"stream {index}" for index in range(8)]
    # Every script waits in its middle for all of them to be there.
    together = threading.Barrier(len(names))
    gates = {name: Gate() for name in names}
    for name in names:
        server.scripts[name] = [Reply(text=f"{name} a "), gates[name], Reply(text="b"), Reply(finish="stop")]

    def ask(client: Client, name: str) -> str:
        with client.stream(name) as events:
            first = next(events)
            together.wait(WAIT_S)
            gates[name].opened.set()
            return "".join(event.text for event in [first, *events] if isinstance(event, TextEvent))

    with Client(server.url) as client, ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: ask(client, name), names)) == [f"{name} a b" for name in names]


def test_ready_says_whether_server_and_model_are(server: FakeServer) -> None:
    with Client(server.url) as client, Client(server.url, model="other") as other, Client(NOBODY) as nobody:
        assert client.is_ready()
        assert not other.is_ready()
        assert not nobody.is_ready()
        server.ready = False
        assert not client.is_ready()
        assert client.is_ready(models=["lookahead"])
        assert not client.is_ready(models=["lookahead", "target"])


def test_a_request_that_cannot_be_sent_never_is(client: Client, server: FakeServer) -> None:
    with pytest.raises(InvalidRequest):
        client.ask("plain", Options(seed=-1))
    with pytest.raises(InvalidRequest):
        client.ask("plain", timeout_s=0)
    assert server.requests == []


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy"])
def test_a_server_on_this_machine_is_not_reached_through_a_proxy(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """One that is there for the web, and knows no way back."""
    for name in ("grpc_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with Client(server.url, timeout_s=10.0) as client:
        assert client.ask("plain").text == "ab"


def test_a_new_client_reaches_a_server_that_an_older_one_still_waits_for(server: FakeServer) -> None:
    with Client(server.url) as old:
        assert old.ask("plain").text == "ab"
        server.die_seen_by(old._channel)
        for _ in range(3):  # by now gRPC waits before it connects again
            with pytest.raises(ServerUnreachable):
                old.ask("plain")
        with FakeServer(server.scripts, server.port) as back, Client(back.url) as new:
            assert new.ask("plain").text == "ab"


@pytest.mark.parametrize("use", [lambda client: client.stream("steps"), lambda client: client.is_ready()])
def test_a_client_that_another_thread_closes_says_so(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, use: Callable[[Client], object]
) -> None:
    client = Client(server.url)
    check = client._streams.check_open

    def closed_just_after() -> None:
        check()
        client.close()

    monkeypatch.setattr(client._streams, "check_open", closed_just_after)

    with pytest.raises(ClientError, match="the client is closed"):
        use(client)
