"""Depth by measurement: what is measured, and that the depth chosen from it pays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall
from lr_backend.errors import EngineError
from lr_backend.loop.pace import (
    MOST_SPANS_A_TRY,
    MOST_SPANS_AT_ONCE,
    SPAN_STEPS,
    SPANS_A_TRY,
    STEPS_UNTIL_RETRY,
    Average,
    Crowding,
    DepthChooser,
    Pace,
    Policy,
    Trial,
    Waiting,
)
from lr_backend.request import VerifierName
from lr_backend.testing import run_virtual
from tests.support.world import World, chance, imitator, storyteller

TOKEN_S = 0.01
JUDGE = VerifierName.JUDGE
STEEP = ((6.0, 0.9), (7.0, 0.5), (1.0, 0.01))
"""Companions and seconds through which a line leaves less than nothing for a token alone."""


@dataclass
class Clock:
    """A clock that is set by hand."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(*, drafted_s: float = 0.1, verdict_s: float = 0.0, per_companion: float = 0.0, alpha: float = 0.7) -> Pace:
    """A pace that has seen target tokens of one second, in crowds of one to eight."""
    pace = Pace(Clock())
    for companions in (0, 1, 3, 7) * 10:
        pace.crowding.add(companions, 1.0 + per_companion * companions)
    pace.drafted_token_s.add(drafted_s)
    pace.step_tokens.add(10.0)
    pace.evidence[JUDGE].verdict_s.add(verdict_s * 10.0)
    for number in range(100):
        pace.evidence[JUDGE].decided(number % 100 < 100 * alpha, None)
    return pace


def test_an_average_begins_as_a_plain_mean_and_then_fades() -> None:
    average = Average(memory=4)
    assert average.value is None
    for value in (1.0, 2.0, 3.0):
        average.add(value)
    assert average.value == pytest.approx(2.0)
    for _ in range(50):
        average.add(10.0)
    assert average.value == pytest.approx(10.0, rel=0.01)


@given(alone=st.floats(0.001, 10.0), share=st.floats(0.0, 1.0))
def test_crowding_finds_the_line_it_is_shown(alone: float, share: float) -> None:
    crowding = Crowding()
    for companions in (0, 1, 2, 3, 5, 7) * 20:
        crowding.add(companions, alone * (1.0 + share * companions))
    assert crowding.alone_s == pytest.approx(alone, rel=0.15)
    assert crowding.slowdown(0, 4) == pytest.approx(1.0 + 4 * share, rel=0.2)


@example(list(STEEP), 0.0, 1.0)
@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(1e-6, 100.0)), max_size=30), st.floats(0, 20), st.floats(0, 20))
def test_a_crowd_never_speeds_up_nor_takes_less_than_nothing(seen: list[tuple[float, float]], others: float, more: float) -> None:
    crowding = Crowding()
    for companions, seconds in seen:
        crowding.add(companions, seconds)
    assert crowding.slowdown(others, more) >= 1.0
    assert crowding.alone_s is None or crowding.alone_s > 0.0


def test_a_crowd_that_seems_to_take_all_the_time_fails_no_request() -> None:
    pace = measured(verdict_s=1.0)
    pace.crowding = Crowding()
    for companions, seconds in STEEP:
        pace.crowding.add(companions, seconds)
    assert 0 <= DepthChooser(pace, 6).depth(JUDGE) <= 6


def test_before_anything_is_measured_the_window_is_as_deep_as_allowed() -> None:
    assert DepthChooser(Pace(Clock()), 5).depth(JUDGE) == 5


def test_cheap_drafts_that_are_accepted_make_it_deep() -> None:
    assert DepthChooser(measured(alpha=0.95), 6).depth(JUDGE) == 6


def test_no_deeper_than_there_is_something_to_gain() -> None:
    assert DepthChooser(measured(drafted_s=0.4, alpha=0.95), 8).depth(JUDGE) == 3


@pytest.mark.parametrize(
    "pace",
    [measured(alpha=0.0), measured(drafted_s=1.0), measured(verdict_s=5.0), measured(per_companion=1.0)],
    ids=["nothing accepted", "draft as slow as the target", "slow verdicts", "a target that does one thing at a time"],
)
def test_where_it_does_not_pay_the_target_goes_on_alone(pace: Pace) -> None:
    assert DepthChooser(pace, 6).depth(JUDGE) == 0


def test_other_requests_make_it_shallower() -> None:
    pace = measured(per_companion=0.1, alpha=0.8)
    depths = []
    for pace.num_requests in (1, 2, 4, 8, 64):
        depths.append(DepthChooser(pace, 8).depth(JUDGE))
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 2
    assert depths[-1] == 0


def test_a_request_learns_its_own_acceptance() -> None:
    chooser = DepthChooser(measured(alpha=0.9, per_companion=0.05), 6)
    assert chooser.depth(JUDGE) > 0
    for _ in range(60):
        chooser.decided(accepted=False)
    assert chooser.acceptance_rate(chooser.pace.evidence[JUDGE]) < 0.1
    assert chooser.depth(JUDGE) == 0


def test_what_one_verifier_rejects_says_nothing_of_another() -> None:
    pace = measured(alpha=0.95)
    for _ in range(300):
        pace.evidence[VerifierName.EXACT].decided(accepted=False, log_prob=None)

    assert DepthChooser(pace, 6).depth(JUDGE) == 6
    assert DepthChooser(pace, 6).depth(VerifierName.EXACT) == 0


def test_how_slow_one_verifier_is_says_nothing_of_another() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.verdict(JUDGE):
        clock.now_s += 2.0
    with pace.verdict(VerifierName.EMBEDDING):
        clock.now_s += 0.5

    took = {name: evidence.verdict_s.value for name, evidence in pace.evidence.items() if evidence.verdict_s.value is not None}
    assert took == {JUDGE: 2.0, VerifierName.EMBEDDING: 0.5}


def test_after_a_while_alone_it_tries_one_step() -> None:
    chooser = DepthChooser(measured(alpha=0.0), 6)
    depths = [chooser.depth(JUDGE) for _ in range(STEPS_UNTIL_RETRY + 1)]
    assert depths == [0] * STEPS_UNTIL_RETRY + [1]
    chooser.decided(accepted=False)
    assert chooser.depth(JUDGE) == 0


def test_work_that_is_cancelled_counts_as_company_only() -> None:
    clock = Clock()
    pace = Pace(clock)

    def cancelled() -> None:
        with pace.target():
            clock.now_s += 3.0
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        cancelled()
    assert pace.crowding.alone_s is None
    with pace.target() as outer:
        with pace.target() as inner:
            clock.now_s += 2.0
            inner.num_tokens = 2
        clock.now_s += 2.0
        outer.num_tokens = 2
    assert pace.crowding._x == pytest.approx(0.98 * 1.0 + 0.5)


def spans(clock: Clock, trial: Trial, step_s: dict[Policy, float], num_spans: int) -> list[Policy]:
    """The policies of so many spans of one request, whose steps take as long as its policy makes them."""
    followed = []
    with trial.request():
        for _ in range(num_spans):
            followed.append(policy := trial.policy)
            for _ in range(SPAN_STEPS):
                clock.now_s += step_s[policy]
                trial.committed(num_tokens=10)
    return followed


@pytest.mark.parametrize("better", Policy)
def test_a_trial_keeps_to_what_brings_tokens_sooner_and_tries_the_other_now_and_then(better: Policy) -> None:
    clock = Clock()
    step_s = {policy: 1.0 if policy is better else 1.1 for policy in Policy}

    followed = spans(clock, Trial(clock), step_s, 400)

    assert set(followed[:2]) == set(Policy)
    tries = [number for number, policy in enumerate(followed) if policy is not better][1:]
    # Each time that it is worse again, it waits twice as long.
    assert [after - before for before, after in pairwise(tries)][:3] == [2 * SPANS_A_TRY, 4 * SPANS_A_TRY, MOST_SPANS_A_TRY]


def test_a_stretch_by_the_target_alone_ends_before_the_policy_may_change() -> None:
    clock = Clock()
    trial = Trial(clock)
    spans(clock, trial, {Policy.PREDICTED: 1.5, Policy.ALONE: 1.0}, 2)
    with trial.request():
        assert (trial.policy, trial.steps_left) == (Policy.ALONE, MOST_SPANS_AT_ONCE * SPAN_STEPS)
        num_steps = 0
        while trial.policy is Policy.ALONE:
            clock.now_s += trial.steps_left
            num_steps += trial.steps_left
            trial.committed(10 * trial.steps_left, trial.steps_left)
        assert num_steps <= SPANS_A_TRY * SPAN_STEPS
        assert trial.steps_left == SPAN_STEPS  # a try is short


def test_a_trial_changes_its_mind() -> None:
    clock = Clock()
    trial = Trial(clock)
    spans(clock, trial, {Policy.PREDICTED: 1.0, Policy.ALONE: 1.5}, 20)
    followed = spans(clock, trial, {Policy.PREDICTED: 2.0, Policy.ALONE: 1.5}, 20)
    assert followed[0] is Policy.PREDICTED
    assert followed[-5:].count(Policy.ALONE) >= 4


def test_time_without_a_request_counts_for_nobody() -> None:
    clock = Clock()
    trial = Trial(clock)
    for step_s in (1.0, 1.1):
        spans(clock, trial, dict.fromkeys(Policy, step_s), 1)
        clock.now_s += 1e6
    assert trial.policy is Policy.PREDICTED


def crowded_world(salt: int, per_companion: float, like_rate: float, beside_draft: float = 0.0) -> World:
    """A target whose tokens take longer the more sequences are in flight when a call begins, and longer while the draft is at
    work; a draft at a tenth of its time."""
    target = storyteller(salt, num_steps=60, break_rate=0.15)
    draft = imitator(target, salt + 1, 0.9)
    world = World.of(target, draft, lambda first, second: chance("like", salt, first, second) < like_rate)
    engine = world.target

    def delay(call: EngineCall, num_tokens: int) -> float:
        companions = len(engine.in_flight) - 1
        return TOKEN_S * num_tokens * (1.0 + per_companion * companions + beside_draft * bool(world.draft.in_flight))

    engine.delay = delay
    world.draft.delay = lambda call, num_tokens: 0.1 * TOKEN_S * num_tokens
    world.judge.delay = lambda call, num_tokens: TOKEN_S
    return world


def latency_s(world: World, num_clients: int, **fields: object) -> float:
    """Seconds until ``num_clients`` like requests, each one's steps its own, are all answered; measurements from a first one."""

    async def all_of_them() -> float:
        clock = asyncio.get_running_loop().time
        world.pace = Pace(clock)
        for seed in range(2):  # what a server has seen before
            await world.answer(seed=seed, request_id=f"warm-{seed}", **fields)
        started = clock()
        await asyncio.gather(*(world.answer(seed=seed, request_id=f"{seed}", **fields) for seed in range(num_clients)))
        return clock() - started

    return run_virtual(all_of_them())


@pytest.mark.parametrize("num_clients", [1, 8])
@pytest.mark.parametrize(
    ("per_companion", "like_rate", "beside_draft"),
    [(0.05, 0.9, 0.0), (1.0, 0.5, 0.0), (0.1, 0.0, 0.0), (0.1, 0.5, 2.0)],
    ids=["pays", "one thing at a time", "nothing accepted", "cores shared with the draft"],
)
def test_it_is_never_slower_than_the_target_alone(
    num_clients: int, per_companion: float, like_rate: float, beside_draft: float
) -> None:
    shape = (7, per_companion, like_rate, beside_draft)
    alone = latency_s(crowded_world(*shape), num_clients, mode="ar", max_tokens=400)
    auto = latency_s(crowded_world(*shape), num_clients, mode="lr", depth="auto", max_depth=6, max_tokens=400)
    assert auto <= alone * 1.03


def test_it_is_as_fast_as_the_depth_that_is_best() -> None:
    fields = {"mode": "lr", "max_tokens": 200, "num_clients": 1}
    fixed = [latency_s(crowded_world(7, 0.05, 0.9), max_depth=depth, **fields) for depth in range(1, 7)]
    assert latency_s(crowded_world(7, 0.05, 0.9), depth="auto", max_depth=6, **fields) <= min(fixed) * 1.05


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_does_not_pay_the_target_is_not_interrupted_at_every_step(stream: bool) -> None:
    """Each call has a price. A client that waits for single steps gets them."""
    world = crowded_world(7, 1.0, 0.5)
    fields = {"mode": "lr", "depth": "auto", "max_depth": 6, "max_tokens": 400, "stream": stream}
    latency_s(world, 1, **fields)
    num_steps = run_virtual(world.fresh().answer(mode="lr", max_depth=0, stream=True)).usage.num_steps

    calls = [recorded for recorded in world.target.calls if recorded.call.request_id.startswith("0/")]

    assert (len(calls) < num_steps / 2) is not stream
    assert max(recorded.call.max_new_tokens for recorded in calls) > 2 * world.config.limits.max_step_tokens or stream


def test_without_a_draft_the_rest_is_one_call() -> None:
    world = crowded_world(7, 0.05, 0.9)
    world.draft.fail = lambda call: EngineError("down")
    outcome = run_virtual(world.answer(mode="lr", max_depth=4, max_tokens=400, stream=False))
    alone = run_virtual(world.fresh().answer(mode="ar", max_tokens=400, stream=False))

    assert outcome.completion_ids == alone.completion_ids
    assert outcome.usage.num_target_calls <= 3


def test_waiting_for_the_draft_is_tried_both_ways_and_then_done_where_it_is_faster() -> None:
    waiting, done = Waiting(), []
    for _ in range(2 * Waiting.LEAST_TRIES + 160):
        waits = waiting.choose()
        waiting.wrote(waits, 1.0 if waits else 2.0, 10)
        done.append(waits)

    assert sorted(done[: 2 * Waiting.LEAST_TRIES]) == [False] * Waiting.LEAST_TRIES + [True] * Waiting.LEAST_TRIES
    assert done[2 * Waiting.LEAST_TRIES :].count(False) == 160 // Waiting.STEPS_A_TRY
    done = []
    for _ in range(1600):  # times have changed
        done.append(waits := waiting.choose())
        waiting.wrote(waits, 3.0 if waits else 2.0, 10)
    assert done[-160:].count(True) == 160 // Waiting.STEPS_A_TRY


def test_a_step_without_tokens_says_nothing_of_waiting() -> None:
    waiting = Waiting()
    waiting.wrote(True, 1.0, 0)
    assert [waiting.choose() for _ in range(3)] == [False] * 3
