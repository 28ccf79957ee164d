"""A trial: which way it takes, what trying the others costs, and that it keeps up with what changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lr_backend.policy.trial import EXPLORED_SHARE, MOST_OVER, SPAN_STEPS, STALE_SPANS, Trial, Way

WAYS = tuple(Way(ahead, drafts) for ahead, drafts in product((True, False), repeat=2))
ALONE = Way(False, False)


def spans(trial: Trial, truth: Mapping[Way, float], num_spans: int, predict: Callable[[Way], float]) -> list[Way]:
    """The ways of so many spans of one request, whose tokens take as long as its way makes them."""
    followed = []
    for _ in range(num_spans):
        followed.append(way := trial.way)
        for _ in range(SPAN_STEPS):
            trial.committed(way, 10 * truth[way], 10, 1, 1, predict=predict)
    return followed


def seconds(followed: list[Way], truth: Mapping[Way, float]) -> float:
    return sum(truth[way] for way in followed)


@pytest.mark.parametrize("best", WAYS)
def test_a_trial_keeps_to_the_way_that_brings_tokens_soonest(best: Way) -> None:
    truth = {way: 1.0 if way is best else 1.3 for way in WAYS}
    followed = spans(Trial(WAYS), truth, 300, lambda way: 1.0)
    assert followed[-100:].count(best) >= 90


@settings(max_examples=25)
@given(st.lists(st.floats(0.5, 4.0), min_size=4, max_size=4), st.lists(st.floats(0.8, 1.2), min_size=4, max_size=4))
def test_what_trying_others_costs_is_bounded(truths: list[float], wrong: list[float]) -> None:
    truth = dict(zip(WAYS, truths, strict=True))
    predicted = {way: one * truth[way] for way, one in zip(WAYS, wrong, strict=True)}
    trial = Trial(WAYS)
    spans(trial, truth, 150, predicted.__getitem__)  # it learns how wrong they are

    followed = spans(trial, truth, 300, predicted.__getitem__)

    # Of two ways that are nearly as fast it may take either.
    assert seconds(followed, truth) <= (1.1 + EXPLORED_SHARE) * 300 * min(truths) + max(truths)


def test_a_trial_changes_its_mind_and_changes_it_back() -> None:
    trial = Trial(WAYS)
    ahead, alone = Way(True, False), ALONE
    first = dict.fromkeys(WAYS, 2.0) | {ahead: 1.0}
    second = dict.fromkeys(WAYS, 2.0) | {ahead: 3.0, alone: 1.0}

    assert spans(trial, first, 200, lambda way: 1.0)[-50:].count(ahead) >= 45
    assert spans(trial, second, 300, lambda way: 1.0)[-50:].count(alone) >= 45
    assert spans(trial, first, 300, lambda way: 1.0)[-50:].count(ahead) >= 45


@pytest.mark.parametrize("num_requests", [1, 16])
def test_a_way_that_was_timed_while_the_server_stood_still_is_tried_again(num_requests: int) -> None:
    """A target that compiles kernels for 20 s stalls a span of the best way, which then seems to take 20 times as long."""
    ahead = Way(True, False)
    truth = dict.fromkeys(WAYS, 1.0) | {ahead: 0.6}
    trial = Trial(WAYS)
    in_a_crowd(trial, truth, 200, truth.__getitem__, num_requests)
    while trial.way != ahead:
        in_a_crowd(trial, truth, 1, truth.__getitem__, num_requests)
    in_a_crowd(trial, truth | {ahead: 20 * truth[ahead]}, 1, truth.__getitem__, num_requests)

    followed = in_a_crowd(trial, truth, 1000, truth.__getitem__, num_requests)

    assert followed[-50:].count(ahead) >= 45


def test_a_load_whose_first_span_stood_still_finds_its_way() -> None:
    truth = dict.fromkeys(WAYS, 1.0) | {ALONE: 3.0, Way(False, True): 2.0}
    slow = {way: 30 * one for way, one in truth.items()}
    trial = Trial(WAYS)
    in_a_crowd(trial, slow, 1, truth.__getitem__, 4)

    followed = in_a_crowd(trial, truth, 1000, truth.__getitem__, 4)

    assert sum(way.ahead for way in followed[-50:]) >= 45


def test_steps_that_were_begun_another_way_say_nothing() -> None:
    trial = Trial(WAYS)
    for _ in range(10 * SPAN_STEPS):
        trial.committed(ALONE, 1.0, 10, 1, 1, predict=lambda way: 1.0)
    assert trial.way == WAYS[0]


def in_a_crowd(
    trial: Trial, truth: Mapping[Way, float], num_spans: int, predict: Callable[[Way], float], num_requests: int = 32
) -> list[Way]:
    """The ways of so many spans of requests together."""
    followed = []
    for index in range(trial.num_spans, trial.num_spans + num_spans):
        followed.append(way := trial.way)
        while trial.num_spans == index:
            trial.committed(way, 10 * truth[way], 10, 1, num_requests, predict=predict)
    return followed


@pytest.mark.parametrize("tried_alone", [False, True])
def test_a_crowd_does_not_try_what_may_cost_everybody(tried_alone: bool) -> None:
    """Draft tokens look a fifth faster by a few steps, or by one request alone, and take twice as long once all take them."""
    predicted = {way: 0.8 if way.draft_tokens else 1.0 + way.ahead for way in WAYS}
    known = Trial(WAYS)
    spans(known, predicted, 40 if tried_alone else 0, predicted.__getitem__)
    trial = Trial(WAYS[::-1], known if tried_alone else None)
    trial.way = ALONE
    truth = {way: 1.0 if way == ALONE else 2.0 for way in WAYS}

    assert in_a_crowd(trial, truth, 20, predicted.__getitem__) == [ALONE] * 20


@pytest.mark.parametrize("num_requests", [8, 32])
def test_whole_steps_that_look_as_fast_are_tried_once_whatever_they_may_cost_the_others(num_requests: int) -> None:
    """They take three quarters of the time."""
    ahead = Way(True, False)
    predicted = dict.fromkeys(WAYS, 1.5) | {ahead: 0.96, ALONE: 1.0}
    truth = predicted | {ahead: 0.75}
    trial = Trial(WAYS[::-1])
    trial.way = ALONE

    followed = in_a_crowd(trial, truth, 20, predicted.__getitem__, num_requests)

    assert followed[-10:] == [ahead] * 10


def test_whole_steps_that_have_cost_the_others_are_not_tried_again_soon() -> None:
    """Nor are draft tokens in their place: what these would cost beside them nobody has seen either."""
    ahead = Way(True, False)
    predicted = dict.fromkeys(WAYS, 0.9) | {ahead: 0.96, ALONE: 1.0}
    truth = dict.fromkeys(WAYS, 3.0) | {ahead: 1.4, ALONE: 1.0}
    trial = Trial(WAYS[::-1])
    trial.way = ALONE

    followed = in_a_crowd(trial, truth, 20, predicted.__getitem__)

    assert followed.count(ahead) == 1 and followed.count(ALONE) == 19


def test_draft_tokens_by_calls_are_trusted_less_than_looking_ahead() -> None:
    """A step makes several calls for them. Of eight requests each would have to gain by more than a third."""
    predicted = dict.fromkeys(WAYS, 3.0) | {Way(False, True): 0.85, ALONE: 1.0}
    trial = Trial(WAYS[::-1])
    trial.way = ALONE

    assert in_a_crowd(trial, predicted | {Way(False, True): 2.0}, 20, predicted.__getitem__, 8) == [ALONE] * 20


def test_draft_tokens_inside_the_engine_need_no_caution() -> None:
    """They make no call, so what the first ones took is what they take."""
    truth = {way: 0.8 + 0.2 * way.ahead if way.draft_tokens else 1.0 for way in WAYS}
    trial = Trial(WAYS[::-1], drafts_by_calls=False)
    trial.way = ALONE

    followed = in_a_crowd(trial, truth, 20, truth.__getitem__)

    assert followed[-10:].count(Way(False, True)) >= 8


def test_the_target_alone_is_tried_even_where_it_looks_slower() -> None:
    """Beside a draft on its cards a target token takes longer, so the target alone looks slower than it is."""
    predicted = dict.fromkeys(WAYS, 2.0) | {Way(True, False): 1.0, ALONE: 1.9}
    truth = dict.fromkeys(WAYS, 2.0) | {Way(True, False): 1.0, ALONE: 0.8}
    trial = Trial(WAYS)
    trial.way = Way(True, False)

    followed = in_a_crowd(trial, truth, 20, predicted.__getitem__)

    assert followed[-10:].count(ALONE) == 10


def test_the_target_alone_is_tried_again_at_another_load() -> None:
    """Among few it was the slower way, and calls of a few rows tell too little of what a row costs among many."""
    ahead = Way(True, False)
    alone = dict.fromkeys(WAYS, 2.0) | {ahead: 1.0, ALONE: 1.4}
    known = Trial(WAYS)
    spans(known, alone, 40, alone.__getitem__)
    truth = alone | {ALONE: 0.8}
    trial = Trial(WAYS, known)
    trial.way = ahead

    assert known.off(ALONE) is not None
    assert in_a_crowd(trial, truth, 20, alone.__getitem__)[-10:].count(ALONE) == 10


def test_a_new_load_begins_with_the_best_way_of_the_nearest_and_not_with_one_that_is_tried() -> None:
    ahead = Way(True, False)
    truth = dict.fromkeys(WAYS, 1.8) | {ahead: 1.0, ALONE: 1.4}
    known = Trial(WAYS)
    while known.way != ALONE:
        spans(known, truth, 1, truth.__getitem__)

    assert Trial(WAYS, known).way == ahead


def test_a_crowd_takes_what_looks_much_better_and_then_knows_it() -> None:
    predicted = {way: 0.3 if way == Way(True, False) else 1.0 for way in WAYS}
    truth = {way: 0.6 if way == Way(True, False) else 1.0 for way in WAYS}
    trial = Trial(WAYS[::-1])

    followed = in_a_crowd(trial, truth, 40, predicted.__getitem__)

    assert followed[-30:].count(Way(True, False)) >= 28
    assert trial.expected(Way(True, False), predicted.__getitem__) == pytest.approx(0.6, rel=0.05)


def steps_of_a_span(num_requests: int, off: float) -> int:
    """Of all requests together, in a way that takes ``off`` times as long as predicted."""
    trial, num = Trial(WAYS), 0
    while not trial.num_spans:
        trial.committed(trial.way, off, 1, 1, num_requests, predict=lambda way: 1.0)
        num += 1
    return num


@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 8), (4, 32), (8, 64), (16, 64), (32, 96)])
def test_a_span_is_long_enough_for_all_and_for_each(num_requests: int, num_steps: int) -> None:
    assert steps_of_a_span(num_requests, 1.0) == num_steps


@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 8), (8, 8), (32, 32)])
def test_a_way_that_is_seen_to_be_bad_is_soon_left(num_requests: int, num_steps: int) -> None:
    assert steps_of_a_span(num_requests, 3.0) == num_steps


def test_a_way_is_timed_once_all_requests_take_it() -> None:
    """The first of 32 that look ahead do so beside others that write alone still: they say what all will not have."""
    trial, way = Trial(WAYS[:1]), WAYS[0]

    def commit(num_steps: int, token_s: float, *, joins: bool = False) -> None:
        for _ in range(num_steps):
            trial.committed(way, 10 * token_s, 10, 1, 32, predict=lambda way: 1.0, joins=joins)

    commit(60, 1.0)
    commit(32, 1.1, joins=True)
    commit(95, 1.5)
    assert trial.num_spans == 0
    commit(1, 1.5)
    assert trial.num_spans == 1
    assert trial._taken[way].value == pytest.approx(1.5)


@pytest.mark.parametrize(("taken", "num_each"), [(1.4, 1), (1.05, 3)])
def test_a_way_that_is_slower_even_beside_others_that_do_less_is_left_before_all_have_joined(taken: float, num_each: int) -> None:
    """The sooner the slower it is: by a twentieth a few steps may be by chance."""
    ways = (ALONE, Way(True, False))
    trial = Trial(ways)
    in_a_crowd(trial, dict.fromkeys(ways, 1.0), 1, lambda way: 1.0)
    while trial.way == ALONE:
        in_a_crowd(trial, dict.fromkeys(ways, 1.0), 1, lambda way: 0.99 if way.ahead else 1.0)
    before, num = trial.num_spans, 0
    while trial.num_spans == before:
        trial.committed(trial.way, 10 * taken, 10, 1, 32, predict=lambda way: 1.0, joins=num % 4 == 0)
        num += 1
    assert (num, trial.way) == (num_each * 32, ALONE)


def test_a_span_ends_though_requests_join_its_way_all_the_time() -> None:
    """Where the load goes up and down, requests change between the ways of two loads."""
    trial, num = Trial(WAYS[:1]), 0
    while not trial.num_spans:
        trial.committed(WAYS[0], 20.0, 10, 1, 8, predict=lambda way: 1.0, joins=num % 8 == 0)
        num += 1
    assert num == MOST_OVER * 64


def test_a_new_load_begins_with_what_is_known_of_the_nearest() -> None:
    truth = dict.fromkeys(WAYS, 2.0) | {ALONE: 1.0}
    known = Trial(WAYS)
    spans(known, truth, 40, lambda way: 1.0)

    followed = spans(Trial(WAYS, known), truth, 20, lambda way: 1.0)

    assert followed.count(ALONE) == 20  # nothing is tried a first time once more


def test_what_a_load_near_this_one_has_learned_since_counts_here() -> None:
    """A new load begins while the one near it still has the time of a server that stood still."""
    truth = {way: 1.0 if way == WAYS[0] else 1.3 for way in WAYS}
    near = Trial(WAYS)
    spans(near, {way: 10.0 for way in WAYS}, 2, lambda way: 1.0)
    here = Trial(WAYS, near)
    assert here.expected(WAYS[0], lambda way: 1.0) > 2.0
    spans(near, truth, 2 * STALE_SPANS, lambda way: 1.0)
    assert here.expected(WAYS[0], lambda way: 1.0) < 1.3


def test_what_a_way_took_before_a_change_is_no_measure_of_predictions_after_it() -> None:
    trial = Trial((ALONE,))
    spans(trial, {ALONE: 10.0}, 40, lambda way: 1.0)
    spans(trial, {ALONE: 1.0}, 10, lambda way: 1.0)
    off = trial.off(ALONE)
    assert off is not None and off < 1.5


def test_a_span_of_many_requests_tells_as_much_as_several_of_one() -> None:
    """After one that was slower the way is known: it is not tried every fourth span once more."""
    truth = {way: 1.0 if way == ALONE else 1.1 for way in WAYS}
    tries = {}
    for num_requests in (1, 8):
        trial, followed = Trial(WAYS), list[Way]()
        while len(followed) < 40:
            way, before = trial.way, trial.num_spans
            while trial.num_spans == before:
                trial.committed(way, 10 * truth[way], 10, 1, num_requests, predict=lambda way: 1.0)
            followed.append(way)
        tries[num_requests] = sum(way != ALONE for way in followed)
    assert tries[8] < tries[1], tries


def test_a_way_that_gets_faster_and_faster_blocks_no_other() -> None:
    trial, taken = Trial(WAYS[::-1], drafts_by_calls=True), 10.0
    followed = set()
    for _ in range(200):
        followed.add(way := trial.way)
        taken *= 0.999 if way == ALONE else 1.0
        for _ in range(96):
            trial.committed(way, taken, 1, 1, 32, predict=lambda way: 10.0)
    assert len(followed) > 1
