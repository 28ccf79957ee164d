import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_server import WAIT_S, FakeServer, Gate, Reply

from lr_client import (
    AsyncClient,
    Cancelled,
    ClientError,
    FinishEvent,
    InvalidRequest,
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


def run(server: FakeServer, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Run a scenario with a client, in a loop of its own."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), AsyncClient(server.url, timeout_s=WAIT_S) as client:
            await scenario(client)

    asyncio.run(main())


async def seen_cancelled(server: FakeServer) -> bool:
    return await asyncio.to_thread(lambda: server.request().was_cancelled())


def test_ask_gives_text_parts_numbers_and_steps(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        result = await client.ask("steps", Options(trace=True))
        assert (result.reasoning, result.answer) == ("one. two. three.", "42")
        assert [step.origin for step in result.steps] == ["draft", "correction", "target"]
        assert result.usage.tokens_per_s == 20.0

    run(server, scenario)


def test_only_a_stream_is_written_step_by_step(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        await client.ask("plain")
        await client.ask("plain", Options(stream=True))
        assert len([event async for event in client.stream("plain")]) == 3
        assert [seen.inputs.get("stream") for seen in server.requests] == [[False], [True], None]

    run(server, scenario)


def test_events_come_in_order(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        kinds = [type(event) async for event in client.stream("steps")]
        assert kinds == [StepEvent, TextEvent] * 3 + [TextEvent, FinishEvent]

    run(server, scenario)


def test_events_come_as_they_are_committed(server: FakeServer, gate: Gate) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with client.stream("held") as events:
            assert await anext(events) == TextEvent("a")
            gate.opened.set()
            assert [type(event) async for event in events] == [TextEvent, FinishEvent]
        assert not await seen_cancelled(server)

    run(server, scenario)


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
    server: FakeServer, question: str, kind: type[ClientError]
) -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(kind) as caught:
            await client.ask(question)
        assert type(caught.value) is kind

    run(server, scenario)


def test_an_error_midway_comes_after_the_text_and_ends_the_call(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        stream = client.stream("fails midway")
        assert await anext(stream) == TextEvent("a")
        with pytest.raises(TargetUnavailable):
            await anext(stream)
        assert [event async for event in stream] == []
        assert await seen_cancelled(server)

    run(server, scenario)


def test_a_complete_answer_counts_though_the_call_ends_badly(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        assert (await client.ask("aborts after the finish")).text == "a"

    run(server, scenario)


def test_cancel_from_another_task_wakes_the_one_that_waits(server: FakeServer, gate: Gate) -> None:
    async def scenario(client: AsyncClient) -> None:
        stream = client.stream("held")

        async def read() -> list[Any]:
            return [event async for event in stream]

        reader = asyncio.create_task(read())
        assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
        stream.cancel()
        with pytest.raises(Cancelled):
            await reader
        assert await seen_cancelled(server)

    run(server, scenario)


def test_cancelling_the_task_cancels_the_request(server: FakeServer, gate: Gate) -> None:
    async def scenario(client: AsyncClient) -> None:
        task = asyncio.create_task(client.ask("held"))
        assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await seen_cancelled(server)

    run(server, scenario)


def test_leaving_the_with_block_cancels(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with client.stream("held") as events:
            async for _ in events:
                break
        assert await seen_cancelled(server)

    run(server, scenario)


def test_breaking_out_of_an_unnamed_stream_cancels(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        async for _ in client.stream("held"):
            break
        gc.collect()
        assert await seen_cancelled(server)

    run(server, scenario)


def test_cancelled_before_it_was_sent(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        stream = client.stream("held")
        stream.cancel()
        with pytest.raises(Cancelled):
            await anext(stream)

    run(server, scenario)


def test_closing_the_client_cancels_open_streams(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        stream = client.stream("held")
        assert await anext(stream) == TextEvent("a")
        await client.close()
        with pytest.raises(Cancelled):
            await anext(stream)
        assert await seen_cancelled(server)
        with pytest.raises(ClientError, match="closed"):
            await client.ask("plain")

    run(server, scenario)


def test_no_end_in_time_is_a_timeout_and_stops_the_server(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        for limit_s in (0.2, 1.0, 5.0):  # a busy machine may not even have connected by the first
            with pytest.raises(RequestTimeout):
                await client.ask("held", timeout_s=limit_s)
            if server.requests:
                break
        assert await seen_cancelled(server)

    run(server, scenario)


def test_a_timeout_of_asyncio_s_own_cancels_too(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        async def end_it_once_it_has_arrived(limit: asyncio.Timeout) -> None:
            await asyncio.to_thread(server.request)
            limit.reschedule(asyncio.get_running_loop().time())

        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(None) as limit:
                ending = asyncio.create_task(end_it_once_it_has_arrived(limit))
                await client.ask("held")
        await ending
        assert not isinstance(caught.value, ClientError)
        assert await seen_cancelled(server)

    run(server, scenario)


def test_a_server_gone_midway_is_a_connection_error(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        stream = client.stream("held")
        assert await anext(stream) == TextEvent("a")
        await asyncio.to_thread(server.die)
        with pytest.raises(ServerUnreachable):
            await anext(stream)

    run(server, scenario)


def test_nobody_there(server: FakeServer) -> None:
    async def scenario(_: AsyncClient) -> None:
        async with AsyncClient(NOBODY) as client:
            assert not await client.is_ready()
            with pytest.raises(ServerUnreachable, match=NOBODY):
                await client.ask("plain")

    run(server, scenario)


def test_streams_of_one_client_run_at_a_time_and_do_not_mix(server: FakeServer) -> None:
    names = [f"stream {index}" for index in range(8)]
    gates = {name: Gate() for name in names}
    for name in names:
        server.scripts[name] = [Reply(text=f"{name} a "), gates[name], Reply(text="b"), Reply(finish="stop")]

    async def scenario(client: AsyncClient) -> None:
        streams = [client.stream(name) for name in names]
        firsts = [await anext(stream) for stream in streams]
        for gate in gates.values():
            gate.opened.set()
        for name, first, stream in zip(names, firsts, streams, strict=True):
            events = [first, *[event async for event in stream]]
            assert "".join(e.text for e in events if isinstance(e, TextEvent)) == f"{name} a b"

    run(server, scenario)


def test_a_client_made_outside_the_loop_works_in_it(server: FakeServer) -> None:
    client = AsyncClient(server.url)

    async def main() -> None:
        async with client:
            assert await client.is_ready()
            assert (await client.ask("plain")).text == "ab"

    asyncio.run(main())


def test_ready_says_whether_server_and_model_are(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        assert await client.is_ready()
        async with AsyncClient(server.url, model="other") as other:
            assert not await other.is_ready()
        server.ready = False
        assert not await client.is_ready()
        assert await client.is_ready(models=["lookahead"])
        assert not await client.is_ready(models=["lookahead", "target"])

    run(server, scenario)


def test_a_client_outlives_its_event_loop(server: FakeServer) -> None:
    client = AsyncClient(server.url, timeout_s=WAIT_S)

    for _ in range(2):
        assert asyncio.run(client.ask("steps", Options(trace=True))).answer == "42"

    asyncio.run(client.close())
    with pytest.raises(ClientError, match="the client is closed"):
        asyncio.run(client.ask("steps"))


def test_a_client_is_refused_in_a_second_loop_while_the_first_lives(server: FakeServer) -> None:
    async def scenario(client: AsyncClient) -> None:
        await client.ask("steps")
        with pytest.raises(ClientError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.ask("steps")))
        with pytest.raises(ClientError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.close()))
        await client.ask("steps")

    run(server, scenario)


def test_a_client_without_an_event_loop_is_told_so(server: FakeServer) -> None:
    with pytest.raises(ClientError, match="no event loop runs here"):
        AsyncClient(server.url).stream("steps")
