"""Iterations without a clock, and the same ones on the clock of an event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lr_backend.embedded.sequence import Sequence
from lr_backend.emulated.feed import Feed, Pass
from lr_backend.emulated.texts import FIRST_WORD, ScriptedSource
from lr_backend.emulated.timeline import Sizes, Timeline
from lr_backend.emulated.virtual import LoopThread, SharedCards, VirtualEngine
from lr_backend.engine import EngineCall, Sampling
from lr_backend.engine.request import EngineRequest
from lr_backend.errors import EngineError
from lr_backend.hardware.cost import CostModel, Iteration, Join, LinearCosts
from lr_backend.hardware.machine import Hops, Place
from lr_backend.hardware.pace import Runtime
from lr_backend.hardware.profile import ProfileKey
from lr_backend.hardware.sharing import IDLE, Law, adding_up
from lr_backend.testing import run_virtual
from tests.support.embedded_engines import request
from tests.support.paced import TARGET

COSTS = TARGET.costs()
SIZES = Sizes(num_blocks=64, tokens_per_block=8, max_batch_size=4, max_num_tokens=64)


def text(num_tokens: int) -> Feed:
    feed = Feed()
    feed.add([Pass((FIRST_WORD + index,)) for index in range(num_tokens)])
    feed.end(EngineError("its text has ended"))
    return feed


class Driven:
    """A timeline whose iterations pass at once, and what each took."""

    def __init__(self, sizes: Sizes = SIZES, costs: CostModel = COSTS) -> None:
        self.sizes, self.timeline = sizes, Timeline(sizes, costs)
        self.numbers = count()
        self.now_s = 0.0
        self.seconds: list[float] = []
        self.ended: dict[str, float] = {}

    def admit(self, name: str, num_prompt: int, num_new: int, feed: Feed | None = None, num_drafts: int = 0) -> Sequence:
        made = request((1 + next(self.numbers),) * num_prompt, num_new, request_id=name, num_draft_tokens=num_drafts)
        sequence = Sequence(
            order=next(self.numbers),
            request=made,
            on_done=lambda result: None,
            drafts=(),
            max_new_tokens=num_new,
            tokens_per_block=self.sizes.tokens_per_block,
        )
        self.timeline.admit(sequence, feed or text(num_new))
        return sequence

    def iterate(self, *, alike: bool) -> int:
        self.timeline.begin(0)
        number = self.timeline.num_alike if alike else 1
        seconds = self.timeline.seconds_each(number)
        self.seconds += seconds
        self.now_s += sum(seconds)
        for one in self.timeline.end(0, number):
            assert one.failure is None, one.failure
            self.ended[one.sequence.request.request_id] = self.now_s
        self.timeline.check_integrity()
        return number


runs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6)


@given(runs)
def test_iterations_that_are_alike_may_pass_as_one(shapes: list[tuple[int, int]]) -> None:
    one_by_one, at_once = Driven(), Driven()
    num_looks = {}
    for driven in (one_by_one, at_once):
        for index, shape in enumerate(shapes):
            driven.admit(f"{index}", *shape)
        num_looks[driven] = 0
        while not driven.timeline.idle:
            num_looks[driven] += 1
            driven.iterate(alike=driven is at_once)
    assert at_once.seconds == pytest.approx(one_by_one.seconds)
    assert at_once.ended == pytest.approx(one_by_one.ended)
    assert at_once.timeline.stats() == one_by_one.timeline.stats()
    assert num_looks[at_once] <= num_looks[one_by_one]


@given(runs)
def test_every_token_of_every_call_is_computed_once(shapes: list[tuple[int, int]]) -> None:
    driven = Driven()
    for index, shape in enumerate(shapes):
        driven.admit(f"{index}", *shape)
    while not driven.timeline.idle:
        driven.iterate(alike=True)
    stats = driven.timeline.stats()
    assert stats.num_requests == len(shapes)
    assert (stats.num_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_tokens_decoded == sum(num_new for _, num_new in shapes)


def test_an_engine_that_drafts_by_itself_takes_the_time_of_its_draft_models_passes_and_of_all_rows() -> None:
    costs = replace(TARGET, runtime=Runtime.LLMAPI, draft=ProfileKey("h200_sxm", "Qwen3-1.7B", 2, "bfloat16")).costs()
    driven = Driven(costs=costs)
    feed = Feed()
    words = [FIRST_WORD + index for index in range(9)]
    feed.add([Pass((words[0],)), Pass(tuple(words[1:5]), num_proposed=8), Pass(tuple(words[5:9]), num_proposed=4)])
    feed.end(EngineError("its text has ended"))
    sequence = driven.admit("a", 20, 9, feed, num_drafts=8)
    while not driven.timeline.idle:
        assert driven.iterate(alike=True) == 1
    drafted = [Iteration((), 1, 21, 8, 8), Iteration((), 1, 25, 4, 4)]
    assert driven.seconds == pytest.approx([costs.seconds(one) for one in (Iteration((Join(20, 0),)), *drafted)])
    assert driven.seconds[1] > 3.0 * costs.seconds(Iteration((), 1, 21)) / 2.0
    stats = driven.timeline.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_tokens_decoded) == (12, 6, 9)
    assert sequence.response().token_ids == tuple(words)


@given(st.integers(9, 24), st.lists(st.integers(1, 12), min_size=2, max_size=4))
@settings(max_examples=60)
def test_an_engine_that_drafts_by_itself_gains_what_its_blocks_have_room_for(num_blocks: int, prompts: list[int]) -> None:
    """Where memory is short it drafts less, and the rest of its text comes later: none is lost."""
    driven, texts = Driven(replace(SIZES, num_blocks=num_blocks, tokens_per_block=4)), {}
    for number, num_prompt in enumerate(prompts):
        feed = Feed()
        feed.add([Pass((FIRST_WORD + number,) * 5, num_proposed=4)] * 4)
        texts[str(number)] = driven.admit(str(number), num_prompt, 20, feed, num_drafts=4), num_prompt
    while not driven.timeline.idle:
        driven.iterate(alike=False)
    for sequence, num_prompt in texts.values():
        assert len(sequence.tokens) == num_prompt + 20


def test_a_run_that_the_engine_cuts_short_ends_when_it_does() -> None:
    """Its text goes on; nobody waits for the iterations that it would have taken."""
    whole, cut = Driven(), Driven()
    whole.admit("a", 9, 5)
    cut.admit("a", 9, 5, text(30))
    for driven in (whole, cut):
        while not driven.timeline.idle:
            driven.iterate(alike=True)
    assert cut.ended == whole.ended


def test_a_prompt_that_does_not_fit_an_iteration_takes_several() -> None:
    driven = Driven()
    driven.admit("a", 150, 1)
    while not driven.timeline.idle:
        driven.iterate(alike=True)
    assert driven.seconds == pytest.approx(
        [COSTS.seconds(Iteration((Join(new, cached),))) for new, cached in ((64, 0), (64, 64), (22, 128))]
    )


def test_a_branch_computes_what_its_parent_has_not() -> None:
    driven = Driven(replace(SIZES, max_num_tokens=1024))
    first = driven.admit("parent", 80, 8)
    while not driven.timeline.idle:
        driven.iterate(alike=True)
    driven.seconds.clear()
    branch = request((*first.request.input_ids, *[FIRST_WORD + index for index in range(8)], 9, 9, 9), 1, request_id="branch")
    sequence = Sequence(9, branch, lambda result: None, (), 1, SIZES.tokens_per_block)
    driven.timeline.admit(sequence, text(1))
    driven.iterate(alike=True)
    cached = driven.timeline.stats().num_tokens_reused
    assert 80 <= cached < 91
    assert driven.seconds == pytest.approx([COSTS.seconds(Iteration((Join(91 - cached, cached),)))])


def test_a_text_that_fails_ends_its_call_and_no_other() -> None:
    driven = Driven()
    bad = Feed()
    bad.end(EngineError("the model failed"))
    driven.admit("good", 10, 5)
    driven.admit("bad", 10, 5, bad)
    driven.timeline.begin(0)
    (ended,) = driven.timeline.end(0)
    assert (ended.sequence.request.request_id, str(ended.failure)) == ("bad", "the model failed")
    while not driven.timeline.idle:
        driven.iterate(alike=True)
    assert list(driven.ended) == ["good"]


def test_a_cancelled_call_leaves_its_blocks_to_others() -> None:
    driven = Driven()
    sequence = driven.admit("a", 60, 40)
    driven.iterate(alike=False)
    assert driven.timeline.cancel(sequence)
    assert not driven.timeline.cancel(sequence)
    assert driven.timeline.idle
    driven.timeline.check_integrity()


# On the clock of an event loop ----------------------------------------------------------------------------------------


WORDS = ScriptedSource(lambda context, request: (FIRST_WORD + len(context) % 7,))


class Machine:
    """Virtual engines that share what they are given."""

    def __init__(self, law: Law = adding_up, loop_s: float = 0.0) -> None:
        self.shared = SharedCards(law)
        self.thread = LoopThread(loop_s, self.shared, IDLE)

    def engine(self, place: Place) -> VirtualEngine:
        source = WORDS
        return VirtualEngine(place, source, self.shared, self.thread)


def call(name: str, num_prompt: int, num_new: int, drafts: tuple[int, ...] = ()) -> EngineCall:
    prompt = np.full(num_prompt, 1 + sum(name.encode()) % 97, dtype=np.int32)
    sampling = Sampling(temperature=1.0)
    return EngineCall(name, prompt, num_new, sampling, draft_ids=np.array(drafts, np.int32) if drafts else None)


async def timed(engine: VirtualEngine, *calls: tuple[float, EngineCall]) -> list[float]:
    """When each call that is made at its time is answered."""

    async def one(at_s: float, what: EngineCall) -> float:
        await asyncio.sleep(at_s)
        await engine.generate(what)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(one(*what) for what in calls)))


arrivals = st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=5)


@settings(deadline=None)
@given(arrivals)
def test_skipping_over_iterations_changes_no_time(shapes: list[tuple[float, int, int]]) -> None:
    """An engine on a card of its own skips; one that names its card looks at every iteration."""

    async def body(cards: tuple[int, ...]) -> list[float]:
        engine = Machine().engine(Place(COSTS, Hops(0.001, 0.002), cards))
        calls = [(at, call(f"{index}", prompt, new)) for index, (at, prompt, new) in enumerate(shapes)]
        return await timed(engine, *calls)

    assert run_virtual(body(())) == pytest.approx(run_virtual(body((0,))), abs=1e-6)


def test_a_call_takes_its_way_there_its_iterations_and_its_way_back() -> None:
    place = Place(LinearCosts(1.0), Hops(0.25, 0.5, 0.125), one_hot=True)

    async def body() -> list[float]:
        engine = Machine().engine(place)
        plain, drafted = call("plain", 5, 3), call("drafted", 5, 3, (4, 5))
        return [*(await timed(engine, (0.0, plain))), *(await timed(engine, (6.25, drafted)))]

    plain_s, drafted_s = run_virtual(body())
    assert plain_s == pytest.approx(0.25 + 3.0 + 0.5, abs=1e-6)
    assert drafted_s == pytest.approx(plain_s + 6.25 + 0.25 + 2 * 0.125 + 1.0 + 0.5, abs=1e-6)


@pytest.mark.parametrize(("law", "slower"), [(adding_up, 1.5), (lambda own, others: 1.0 + len(others) * own.share, 1.75)])
def test_engines_on_one_card_slow_each_other_down(law: Law, slower: float) -> None:
    """Each would use three quarters of it."""

    async def body() -> float:
        machine = Machine(law)
        engines = [machine.engine(Place(LinearCosts(1.0, share_of_cores=0.75), cards=(0,))) for _ in range(2)]
        return max(max(one) for one in await asyncio.gather(*(timed(engine, (0.0, call("a", 3, 8))) for engine in engines)))

    assert run_virtual(body()) == pytest.approx(8.0 * slower, rel=0.05)


def test_one_thread_hands_calls_over_in_turns() -> None:
    async def body() -> list[float]:
        engine = Machine(loop_s=2.0).engine(Place(LinearCosts(1.0)))
        return await timed(engine, *((0.0, call(f"{index}", 3, 1)) for index in range(3)))

    assert run_virtual(body()) == [3.0, 5.0, 7.0]


def test_what_nobody_waits_for_is_cancelled_after_its_iteration() -> None:
    async def body() -> tuple[float, float]:
        engine = Machine().engine(Place(LinearCosts(1.0)))
        task = asyncio.create_task(engine.generate(call("a", 3, 100)))
        await asyncio.sleep(4.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (end,) = await timed(engine, (0.0, call("b", 3, 1)))
        await engine.close()
        return end, float(engine.timeline.stats().num_iterations)

    assert run_virtual(body()) == pytest.approx((6.0, 6.0), abs=1e-6)


def test_requests_carry_what_the_engine_is_asked() -> None:
    made = EngineRequest.from_call(call("v", 4, 3, (4, 5)))
    assert (made.draft_ids, made.max_new_tokens) == ((4, 5), 3)


def test_whoever_is_answered_joins_the_next_iteration_where_there_is_no_way_to_go() -> None:
    """However much the caller does at once before it calls again."""

    async def body() -> tuple[float, float]:
        engine, loop = Machine().engine(Place(LinearCosts(1.0))), asyncio.get_running_loop()
        started_s = loop.time()

        async def again() -> float:
            await engine.generate(call("b", 3, 2))
            for _ in range(5):
                await asyncio.sleep(0)
            await engine.generate(call("c", 3, 2))
            return loop.time() - started_s

        long, end = await asyncio.gather(engine.generate(call("a", 3, 10)), again())
        assert len(long.token_ids) == 10
        await engine.close()
        return end, loop.time() - started_s

    assert run_virtual(body()) == pytest.approx((4.0, 10.0), abs=1e-6)


def test_an_iteration_that_fails_is_told_to_whoever_waits() -> None:
    class Broken(VirtualEngine):
        async def compute(self) -> None:
            raise RuntimeError("out of memory")

    async def body() -> None:
        machine = Machine()
        engine = Broken(Place(LinearCosts(1.0)), WORDS, machine.shared, machine.thread)
        for name in ("a", "b"):
            with pytest.raises(EngineError, match="the engine died: out of memory"):
                await engine.generate(call(name, 3, 4))
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.close()

    run_virtual(body())


def test_what_is_cut_off_a_pass_is_charged_when_it_comes() -> None:
    feed = Feed()
    feed.add([Pass((1, 2, 3, 4, 5), num_proposed=4)])
    parts = feed.take_up_to(2), feed.take_up_to(9)
    assert parts == (Pass((1, 2), num_proposed=1), Pass((3, 4, 5), num_proposed=2))
    assert not feed.num_ready
