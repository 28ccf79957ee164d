"""Calls and cancels through BLS, against a scripted Triton."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from lr_backend.clock import VirtualClockLoop
from lr_backend.engine import EngineCall, Generation
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable
from lr_backend.notice import Seats
from lr_backend.testing import run_virtual
from lr_backend.triton.own_engines import Watched
from lr_backend.triton.triton_engine import (
    FAILING_S,
    FEWEST_FAILURES,
    FEWEST_TOKENS,
    LONGEST_GAP_S,
    RETRY_S,
    SILENCE_S,
    SLOW_TOKEN_S,
    SLOWEST_TOKEN_S,
    CallGate,
    TritonEngine,
    engine_error,
)


@dataclass
class ScriptedTriton:
    """Answers each call after ``seconds`` unless a cancel of its id arrives; ignores the first ``deaf`` cancels."""

    seconds: float = 10.0
    deaf: int = 0
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    num_cancels: int = 0
    max_running: int = 0
    num_calls: int = 0
    error: Exception | None = None

    async def infer(self, model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
        if "stop" in inputs:
            self.num_cancels += 1
            if self.num_cancels > self.deaf and request_id in self.running:
                self.running[request_id].set()
            return tokens([])
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        assert request_id not in self.running
        stopped = self.running[request_id] = asyncio.Event()
        self.max_running = max(self.max_running, len(self.running))
        try:
            await asyncio.wait_for(stopped.wait(), self.seconds)
            return tokens([1])
        except TimeoutError:
            return tokens([1, 2, 3])
        finally:
            del self.running[request_id]


def tokens(ids: list[int]) -> dict[str, Any]:
    return {"output_ids": np.array([ids], dtype=np.int32), "sequence_length": np.array([len(ids)], dtype=np.int32)}


def call(name: str = "a") -> EngineCall:
    return EngineCall(name, np.array([1, 2], dtype=np.int32), 4)


def engine_of(triton: ScriptedTriton, limit: int = 4) -> TritonEngine:
    return TritonEngine("target", triton.infer, CallGate(limit), tokens_per_block=32)


def test_a_call_comes_back_with_its_tokens() -> None:
    async def main() -> None:
        engine = engine_of(ScriptedTriton())
        assert (await engine.generate(call())).token_ids == (1, 2, 3)
        await engine.close()

    run_virtual(main())


def test_an_error_is_raised_and_frees_the_place() -> None:
    async def main() -> None:
        triton = ScriptedTriton(error=EngineRejected("too long"))
        engine = engine_of(triton, limit=1)
        for _ in range(3):
            with pytest.raises(EngineRejected):
                await engine.generate(call())
        assert triton.num_calls == 3

    run_virtual(main())


def test_who_watches_is_told_of_calls_that_are_answered_and_of_those_that_hang() -> None:
    async def main() -> None:
        seats = Seats.alone()
        triton = ScriptedTriton(seconds=100.0, deaf=10**6)
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32, watch=seats.seat(0))
        hanging = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(0.1)
        hanging.cancel()
        await asyncio.sleep(60.0)
        assert (seats.num_hung, seats.num_answered) == (1, 0)
        await engine.close()
        assert (seats.num_hung, seats.num_answered) == (0, 1)  # it has let go after all

    run_virtual(main())


@pytest.mark.parametrize("deaf", [0, 1, 5])
def test_a_cancel_is_repeated_until_the_call_has_come_back(deaf: int) -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=1e6, deaf=deaf)
        engine = engine_of(triton)
        task = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.close()
        assert not triton.running
        assert triton.num_cancels == deaf + 1

    run_virtual(main())


def test_a_verification_that_is_under_way_is_let_end_and_one_that_waits_is_cancelled() -> None:
    """TensorRT-LLM keeps a cancel that comes in a call's last iteration for ever, and a verification has but one."""

    async def main() -> None:
        for seconds, num_cancels in ((0.05, 0), (60.0, 1)):
            triton = ScriptedTriton(seconds=seconds)
            engine = engine_of(triton)
            drafts = np.array([1, 2, 3], dtype=np.int32)
            lost = asyncio.create_task(engine.generate(EngineCall("a", np.array([1, 2], dtype=np.int32), 4, draft_ids=drafts)))
            await asyncio.sleep(0.01)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            await engine.close()
            assert triton.num_cancels == num_cancels and not triton.running

    run_virtual(main())


def test_calls_past_the_gate_wait_and_are_cancelled_without_a_word_to_triton() -> None:
    async def main() -> None:
        triton = ScriptedTriton()
        engine = engine_of(triton, limit=2)
        tasks = [asyncio.create_task(engine.generate(call(str(index)))) for index in range(4)]
        await asyncio.sleep(1)
        assert set(triton.running) == {"0", "1"}
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, BaseException) for result in results] == [False, False, False, True]
        assert triton.max_running == 2
        assert triton.num_cancels == 0

    run_virtual(main())


def test_a_call_that_is_cancelled_as_it_is_let_in_leaves_its_place_to_the_next() -> None:
    """Whether the place has been handed over to it by then or not."""

    async def was_sent(num_turns: int) -> bool:
        triton = ScriptedTriton()
        engine = engine_of(triton, limit=2)
        first = [asyncio.create_task(engine.generate(call(f"first {number}"))) for number in range(2)]
        waiting = asyncio.create_task(engine.generate(call("waiting")))
        await asyncio.sleep(triton.seconds)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting, *first})
        await engine.close()
        num_sent = triton.num_calls
        again = [asyncio.create_task(engine.generate(call(f"again {number}"))) for number in range(3)]
        await asyncio.sleep(triton.seconds / 2)
        assert len(triton.running) == 2, "as many as ever, and no more"
        await asyncio.gather(*again)
        return num_sent == 3

    assert {run_virtual(was_sent(num_turns)) for num_turns in range(20)} == {False, True}


def test_a_cancelled_call_keeps_its_place_until_it_has_come_back() -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=1e6, deaf=3)
        engine = engine_of(triton, limit=1)
        first = asyncio.create_task(engine.generate(call("first")))
        await asyncio.sleep(1)
        first.cancel()
        second = asyncio.create_task(engine.generate(call("second")))
        await asyncio.sleep(0.01)
        assert set(triton.running) == {"first"}
        await asyncio.sleep(10)
        assert set(triton.running) == {"second"}
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await engine.close()
        assert triton.max_running == 1

    run_virtual(main())


def test_an_engine_out_of_order_is_left_alone_and_tried_again_by_one_call() -> None:
    async def main() -> None:
        triton = ScriptedTriton(error=EngineUnavailable("not healthy"))
        engine = engine_of(triton)
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await engine.generate(call())
        assert triton.num_calls == 1
        await asyncio.sleep(RETRY_S)
        triton.error = None
        first, second = await asyncio.gather(engine.generate(call("a")), engine.generate(call("b")), return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, EngineUnavailable)
        assert (await engine.generate(call())).token_ids == (1, 2, 3)

    run_virtual(main())


@pytest.mark.parametrize("error", [EngineRejected("too long"), EngineError("the iteration failed")], ids=lambda one: one.code)
def test_a_try_that_is_answered_by_an_error_of_its_own_leaves_the_try_to_the_next_call(error: EngineError) -> None:
    """Else whoever asks what the engine refuses would keep all others from it."""

    async def main() -> None:
        triton = ScriptedTriton(error=EngineUnavailable("not healthy"))
        engine = engine_of(triton)
        with pytest.raises(EngineUnavailable):
            await engine.generate(call())
        await asyncio.sleep(RETRY_S)
        triton.error = error
        with pytest.raises(type(error), match=error.message):
            await engine.generate(call("refused"))
        triton.error = None
        assert (await engine.generate(call("another"))).token_ids == (1, 2, 3)

    run_virtual(main())


def test_what_was_under_way_when_an_engine_was_left_alone_is_no_try() -> None:
    """Its refusal says nothing of what came later, and lets nobody in before the time."""

    async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
        if request_id == "early":
            await asyncio.sleep(1.0)
            raise EngineRejected("too long")
        raise EngineUnavailable("not healthy")

    async def main() -> None:
        engine = TritonEngine("target", infer, CallGate(4), tokens_per_block=32)
        early = asyncio.create_task(engine.generate(call("early")))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineUnavailable, match="not healthy"):
            await engine.generate(call("later"))
        with pytest.raises(EngineRejected):
            await early
        with pytest.raises(EngineUnavailable, match="out of order"):
            await engine.generate(call("another"))

    run_virtual(main())


def test_a_call_that_no_cancel_ends_puts_its_engine_out_of_order() -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=100.0, deaf=10**6)
        engine = engine_of(triton)
        task = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(SILENCE_S - 1)
        assert not engine.out_of_order and triton.num_cancels <= 10, "it is asked less and less often"
        await asyncio.sleep(4)
        with pytest.raises(EngineUnavailable, match="out of order"):
            await engine.generate(call("b"))
        await engine.close()
        assert not triton.running

    run_virtual(main())


def test_an_iteration_of_seconds_is_no_sign_of_a_dead_engine() -> None:
    """Two prompts of 8,000 tokens take a 32 B model on one card 1.7 s, in which no call can end."""

    async def main() -> None:
        triton = ScriptedTriton(seconds=5.0, deaf=10**6)
        engine = engine_of(triton)
        lost, kept = (asyncio.create_task(engine.generate(call(name))) for name in "ab")
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(3.0)
        started = asyncio.create_task(engine.generate(call("c")))
        assert (await kept).token_ids == (await started).token_ids == (1, 2, 3)
        await engine.close()

    run_virtual(main())


def test_an_engine_that_is_full_of_long_calls_does_not_hang() -> None:
    """A stretch of 1,024 tokens takes 20 s beside as long ones, and a cancelled call that waits its turn as long."""

    async def main() -> None:
        triton = ScriptedTriton(seconds=30.0, deaf=10**6)
        engine = engine_of(triton)
        long = asyncio.create_task(engine.generate(replace(call("long"), max_new_tokens=1024)))
        lost = asyncio.create_task(engine.generate(call("lost")))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(25.0)
        assert not engine.out_of_order
        assert (await long).token_ids == (1, 2, 3)
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("token_s", [0.08, 5.0])
def test_an_engine_whose_tokens_take_long_is_given_the_time_that_they_take(token_s: float) -> None:
    """As in a full batch of a smaller card, or in slow motion; but no engine has for ever."""
    num, longest_s = 1024, SILENCE_S + 1024 * min(token_s, SLOWEST_TOKEN_S)

    async def main() -> None:
        stands = asyncio.Event()

        async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            if "stop" not in inputs:
                await asyncio.sleep(FEWEST_TOKENS * token_s)
                if request_id == "lost":
                    await stands.wait()
            return tokens(list(range(FEWEST_TOKENS)))

        engine = TritonEngine("target", infer, CallGate(4), tokens_per_block=32)
        for number in range(40):
            await engine.generate(call(str(number)))
        lost = asyncio.create_task(engine.generate(replace(call("lost"), max_new_tokens=num)))
        await asyncio.sleep(0.0)
        lost.cancel()
        await asyncio.sleep(longest_s - 2.0)
        assert not engine.out_of_order
        await asyncio.sleep(10.0)
        assert engine.out_of_order
        stands.set()
        await engine.close()

    run_virtual(main())


def test_an_engine_that_answers_other_processes_of_the_loop_does_not_hang() -> None:
    """Their calls may stand before a cancelled one, which ends only once it has had its turn."""

    async def main() -> None:
        seats, triton = Seats.alone(), ScriptedTriton(seconds=300.0, deaf=10**6)
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32, watch=seats.seat(0))
        calls = [asyncio.create_task(engine.generate(replace(call(name), max_new_tokens=1024))) for name in "abcd"]
        await asyncio.sleep(0.5)
        calls[0].cancel()
        for _ in range(6):
            await asyncio.sleep(10.0)
            seats.seat(1).answered()
            assert not engine.out_of_order and seats.num_hung == 0
        await asyncio.sleep(SILENCE_S + 1024 * SLOW_TOKEN_S + 5.0)
        assert engine.out_of_order and seats.num_hung == 1, "nobody is answered any more"
        seats.seat(1).answered()
        await asyncio.sleep(1.0)
        assert seats.num_hung == 0
        await asyncio.gather(*calls, return_exceptions=True)
        await engine.close()

    run_virtual(main())


def test_time_in_which_this_process_stood_still_is_no_sign_of_a_dead_engine() -> None:
    """As where a container is paused with all that is in it."""

    async def main() -> None:
        triton, loop = ScriptedTriton(seconds=300.0, deaf=10**6), asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32)
        lost = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(0.6)
        loop._jumping.now_s += 60.0
        await asyncio.sleep(SILENCE_S / 2)
        assert not engine.out_of_order
        await engine.close()

    run_virtual(main())


def test_a_cancel_that_goes_unheard_once_is_no_sign_of_a_dead_engine() -> None:
    """This process may have stood still while the answer came."""

    async def main() -> None:
        triton, unheard = ScriptedTriton(seconds=20.0), 1

        async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            nonlocal unheard
            if "stop" in inputs and unheard:
                unheard -= 1
                await asyncio.sleep(1e6)
            return await triton.infer(model, request_id, inputs, wanted)

        engine = TritonEngine("target", infer, CallGate(4), tokens_per_block=32)
        lost = asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(2.0)
        assert not engine.out_of_order and not triton.running
        unheard, lost = 2, asyncio.create_task(engine.generate(call()))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(2.0)
        assert engine.out_of_order
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("num_asked", [4, 100])
def test_a_draft_that_hangs_leaves_the_target_its_places(num_asked: int) -> None:
    async def main() -> None:
        gate, hung, healthy = CallGate(8), ScriptedTriton(seconds=1e9, deaf=10**9), ScriptedTriton(seconds=1.0)
        helpers = gate.part(0.75)
        draft = TritonEngine("draft", hung.infer, helpers, tokens_per_block=32)
        target = TritonEngine("target", healthy.infer, gate, tokens_per_block=32)
        asked = [asyncio.create_task(draft.generate(call(str(number)))) for number in range(num_asked)]
        await asyncio.sleep(0.1)
        for each in asked:
            each.cancel()
        found = await asyncio.wait_for(asyncio.gather(*(target.generate(call(str(number))) for number in range(4))), 5.0)
        assert len(found) == 4 and len(hung.running) == min(num_asked, 6)
        for stopped in hung.running.values():
            stopped.set()
        await draft.close()
        assert (gate.num_in_flight, helpers.num_in_flight) == (0, 0)
        asked = [asyncio.create_task(target.generate(call(str(number)))) for number in range(8)]
        await asyncio.sleep(0.5)
        assert len(healthy.running) == 8, "all places are free again"
        await asyncio.gather(*asked)

    run_virtual(main())


def test_of_a_draft_that_hangs_on_all_its_places_one_call_tries_again_and_the_others_fail_at_once() -> None:
    async def main() -> None:
        gate, hung = CallGate(8), ScriptedTriton(seconds=1e9, deaf=10**9)
        draft = TritonEngine("draft", hung.infer, gate.part(0.5), tokens_per_block=32)
        asked = [asyncio.create_task(draft.generate(call(str(number)))) for number in range(4)]
        await asyncio.sleep(0.1)
        for each in asked:
            each.cancel()
        await asyncio.sleep(2 * SILENCE_S)
        assert draft.out_of_order and len(hung.running) == 4
        await asyncio.sleep(RETRY_S * 2**4)
        assert not draft.out_of_order
        for _ in range(2):  # in two pauses
            later = [asyncio.create_task(draft.generate(call(f"later {number}"))) for number in range(5)]
            await asyncio.sleep(0.1)
            assert [each.done() for each in later] == [False, True, True, True, True]
            later[0].cancel()  # its draft is late
            assert all(isinstance(one, EngineUnavailable) for one in (await asyncio.gather(*later, return_exceptions=True))[1:])
            await asyncio.sleep(RETRY_S * 2**4)
        for stopped in hung.running.values():
            stopped.set()
        hung.seconds = 1.0
        await draft.close()
        assert (await draft.generate(call())).token_ids == (1, 2, 3)

    run_virtual(main())


@pytest.mark.parametrize(("num_hung", "num_left"), [(12, 9), (2, 16)])
def test_an_engine_that_hears_no_cancel_takes_few_threads_of_the_others(num_hung: int, num_left: int) -> None:
    """Its process stands still: a cancel that is never answered holds one of Triton's threads, as a call does."""

    async def main() -> None:
        gate, healthy, threads = CallGate(24), ScriptedTriton(seconds=1.0), list[asyncio.Future[dict[str, Any]]]()

        async def unanswered(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            threads.append(asyncio.get_running_loop().create_future())
            return await gate.answer(threads[-1])

        draft = TritonEngine("draft", unanswered, gate.part(0.5), tokens_per_block=32)
        target = TritonEngine("target", healthy.infer, gate, tokens_per_block=32)
        asked = [asyncio.create_task(draft.generate(call(str(number)))) for number in range(num_hung)]
        await asyncio.sleep(0.1)
        for each in asked:
            each.cancel()
        await asyncio.sleep(5.0)
        assert draft.out_of_order and gate.num_lost == 3, "two cancels at a time, and then one"
        for number in range(3):  # each time another call tries
            await asyncio.sleep(RETRY_S * 2**6)
            tried = asyncio.create_task(draft.generate(call(f"later {number}")))
            await asyncio.sleep(1.0)
            tried.cancel()
            await asyncio.sleep(60.0)
        assert gate.num_lost == 3, "of an engine that has let go of no call nothing more is asked"
        for _ in range(2):  # what was lost takes the places of those that leave first
            healthy.max_running = 0
            await asyncio.gather(*(target.generate(call(str(number))) for number in range(20)))
        assert healthy.max_running == num_left
        for thread in threads:
            thread.set_result(tokens([1]))
        await draft.close()
        assert (gate.num_lost, gate.num_in_flight) == (0, 0)

    run_virtual(main())


def test_a_try_that_was_never_sent_leaves_it_to_the_next_call() -> None:
    async def main() -> None:
        gate, triton = CallGate(1), ScriptedTriton(seconds=1.0, error=EngineUnavailable("away"))
        engine = TritonEngine("draft", triton.infer, gate, tokens_per_block=32, address="a:1")
        with pytest.raises(EngineUnavailable):
            await engine.generate(call())
        triton.error = None
        await asyncio.sleep(RETRY_S)
        await gate.enter()  # somebody else's
        trying = asyncio.create_task(engine.generate(call("a")))
        await asyncio.sleep(0.1)
        assert engine.out_of_order
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        gate.leave()
        assert (await engine.generate(call("b"))).token_ids == (1, 2, 3)
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_engine_that_heard_no_cancel_and_is_back_is_asked_again(is_killed: bool) -> None:
    async def main() -> None:
        triton, deaf_until = ScriptedTriton(seconds=1e6), 3.0
        clock = asyncio.get_running_loop().time

        async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            if "stop" in inputs and clock() < deaf_until:
                await asyncio.sleep(1e3)
            return await triton.infer(model, request_id, inputs, wanted)

        engine = TritonEngine("draft", infer, CallGate(9), tokens_per_block=32)
        late = [asyncio.create_task(engine.generate(call(str(number)))) for number in range(6)]
        await asyncio.sleep(0.5)
        for each in late:
            each.cancel()
        await asyncio.sleep(3.0)
        assert engine.out_of_order and len(triton.running) == 6
        if is_killed:
            engine.has_died("it is gone")
            await asyncio.sleep(1.0)
            engine.is_back()
        else:
            triton.running["5"].set()  # one ends by itself
        await asyncio.sleep(10.0)
        assert not engine.out_of_order and (is_killed or not triton.running)
        late = [asyncio.create_task(engine.generate(call("later")))]
        await asyncio.sleep(0.5)
        late[0].cancel()
        await asyncio.sleep(1.0)
        assert "later" not in triton.running and not engine.out_of_order
        for stopped in triton.running.values():
            stopped.set()
        await engine.close()

    run_virtual(main())


def test_a_helpers_call_that_is_lost_takes_a_thread_of_all_and_no_place_of_its_own() -> None:
    """The helper is started anew, with all the places that it had."""

    async def main() -> None:
        gate = CallGate(8)
        helpers = gate.part(0.5)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for _ in range(4):
            await helpers.enter()
        losing = [asyncio.create_task(helpers.answer(answered)) for _ in range(4)]
        await asyncio.sleep(0)
        for each in losing:
            each.cancel()
        await asyncio.gather(*losing, return_exceptions=True)
        for _ in range(4):
            helpers.leave()
        assert gate.num_lost == 4
        for _ in range(4):
            await asyncio.wait_for(helpers.enter(), 1.0)
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(1)
        assert not waiting.done(), "the other threads are taken by the calls that were lost"
        answered.set_result(None)
        await waiting
        assert (gate.num_lost, gate.num_in_flight, helpers.num_in_flight) == (0, 5, 4)

    run_virtual(main())


def test_more_calls_than_an_engines_queue_holds_wait_for_it() -> None:
    class Small:
        num_running = most = 0

        async def generate(self, call: EngineCall) -> Generation:
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            await asyncio.sleep(1)
            self.num_running -= 1
            return Generation((1,))

        async def close(self) -> None: ...

    class Sheet:
        def touch(self) -> None: ...

    async def main() -> None:
        small = Small()
        engine = Watched(small, Sheet(), Seats.alone().seat(0), max_calls=8)  # type: ignore[arg-type]
        asked = [asyncio.create_task(engine.generate(call(str(number)))) for number in range(100)]
        asked[50].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(one, Generation) for one in found) == 99
        assert small.most == 8

    run_virtual(main())


def test_an_engine_that_keeps_calls_is_tried_more_and_more_rarely() -> None:
    """Each try may be kept too, and with it a place in the gate that all roles share."""

    async def main() -> None:
        triton = ScriptedTriton(seconds=1e9, deaf=10**9)
        engine = engine_of(triton, limit=100)
        hour_s, patience_s = 3600, 1
        for number in range(hour_s):
            trying = asyncio.create_task(engine.generate(call(str(number))))
            await asyncio.sleep(patience_s)
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
        # Some before it is known to hang. After that one in 5, 10, 20 ... 320 s.
        assert len(triton.running) < SILENCE_S + RETRY_S + 4 + hour_s / (64 * RETRY_S)
        for stopped in triton.running.values():
            stopped.set()
        await engine.close()

    run_virtual(main())


def test_a_replica_that_hangs_keeps_no_place_of_the_others() -> None:
    """A call by gRPC can be ended on this side. The replica is left alone, and tried again more and more rarely,
    but not so rarely that it would stay away for long once it is started anew."""

    async def main() -> None:
        gate, hung, healthy = CallGate(8), ScriptedTriton(seconds=1e9, deaf=10**9), ScriptedTriton(seconds=1.0)
        sick = TritonEngine("target", hung.infer, gate, tokens_per_block=32, address="a:1")
        well = TritonEngine("target", healthy.infer, gate, tokens_per_block=32, address="b:1")
        asked = [asyncio.create_task(sick.generate(call(str(number)))) for number in range(8)]
        await asyncio.sleep(0.1)
        for each in asked:
            each.cancel()
        await asyncio.sleep(SILENCE_S + 3.0)
        assert sick.out_of_order and not hung.running and gate.num_in_flight == 0
        for number in range(600):
            if not sick.out_of_order:
                trying = asyncio.create_task(sick.generate(call(f"try-{number}")))
                await asyncio.sleep(0.5)
                trying.cancel()
            assert (await well.generate(call(str(number)))).token_ids == (1, 2, 3)
        assert hung.num_calls - 8 < 20, "each pause is twice the last, up to 40 s"
        hung.seconds = 1.0
        await asyncio.sleep(8 * RETRY_S)
        assert (await sick.generate(call("well again"))).token_ids == (1, 2, 3)
        assert (await asyncio.gather(*(sick.generate(call(str(number))) for number in range(4))))[3].token_ids == (1, 2, 3)
        assert gate.num_in_flight == 0
        await asyncio.gather(sick.close(), well.close())

    run_virtual(main())


def test_an_engine_that_lets_go_after_all_is_tried_as_soon_as_any_other() -> None:
    async def main() -> None:
        triton = ScriptedTriton(seconds=60.0, deaf=10**9)
        engine = engine_of(triton, limit=100)
        lost = [asyncio.create_task(engine.generate(call(str(number)))) for number in range(8)]
        await asyncio.sleep(0.1)
        for each in lost:
            each.cancel()
        await asyncio.sleep(59.0)
        assert engine.out_of_order
        await asyncio.sleep(1.0)
        assert not engine.out_of_order and not triton.running
        await engine.close()

    run_virtual(main())


def test_a_target_that_fails_every_call_is_as_one_that_hangs() -> None:
    async def main() -> None:
        seats = Seats.alone()
        triton = ScriptedTriton(error=EngineUnavailable("a rank is gone"), seconds=0.1)
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32, watch=seats.seat(0))

        async def ask_for(seconds: float) -> None:
            for _ in range(int(seconds)):
                await asyncio.gather(engine.generate(call()), return_exceptions=True)
                await asyncio.sleep(1)

        for _ in range(2 * FEWEST_FAILURES):
            await asyncio.gather(engine.generate(call()), return_exceptions=True)
            await asyncio.sleep(2 * LONGEST_GAP_S)
        assert seats.num_hung == 0, "now and then is not all the time"
        await ask_for(FAILING_S)
        assert seats.num_hung == 0, "a passing failure is none"
        await ask_for(2 * RETRY_S)
        assert seats.num_hung == 1
        triton.error = None
        await ask_for(2 * RETRY_S)
        assert seats.num_hung == 0 and seats.num_answered > 0

    run_virtual(main())


def test_an_iteration_that_failed_leaves_the_engine_to_others_and_one_that_always_does_is_told() -> None:
    async def main() -> None:
        seats = Seats.alone()
        error = engine_error("target", "LR_ENGINE_ERROR: the iteration failed", refused=False)
        triton = ScriptedTriton(error=error, seconds=0.1)
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32, watch=seats.seat(0))
        with pytest.raises(EngineError, match="the iteration failed"):
            await engine.generate(call())
        assert not engine.out_of_order
        triton.error = None
        assert (await engine.generate(call())).token_ids == (1, 2, 3)
        full = engine_error("target", "Maximum queue size of 8 has been reached, please try again later", refused=False)
        for triton.error, num_hung in ((full, 0), (error, 1)):
            for _ in range(int(FAILING_S) + 2):
                await asyncio.gather(engine.generate(call()), return_exceptions=True)
                await asyncio.sleep(1)
            assert seats.num_hung == num_hung, triton.error

    run_virtual(main())


def test_a_target_in_the_loops_own_process_that_fails_every_call_is_as_one_that_hangs() -> None:
    class Broken:
        error: Exception | None = EngineError("the iteration failed")

        async def generate(self, call: EngineCall) -> Generation:
            if self.error is not None:
                raise self.error
            return Generation((1,))

        async def close(self) -> None: ...

    class Sheet:
        def touch(self) -> None: ...

    async def main() -> None:
        seats, broken = Seats.alone(), Broken()
        engine = Watched(broken, Sheet(), seats.seat(0), max_calls=8)  # type: ignore[arg-type]
        for error, num_hung in ((EngineRejected("too long"), 0), (EngineError("the iteration failed"), 1), (None, 0)):
            broken.error = error
            for _ in range(int(FAILING_S) + 2):
                await asyncio.gather(engine.generate(call()), return_exceptions=True)
                await asyncio.sleep(1)
            assert seats.num_hung == num_hung

    run_virtual(main())


def test_a_dead_target_that_is_being_started_anew_is_not_taken_to_hang() -> None:
    async def main() -> None:
        seats, triton = Seats.alone(), ScriptedTriton()
        engine = TritonEngine("target", triton.infer, CallGate(4), tokens_per_block=32, watch=seats.seat(0))
        engine.has_died("it is gone")
        for _ in range(int(3 * FAILING_S)):
            with pytest.raises(EngineUnavailable):
                await engine.generate(call())
            await asyncio.sleep(1)
        assert seats.num_hung == 0

    run_virtual(main())


def test_a_cancelled_call_that_waits_its_turn_is_no_sign_of_a_dead_engine() -> None:
    """Upstream ends a call that waits only once it has run; meanwhile the engine answers others."""

    async def main() -> None:
        quick, full = ScriptedTriton(seconds=0.4), ScriptedTriton(seconds=4.0, deaf=10**6)

        async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            return await (full if request_id == "waits" else quick).infer(model, request_id, inputs, wanted)

        engine = TritonEngine("target", infer, CallGate(4), tokens_per_block=32)
        waiting = asyncio.create_task(engine.generate(call("waits")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        for number in range(8):
            assert (await engine.generate(call(f"good-{number}"))).token_ids == (1, 2, 3)
        assert full.num_cancels > 1
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await engine.close()

    run_virtual(main())


def test_a_call_that_a_busy_engine_has_lost_is_given_up() -> None:
    """Its answers to others say that it does not hang; nothing says that it will ever answer this one."""

    async def main() -> None:
        told, quick, threads = list[int](), ScriptedTriton(seconds=0.4), list[asyncio.Future[dict[str, Any]]]()
        num_cancels, gate = 0, CallGate(4, told.append)

        async def infer(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            nonlocal num_cancels
            if request_id != "lost":
                return await quick.infer(model, request_id, inputs, wanted)
            if "stop" in inputs:
                num_cancels += 1
                return tokens([])
            threads.append(asyncio.get_running_loop().create_future())
            return await gate.answer(threads[-1])

        engine = TritonEngine("target", infer, gate, tokens_per_block=32)
        lost = asyncio.create_task(engine.generate(call("lost")))
        await asyncio.sleep(0.1)
        lost.cancel()
        with capture_logs() as lines:
            for number in range(100):
                assert (await engine.generate(call(str(number)))).token_ids == (1, 2, 3)
        assert 3 <= num_cancels < 12
        assert lines == [{"event": "call_lost", "engine": "target", "request_id": "lost", "log_level": "error"}]
        assert (told, gate.num_in_flight, engine.out_of_order) == ([1], 0, False)
        threads[0].set_result(tokens([1]))
        await engine.close()
        await asyncio.sleep(0.1)
        assert told == [1, 0]

    run_virtual(main())


def test_a_call_that_is_lost_with_its_process_keeps_its_place_until_triton_answers() -> None:
    """Triton's thread for it is taken as long: else later calls would wait for a thread, unseen and for ever."""

    async def main() -> None:
        told, threads, triton = list[int](), list[asyncio.Future[dict[str, Any]]](), ScriptedTriton()
        gate = CallGate(3, told.append)

        async def unanswered(model: str, request_id: str, inputs: Any, wanted: Any) -> dict[str, Any]:
            threads.append(asyncio.get_running_loop().create_future())
            return await gate.answer(threads[-1])

        mortal = TritonEngine("draft", unanswered, gate, tokens_per_block=32)
        other = TritonEngine("target", triton.infer, gate, tokens_per_block=32)

        async def most_at_once() -> int:
            triton.max_running = 0
            await asyncio.gather(*(other.generate(call(str(number))) for number in range(5)))
            return triton.max_running

        calls = [asyncio.create_task(mortal.generate(call(name))) for name in "ab"]
        await asyncio.sleep(1)
        assert told == []
        mortal.has_died("it is gone")
        assert [type(one) for one in await asyncio.gather(*calls, return_exceptions=True)] == [EngineUnavailable] * 2
        assert gate.num_lost == 2 and told == [1, 2]
        assert await most_at_once() == 1
        threads[0].set_result(tokens([1]))
        assert await most_at_once() == 2
        threads[1].set_exception(EngineUnavailable("it is not healthy"))
        assert await most_at_once() == 3
        assert gate.num_lost == 0 and told == [1, 2, 1, 0]

    run_virtual(main())
