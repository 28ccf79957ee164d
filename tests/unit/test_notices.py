"""What the launcher and the processes of the step loop tell one another: deaths, the end, requests in flight, and lessons."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall
from lr_backend.errors import EngineUnavailable
from lr_backend.notice import MAX_LOOPS, Lessons, OtherLoops, Seats, post, read
from lr_backend.testing import run_virtual
from lr_backend.triton import notices
from lr_backend.triton.notices import LOOK_S, heed
from lr_backend.triton.triton_engine import CallGate, TritonEngine
from tests.support.examples import answers
from tests.unit.test_triton_engine import ScriptedTriton


@dataclass
class Engine:
    told: list[str] = field(default_factory=list)

    def has_died(self, why: str) -> None:
        self.told.append(why)

    def is_back(self) -> None:
        self.told.append("back")


MODELS = st.frozensets(st.sampled_from(["target", "draft", "judge", "lookahead"]))


@given(MODELS)
def test_a_notice_is_read_as_it_was_put_up(tmp_path_factory: pytest.TempPathFactory, dead: frozenset[str]) -> None:
    path = tmp_path_factory.mktemp("notice") / "notice"
    assert read(path) == frozenset()
    post(path, {"target"})
    post(path, dead)
    assert read(path) == dead


def test_notices_that_cannot_be_read_for_a_moment_are_heeded_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(path: Path) -> frozenset[str]:
        raise OSError(24, "too many open files")

    async def main() -> None:
        path, draft = tmp_path / "notice", Engine()
        post(path, ["draft"])
        heeding = asyncio.create_task(heed(path, {"draft": draft}, Seats.alone().seat(0)))
        await asyncio.sleep(3 * LOOK_S)
        with monkeypatch.context() as patched:
            patched.setattr(notices, "read", unread)
            await asyncio.sleep(3 * LOOK_S)
        post(path, [])
        await asyncio.sleep(3 * LOOK_S)
        assert draft.told == ["the process of draft has died", "back"]
        heeding.cancel()

    run_virtual(main())


def test_deaths_and_returns_are_told_once_and_of_the_engines_that_are_called(tmp_path: Path) -> None:
    async def main() -> None:
        path, draft = tmp_path / "notice", Engine()
        heeding = asyncio.create_task(heed(path, {"draft": draft}, Seats.alone().seat(0)))
        for dead in ([], ["draft"], ["draft", "lookahead"], ["draft"], [], ["draft"]):
            post(path, dead)
            await asyncio.sleep(3 * LOOK_S)
        assert draft.told == ["the process of draft has died", "back", "the process of draft has died"]
        heeding.cancel()

    run_virtual(main())


@given(st.lists(st.tuples(st.integers(0, MAX_LOOPS - 1), st.booleans())))
def test_every_process_sees_the_requests_of_all_and_its_own(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("seats") / "notice"
    launcher = Seats.make(path)
    loops = [Seats.beside(path).seat(loop) for loop in range(MAX_LOOPS)]
    expected = [0] * MAX_LOOPS
    for loop, comes in moves:
        if comes:
            loops[loop].enter()
            expected[loop] += 1
        elif expected[loop]:
            loops[loop].leave()
            expected[loop] -= 1
    assert [one.num_in_flight for one in loops] == expected
    assert {one.num_in_all for one in loops} == {launcher.num_in_flight} == {sum(expected)}
    assert launcher.num_used == len({loop for loop, comes in moves if comes})


def test_the_end_is_seen_at_once_by_all_and_not_by_those_of_another_server(tmp_path: Path) -> None:
    mine, other = Seats.make(tmp_path / "mine"), Seats.make(tmp_path / "other")
    first, second = (Seats.beside(tmp_path / "mine").seat(loop) for loop in range(2))
    stranger = Seats.beside(tmp_path / "other").seat(0)
    assert not (first.ending or second.ending)
    mine.end()
    assert first.ending and second.ending and not stranger.ending and not other.ending
    assert not Seats.alone().seat(0).ending


def test_the_launcher_sees_the_process_that_has_lost_the_most_calls(tmp_path: Path) -> None:
    launcher = Seats.make(tmp_path / "notice")
    first, last = (Seats.beside(tmp_path / "notice").seat(loop) for loop in (0, MAX_LOOPS - 1))
    assert launcher.most_lost == 0
    first.lose(3)
    last.lose(7)
    assert launcher.most_lost == 7
    last.lose(0)
    assert launcher.most_lost == 3
    assert launcher.num_used == launcher.num_in_flight == 0


@answers(30)
@given(tellers=st.lists(st.integers(0, 2), max_size=40), num=st.integers(3, 9))
def test_lessons_are_heard_by_all_in_one_order(tmp_path_factory: pytest.TempPathFactory, tellers: list[int], num: int) -> None:
    """Also where the ring has come round in the meantime: then the newest are."""
    path = tmp_path_factory.mktemp("server") / "notice"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lessons, "NUM", num)
        patch.setattr(Lessons, "_MARGIN", 1)
        Lessons.make(path)
        loops = [Lessons.beside(path) for _ in range(3)]
        told, heard = [], []
        for number, teller in enumerate(tellers):
            told.append(["kind", number, 0.1 * number, None, True])
            assert loops[teller].tell(told[-1])
            heard += loops[2].heard()
        assert heard == told
        newest = told[-(num - 1) :] if len(told) > num - 1 else told
        assert list(loops[0].heard()) == list(loops[1].heard()) == newest
        assert not loops[0].tell(["x" * Lessons.SIZE]) and not list(loops[0].heard())
        assert loops[0].tell([np.float32(0.5), np.int64(3)]) and list(loops[1].heard()) == [[0.5, 3.0]]


def test_lessons_that_are_written_over_while_others_are_heard_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num = tmp_path / "notice", 8
    monkeypatch.setattr(Lessons, "NUM", num)
    monkeypatch.setattr(Lessons, "_MARGIN", 1)
    Lessons.make(path)
    teller, hearer = Lessons.beside(path), Lessons.beside(path)
    for number in range(5):
        teller.tell([number])
    heard = hearer.heard()
    assert next(heard) == [0]
    for number in range(5, 2 * num):
        teller.tell([number])
    assert [number for (number,) in heard] == [*range(num + 1, 2 * num)]


def test_what_a_writer_that_died_has_begun_was_never_told(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    Lessons.make(path)
    one, other = Lessons.beside(path), Lessons.beside(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_num_told", DiesWhenWritten(one._num_told))
        with pytest.raises(KeyboardInterrupt):
            one.tell(["half"])
    assert not list(other.heard())
    assert other.tell(["whole"]) and list(other.heard()) == list(one.heard()) == [["whole"]]


class DiesWhenWritten:
    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __getitem__(self, place: int) -> int:
        return self._numbers[place]

    def __setitem__(self, place: int, number: int) -> None:
        raise KeyboardInterrupt


def test_target_sequences_of_other_processes_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    Lessons.make(path)
    seats = Seats.make(path)
    one, other = (OtherLoops(seats.seat(loop), Lessons.beside(path)) for loop in range(2))
    one.say_sequences(5)
    seats.seat(0).enter()
    assert (other.num_sequences, other.num_requests, one.num_sequences, one.num_requests) == (5, 1, 0, 0)


def test_a_process_that_nobody_started_sees_itself_alone(tmp_path: Path) -> None:
    one, other = Seats.alone().seat(0), Seats.alone().seat(0)
    one.enter()
    assert (one.num_in_all, other.num_in_all) == (1, 0)
    with pytest.raises(OSError):
        Seats.beside(tmp_path / "notice")


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
