"""Whose clock is read: one that never goes back, whatever somebody does to the wall's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from lr_backend.clock import Clock, running_clock
from lr_backend.engine import EngineCall
from lr_backend.frontend.settings import Settings
from lr_backend.request import Usage
from lr_backend.testing import run_virtual
from tests.support.embedded_engines import greedy, prompt, request, start, tiny_checkpoint, tiny_engine
from tests.support.fake_lookahead import FakeServer, Reply
from tests.support.fake_lookahead import Gate as Pause
from tests.support.frontend import WAIT_S, frontend
from tests.unit.test_service import RecordedReplies, arrays, make_world, service_of

DAY_S = 86400.0


async def the_clock() -> tuple[Clock, asyncio.AbstractEventLoop]:
    return running_clock(), asyncio.get_running_loop()


def test_a_loop_that_counts_milliseconds_is_not_asked() -> None:
    """uvloop keeps the time of its last turn, in milliseconds."""
    clock, _ = uvloop.run(the_clock())
    assert clock is time.monotonic


def test_any_other_loop_is_so_that_virtual_time_is_what_counts() -> None:
    clock, loop = run_virtual(the_clock())
    assert clock == loop.time
    clock, loop = asyncio.run(the_clock())
    assert clock == loop.time


@dataclass
class Wall:
    """The wall's clock, which somebody sets while all else runs on."""

    ahead_s: float = 0.0

    def set_again(self) -> None:
        """A day ahead, then a day behind, and so on."""
        self.ahead_s = -DAY_S if self.ahead_s > 0 else DAY_S


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    made, seconds, nanoseconds = Wall(), time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + made.ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(made.ahead_s * 1e9))
    return made


def answer(at_each_call: Callable[[], None] = lambda: None) -> tuple[str, Usage]:
    """Of a service in real time, whose engines are quick."""
    world, replies = make_world(), RecordedReplies()

    def took_s(call: EngineCall, num_tokens: int) -> float:
        at_each_call()
        return 1e-5 * num_tokens

    for engine in world.engines:
        engine.delay = took_s
    service = service_of(world, mode="lossless", deadline_s=3600.0)
    asyncio.run(service.serve("id", arrays(), replies))
    assert replies.sent, replies.errors
    last = replies.sent[-1]
    return replies.text, Usage.model_validate_json(last["usage"])


def is_sane(usage: Usage) -> bool:
    """An answer's times lie within an hour, in their order."""
    return usage.first_step_s is not None and 0.0 <= usage.first_step_s <= usage.latency_s < 3600.0


def test_an_answer_is_the_same_and_its_times_are_sane_while_the_clock_is_set(wall: Wall) -> None:
    expected, _ = answer()
    text, usage = answer(wall.set_again)
    assert wall.ahead_s != 0
    assert (text, usage.degraded) == (expected, ())
    assert is_sane(usage)


def test_a_loop_that_read_the_walls_clock_would_be_found(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""
    monkeypatch.setattr("lr_backend.loop.assemble.running_clock", lambda: time.time)
    _, usage = answer(wall.set_again)
    assert not is_sane(usage)


def test_the_door_answers_and_counts_its_minutes_while_the_clock_is_set(wall: Wall) -> None:
    """Forth and back, and never behind: gRPC reckons with the system's clock too, which is not set here."""
    pause = Pause()
    end = Reply(finish="stop", usage={"completion_tokens": 1})
    scripts = {"q": [Reply(text="yes"), end], "held": [Reply(text="yes"), pause, end]}
    with FakeServer(scripts) as server, frontend(server.url, Settings(max_requests_a_minute=4)) as served:
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(served.chat, "held")
            assert pause.reached.wait(WAIT_S)
            statuses = []
            for ahead_s in (DAY_S, 0.0, DAY_S, 0.0):
                wall.ahead_s = ahead_s
                statuses.append(served.chat("q").status)
            pause.opened.set()
            assert held.result(WAIT_S).document["choices"][0]["message"]["content"] == "yes"
        assert statuses == [200, 200, 200, 429]


def test_an_engine_writes_the_same_while_the_clock_is_set(wall: Wall, tmp_path: Path) -> None:
    engine = tiny_engine(tiny_checkpoint(tmp_path))
    try:
        expected = greedy(engine, prompt(9), 60)
        running = start(engine, request(prompt(9), 60))
        while not running.done:
            wall.set_again()
        assert list(running.result().token_ids) == list(expected)
        engine.check_integrity()
    finally:
        engine.close()
