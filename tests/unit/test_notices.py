"""What the launcher tells the step loop: that processes have died and are back, and that the server is to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall
from lr_backend.errors import EngineUnavailable
from lr_backend.notice import Notice, drained_file, post, read
from lr_backend.testing import run_virtual
from lr_backend.triton.notices import LOOK_S, heed
from lr_backend.triton.triton_engine import CallGate, TritonEngine
from tests.unit.test_triton_engine import ScriptedTriton


@dataclass
class Service:
    draining: bool = False
    num_in_flight: int = 0


@dataclass
class Engine:
    told: list[str] = field(default_factory=list)

    def has_died(self, why: str) -> None:
        self.told.append(why)

    def is_back(self) -> None:
        self.told.append("back")


@given(st.booleans(), st.frozensets(st.sampled_from(["target", "draft", "judge", "lookahead", "draining"])))
def test_a_notice_is_read_as_it_was_put_up(
    tmp_path_factory: pytest.TempPathFactory, draining: bool, dead: frozenset[str]
) -> None:
    path = tmp_path_factory.mktemp("notice") / "notice"
    assert read(path) == Notice()
    post(path, Notice(True, frozenset({"target"})))
    post(path, Notice(draining, dead))
    assert read(path) == Notice(draining, dead)


def test_deaths_and_returns_are_told_once_and_of_the_engines_that_are_called(tmp_path: Path) -> None:
    async def main() -> None:
        path, service, draft = tmp_path / "notice", Service(), Engine()
        heeding = asyncio.create_task(heed(path, service, {"draft": draft}))
        for dead in ([], ["draft"], ["draft", "lookahead"], ["draft"], [], ["draft"]):
            post(path, Notice(dead=frozenset(dead)))
            await asyncio.sleep(3 * LOOK_S)
        assert draft.told == ["the process of draft has died", "back", "the process of draft has died"]
        assert not service.draining
        heeding.cancel()

    run_virtual(main())


def test_a_loop_that_drains_says_when_all_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        path, service = tmp_path / "notice", Service(num_in_flight=2)
        heeding = asyncio.create_task(heed(path, service, {}))
        await asyncio.sleep(3 * LOOK_S)
        assert not service.draining
        post(path, Notice(draining=True))
        await asyncio.sleep(3 * LOOK_S)
        assert service.draining
        assert not drained_file(path).exists()
        service.num_in_flight = 0
        await asyncio.sleep(3 * LOOK_S)
        assert drained_file(path).exists()
        heeding.cancel()
        with suppress(asyncio.CancelledError):
            await heeding

    run_virtual(main())


def call(name: str) -> EngineCall:
    return EngineCall(name, np.array([1, 2], dtype=np.int32), 4)


def test_calls_to_a_process_that_dies_fail_at_once_and_go_through_when_it_is_back() -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=1e6)
        engine = TritonEngine("target", triton.infer, CallGate(2), tokens_per_block=32)
        calls = [asyncio.create_task(engine.generate(call(name))) for name in "abc"]
        await asyncio.sleep(1)
        clock = asyncio.get_running_loop()
        died_s = clock.time()
        engine.has_died("it is gone")
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(one) for one in found] == ["it is gone"] * 3
        assert clock.time() == died_s
        assert engine.out_of_order
        with pytest.raises(EngineUnavailable, match="it is gone"):
            await engine.generate(call("d"))
        engine.is_back()
        triton.seconds = 1.0
        assert (await engine.generate(call("e"))).token_ids == (1, 2, 3)
        await engine.close()

    run_virtual(main())


def test_a_call_that_was_cancelled_before_its_process_died_ends_with_it() -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=1e6, deaf=10**6)
        engine = TritonEngine("target", triton.infer, CallGate(2), tokens_per_block=32)
        cancelled = asyncio.create_task(engine.generate(call("a")))
        await asyncio.sleep(1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        engine.has_died("it is gone")
        await asyncio.wait_for(engine.close(), 10.0)

    run_virtual(main())
