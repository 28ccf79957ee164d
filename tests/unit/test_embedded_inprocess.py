"""The embedded engine behind the loop's engine protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lr_backend.contract import encode_stop_words
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine import Engine, EngineCall
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.errors import EngineRejected, EngineUnavailable
from lr_backend.notice import Seats
from lr_backend.triton.own_engines import Watched, with_room
from tests.support.embedded_engines import Gate, engine_config, prompt, tiny_checkpoint, tiny_engine

Body = Callable[[InProcessEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def run(checkpoint: Path, body: Body, **changes: Any) -> None:
    async def main() -> None:
        engine = InProcessEngine(tiny_engine(checkpoint, **changes))
        assert isinstance(engine, Engine)
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


def call(request_id: str = "a", length: int = 9, max_new_tokens: int = 8, **fields: Any) -> EngineCall:
    return EngineCall(request_id, np.array(prompt(length), np.int32), max_new_tokens, **fields)


def test_calls_run_together_and_drafts_are_verified(checkpoint: Path) -> None:
    async def body(engine: InProcessEngine) -> None:
        answers = await asyncio.gather(*(engine.generate(call(str(length), length)) for length in range(5, 12)))
        again = await asyncio.gather(*(engine.generate(call(str(length), length)) for length in range(5, 12)))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in again]
        assert [answer.num_reused_tokens for answer in again] == list(range(4, 11))
        full = answers[4].token_ids
        verified = await engine.generate(call(draft_ids=np.array(full[:7], np.int32)))
        assert (verified.token_ids, verified.num_draft_tokens, verified.num_accepted_tokens) == (full, 7, 7)
        stopped = await engine.generate(call(stop_words=encode_stop_words([full[2:4]])))
        assert stopped.token_ids == full[:4]
        assert 0 < stopped.queue_s <= stopped.total_s

    run(checkpoint, body)


def test_cancelling_the_coroutine_ends_the_run(checkpoint: Path) -> None:
    async def body(engine: InProcessEngine) -> None:
        gate = Gate(engine.engine)
        task = asyncio.create_task(engine.generate(call(max_new_tokens=200)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert len((await engine.generate(call("b"))).token_ids) == 8
        stats = engine.engine.stats()
        assert (stats.num_cancelled, stats.num_running, stats.num_blocks_used) == (1, 0, 0)

    run(checkpoint, body)


def test_errors_are_engine_errors(checkpoint: Path) -> None:
    async def body(engine: InProcessEngine) -> None:
        with pytest.raises(EngineRejected, match="max_draft_len"):
            await engine.generate(call(draft_ids=np.arange(9, dtype=np.int32), max_new_tokens=10))
        gate = Gate(engine.engine)
        first = asyncio.create_task(engine.generate(call("a")))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="queue is full"):
            await engine.generate(call("b"))
        gate.open()
        assert len((await first).token_ids) == 8

    run(checkpoint, body, max_queue_size=1)


def test_closing_fails_what_is_in_flight(checkpoint: Path) -> None:
    async def body(engine: InProcessEngine) -> None:
        gate = Gate(engine.engine)
        task = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        while not engine.engine._inbox.closing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        gate.open()
        await closing
        with pytest.raises(EngineUnavailable):
            await task
        with pytest.raises(EngineUnavailable):
            await engine.generate(call("b"))

    run(checkpoint, body)


def test_calls_of_the_loop_wait_before_the_queue_of_an_engine_in_its_process(checkpoint: Path) -> None:
    """However short the queue of the spec is, and though others were cancelled and have not left it."""
    config = with_room(engine_config(checkpoint, max_batch_size=4, max_queue_size=1))
    assert with_room(engine_config(checkpoint, max_queue_size=256)).max_queue_size == 256

    class Sheet:
        def touch(self) -> None: ...

    async def main() -> None:
        inner = EmbeddedEngine(config)
        engine = Watched(InProcessEngine(inner), Sheet(), Seats.alone().seat(0), config.max_queue_size // 2)  # type: ignore[arg-type]
        gate = Gate(inner)
        lost = [asyncio.create_task(engine.generate(call(f"lost-{number}"))) for number in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for each in lost:
            each.cancel()
        calls = [asyncio.create_task(engine.generate(call(str(number)))) for number in range(12)]
        await asyncio.sleep(0.05)
        gate.open()
        assert {len(answer.token_ids) for answer in await asyncio.gather(*calls)} == {8}
        await engine.close()

    asyncio.run(main())
