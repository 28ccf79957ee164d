"""The policy: what a request speculates, what a server learns from all of them, and that its processes learn as one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import Role
from lr_backend.loop.ledger import Ledger
from lr_backend.notice import Lessons, OtherLoops, Seats
from lr_backend.plan.simulation import Policy, simulate
from lr_backend.policy.average import Average
from lr_backend.policy.policy import Learned, Measured, RequestPolicy
from lr_backend.policy.prices import LONG_PROMPT, STALE_STEPS
from lr_backend.policy.trial import LEAST_STEPS, MOST_OVER, SPAN_STEPS, Turn, Way
from lr_backend.request import LookaheadRequest, Mode, ProposerName, VerifierName
from tests.support.examples import answers
from tests.support.scenarios import fitted
from tests.support.servers import Conditions, Server, served
from tests.unit.test_prices import Clock
from tests.unit.test_trial import ALONE, WAYS, spans

JUDGE = VerifierName.JUDGE


# What a request speculates ---------------------------------------------------------------------------------------------


def request(**fields: object) -> LookaheadRequest:
    return LookaheadRequest.parse({"text_input": "?", **fields})


def test_a_deterministic_request_asks_nobody_what_pays() -> None:
    shared = Learned(Clock())
    for companions in (0, 1, 3, 7) * 10:
        shared.prices.target[False].crowding.add(companions, 1.0 + companions)
    shared.prices.num_requests = 8
    steady, other = (RequestPolicy(request(deterministic=one), shared, 4, can_draft=True) for one in (True, False))
    assert (steady.min_chance, steady.min_draft_chance, steady.depth, steady.uses_draft_tokens) == (0.0, 0.0, 4, True)
    assert other.min_chance > 1.0
    assert other.min_draft_chance == 0.0  # what is asked for is done


def test_both_kinds_of_steps_are_tried_before_they_are_compared() -> None:
    shared = Learned(Clock())
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    tried = []
    for _ in range(20):
        tried.append(drafts := policy.uses_draft_tokens)
        shared.prices.target[drafts].token_s.add(1.0)
    assert tried[:6] == [True] * 3 + [False] * 3


def test_steps_that_are_taken_for_their_price_count_for_no_way() -> None:
    clock = Clock()
    shared = Learned(clock)
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    trial = shared.trial(policy.request.proposer, JUDGE, WAYS)

    def commit(num_steps: int) -> None:
        for _ in range(num_steps):
            clock.now_s += 1.0
            policy.committed(10)

    def priced(*, drafts: bool) -> None:
        for _ in range(LEAST_STEPS):
            shared.prices.target[drafts].crowding.add(0, 1.0, 10)
            shared.prices.target[drafts].token_s.add(1.0)

    priced(drafts=True)
    commit(1)  # it was begun before
    commit(3 * SPAN_STEPS)
    assert (trial.way.draft_tokens, policy.uses_draft_tokens, trial.num_spans) == (True, False, 0)
    priced(drafts=False)
    commit(2 + SPAN_STEPS)  # one more was begun before, and the next joins the way
    assert trial.num_spans == 1


@pytest.mark.parametrize(
    ("fields", "drafts", "num_spans", "num_steps"),
    [
        pytest.param({}, False, 0, 4, id="nothing is known"),
        pytest.param({}, False, 1, 8, id="a span has kept to it"),
        pytest.param({}, False, 2, 16, id="two spans have"),
        pytest.param({}, False, 9, 16, id="many spans have"),
        pytest.param({}, True, 9, 16, id="draft tokens by calls"),
        pytest.param({"proposer": "engine"}, True, 9, 16, id="draft tokens inside the engine"),
        pytest.param({"stream": True}, False, 9, 1, id="somebody waits for each step"),
    ],
)
def test_the_target_writes_alone_for_longer_the_longer_that_has_paid(
    fields: dict[str, object], drafts: bool, num_spans: int, num_steps: int
) -> None:
    clock = Clock()
    shared = Learned(clock)
    policy = Measured(request(**{"stream": False, **fields}), shared, 0, JUDGE, can_draft=drafts, must_draft=drafts)
    for _ in range(num_spans * SPAN_STEPS):
        clock.now_s += 1.0
        policy.committed(24)
    assert policy.alone_steps() == num_steps


def test_of_requests_at_the_same_time_as_many_take_a_kind_of_step_for_its_price_as_it_wants() -> None:
    shared = Learned(Clock())
    policies = [Measured(request(), shared, 4, JUDGE, can_draft=True) for _ in range(8)]
    kinds = []
    with ExitStack() as written:
        for policy in policies:
            kinds.append(policy.uses_draft_tokens)
            written.enter_context(shared.prices.step(drafts=kinds[-1]))
    assert kinds == [True] * LEAST_STEPS + [False] * LEAST_STEPS + [True] * (8 - 2 * LEAST_STEPS)


def test_the_target_alone_now_and_then_writes_a_step_the_other_way() -> None:
    """Nothing else tells what that takes by now: draft tokens that were slow at the start, or fast at another load."""
    clock = Clock()
    shared = Learned(clock)
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    policy.keep_alone()
    truth, written = {True: 3.0, False: 1.0}, []
    for number in range(4 * STALE_STEPS):
        if number == 2 * STALE_STEPS:
            truth = {True: 0.3, False: 1.0}
        written.append(drafts := policy.uses_draft_tokens)
        shared.prices.learn("step", drafts, 0.0, truth[drafts], 10)
    assert LEAST_STEPS <= sum(written[LEAST_STEPS : 2 * STALE_STEPS]) <= 3 * LEAST_STEPS
    assert all(written[-10:])


def test_what_is_written_behind_the_reasoning_counts_for_no_way() -> None:
    clock = Clock()
    shared = Learned(clock)
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    trial = shared.trial(policy.request.proposer, JUDGE, WAYS)
    for drafts, token_s in ((True, 3.0), (False, 1.0)):
        for _ in range(LEAST_STEPS):
            shared.prices.target[drafts].crowding.add(0, token_s, 10)
            shared.prices.target[drafts].token_s.add(token_s)
    assert trial.way == (True, True)
    policy.keep_alone()
    assert (policy.depth, policy.uses_draft_tokens) == (0, False)  # the faster one of the target's own
    clock.now_s += 9.0
    policy.committed(240, 3 * SPAN_STEPS)
    assert (trial.num_spans, trial.way) == (0, (True, True))


@pytest.mark.parametrize(("num_prompt_tokens", "num_spans"), [(LONG_PROMPT - 1, 2), (LONG_PROMPT, 1)])
def test_the_first_steps_behind_a_long_prompt_count_for_no_way(num_prompt_tokens: int, num_spans: int) -> None:
    clock = Clock()
    shared = Learned(clock)
    ledger = Ledger(clock, num_prompt_tokens)
    policy = Measured(request(stream=False), shared, 0, JUDGE, can_draft=False)
    lengths = []
    for _ in range(2):
        lengths.append(policy.alone_steps(reads=ledger.reads(Role.TARGET)))
        clock.now_s += 9.0
        ledger.called(Role.TARGET)
        policy.committed(240, SPAN_STEPS, counts=not ledger.has_waited())
        ledger.step_committed(240, num_reasoning=0)
    assert shared.trial(policy.request.proposer, JUDGE, (Way(False, False),)).num_spans == num_spans
    # A short answer in one call would count for none as a whole.
    assert [length == 1 for length in lengths] == [num_spans == 1, False]


@pytest.mark.parametrize(("proposer", "keeps"), [(ProposerName.DRAFT_MODEL, False), (ProposerName.NGRAM, True)])
def test_a_draft_that_has_failed_has_no_draft_tokens_in_any_mode(proposer: ProposerName, keeps: bool) -> None:
    shared = Learned(Clock())
    asked = request(proposer=proposer)
    for policy in (RequestPolicy(asked, shared, 4, can_draft=True), Measured(asked, shared, 4, JUDGE, can_draft=True)):
        assert policy.uses_draft_tokens and policy.asks_draft is not keeps
        policy.lose_draft()
        assert (policy.uses_draft_tokens, policy.asks_draft) == (keeps, False)


def test_steps_count_at_the_load_that_they_were_written_at_though_it_changes_meanwhile() -> None:
    shared, ways = Learned(Clock()), (Way(True, False), Way(False, False))
    of = (ProposerName.DRAFT_MODEL, JUDGE, ways)
    turn = shared.trial(*of).turn

    def predict(way: Way) -> float:
        shared.prices.num_requests = 8  # another process has taken in some
        return 1.0

    shared.committed(of, turn, 9.0, 240, 16 * SPAN_STEPS, predict, fresh=True)
    assert turn.load == 0
    shared.prices.num_requests = 1
    assert shared.trial(*of).num_spans == 1


def test_steps_that_say_nothing_of_their_way_count_for_none() -> None:
    clock = Clock()
    shared = Learned(clock)
    policy = Measured(request(), shared, 4, JUDGE, can_draft=False)
    trial = shared.trial(policy.request.proposer, JUDGE, (Way(True, False), Way(False, False)))
    for counts in (False, True):
        assert trial.num_spans == 0
        for _ in range(SPAN_STEPS):
            clock.now_s += 1.0
            policy.committed(24, compared=True, counts=counts)
    assert trial.num_spans == 1


def test_steps_that_were_begun_before_another_way_was_tried_count_for_none() -> None:
    """A call of the target alone has up to sixteen steps. While the others look ahead, it is slower by their doing."""
    shared = Learned(Clock())
    policy = Measured(request(), shared, 4, JUDGE, can_draft=False)
    of = (policy.request.proposer, JUDGE, (Way(True, False), Way(False, False)))
    trial = shared.trial(*of)
    begun = trial.turn
    spans(trial, dict.fromkeys(of[-1], 1.0), 1, lambda way: 1.0 + (way == begun.way))  # the other way is tried
    tried = trial.turn
    spans(trial, dict.fromkeys(of[-1], 9.0), 1, lambda way: 1.0 + (way == tried.way))  # and left again
    assert (tried.way, trial.turn) == (Way(False, False), Turn(begun.way, 2, load=0))

    for turn, num_spans in ((begun, 2), (trial.turn, 3)):
        shared.committed(of, turn, 90.0, 240, 2 * SPAN_STEPS, policy._predicted, fresh=True)
        assert trial.num_spans == num_spans


@pytest.mark.parametrize("price", [0.0, 1.0])
def test_whoever_looks_ahead_follows_a_usual_drafted_step(price: float) -> None:
    """Whatever a row seems to cost: else a crowd that tries looking ahead would be timed without it."""
    shared = Learned(Clock())
    for companions in (0, 1, 3, 7) * 10:
        shared.prices.target[False].crowding.add(companions, 1.0 + price * companions)
    shared.prices.num_requests = 8
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    assert policy.min_draft_chance == min(shared.least_chance, shared.acceptance[JUDGE].rate)
    assert shared.least_chance == pytest.approx(8 * price, abs=0.5)


def test_a_slow_draft_makes_rows_bring_less() -> None:
    """A target step behind a drafted one comes sooner only by what the draft left of its time."""
    shared = Learned(Clock())
    prices = shared.prices
    for companions in (0, 1, 3, 7) * 10:
        prices.target[False].crowding.add(companions, 1.0 + companions / 64)
    policy = Measured(request(), shared, 4, JUDGE, can_draft=True)
    prices.num_requests = 4
    prices.learn("step", False, 0.0, 1.0, 10)
    prices.learn("verdict", JUDGE, 2.5)
    found = []
    for drafted_s in (0.1, 0.7):
        prices.drafted_token_s = Average()
        prices.learn("drafted", drafted_s, 10)
        found.append(policy.min_draft_chance / shared.least_chance)
    assert found == pytest.approx([1.25 / (1.25 - 0.1), 1.25 / (1.25 - 0.7)])


@pytest.mark.parametrize(("max_depth", "can_draft"), [(0, False), (0, True), (1, True), (4, False)])
def test_what_there_is_not_is_never_chosen(max_depth: int, can_draft: bool) -> None:
    clock = Clock()
    policy = Measured(request(), Learned(clock), max_depth, JUDGE, can_draft=can_draft)
    for _ in range(100):
        assert policy.depth in {0, 4 if max_depth == 4 else 0}, "a depth of 1 gains nothing"
        assert can_draft or not policy.uses_draft_tokens
        clock.now_s += 1.0
        policy.committed(10)


def test_each_load_each_proposer_and_each_verifier_has_a_trial_of_its_own() -> None:
    shared = Learned(Clock())
    trials = set()
    for shared.prices.num_requests, proposer, verifier in product((1, 2, 8), ProposerName, (JUDGE, VerifierName.EXACT)):
        trials.add(id(shared.trial(proposer, verifier, WAYS)))
    assert len(trials) == 3 * len(ProposerName) * 2
    shared.prices.num_requests = 9  # as 8 are
    assert id(shared.trial(ProposerName.NGRAM, JUDGE, WAYS)) in trials


def test_a_load_never_seen_learns_from_the_nearest_that_was() -> None:
    shared = Learned(Clock())
    truths = {1: dict.fromkeys(WAYS, 3.0) | {WAYS[0]: 1.0}, 16: dict.fromkeys(WAYS, 3.0) | {ALONE: 1.0}}
    for shared.prices.num_requests, truth in truths.items():
        spans(shared.trial(ProposerName.NGRAM, JUDGE, WAYS), truth, 40, lambda way: 1.0)

    found = []
    for shared.prices.num_requests in (2, 8):
        found.append(shared.trial(ProposerName.NGRAM, JUDGE, WAYS).way)

    assert found == [WAYS[0], ALONE]


# Servers ---------------------------------------------------------------------------------------------------------------

STEPS_ALONE = {"num_draft_tokens": 0}
"""Without draft tokens, so that it is looking ahead by steps that is seen to pay or not."""


@pytest.mark.parametrize(("alpha", "least"), [(0.6, 1.2), (0.8, 1.3)])
def test_ten_fresh_servers_all_gain(alpha: float, least: float) -> None:
    """One answer each: whatever the first verdicts were."""
    scenario = fitted(
        acceptance_rate=alpha, num_steps=40, step_tokens=8, draft_token_s=0.15, step_spread=0.9, verdict_s=0.5
    ).scenario
    auto = Policy(Mode.AUTO, 8, fields=STEPS_ALONE)
    found = [simulate(scenario, Policy(Mode.AR), n).latency_s / simulate(scenario, auto, n).latency_s for n in range(10)]
    assert min(found) > least, found


def gains(phases: Sequence[tuple[Conditions, int]], num_questions: int, *, salt: int = 3, **fields: object) -> list[float]:
    """Over the target alone, at the end of each phase of so many sets of requests; one server for all of them."""

    async def serve(server: Server, **fields: object) -> list[float]:
        found = []
        for server.conditions, num_clients in phases:
            await server.answer(num_clients, num_questions - 4, **fields)
            found.append(await server.answer(num_clients, 4, **fields))
        return found

    auto, alone = (served(Server(salt, num_steps=20), partial(serve, **one)) for one in (fields, {"mode": "ar"}))
    return [before / now for before, now in zip(alone, auto, strict=True)]


def test_a_draft_that_loses_its_touch_and_finds_it_again() -> None:
    good, bad = Conditions(liked=0.9, companion=0.15), Conditions(liked=0.02, agreement=0.4, companion=0.15)
    # When a server looks again is its own luck: after 16 questions some have not, after 48 each of the first six has.
    servers = [gains([(good, 1), (bad, 1), (good, 1)], 48, salt=salt, **STEPS_ALONE) for salt in (1, 2, 3)]
    first, second, third = (fmean(phase) for phase in zip(*servers, strict=True))
    assert first > 1.3
    assert second > 0.93  # looking ahead all the same takes a third longer
    assert third > 1.3


def test_a_load_that_comes_and_goes() -> None:
    """What pays one request alone slows sixteen down; and while it does, it is still known what pays one alone."""
    crowded = Conditions(companion=0.15)
    first, second, third = gains([(crowded, 1), (crowded, 16), (crowded, 1)], 6, **STEPS_ALONE)
    assert first > 1.3
    assert second > 0.75  # of few spans there are at that load, some try both ways
    assert third > 1.2


def test_draft_tokens_that_do_not_pay_are_switched_off_and_on_again() -> None:
    cheap, dear = Conditions(agreement=0.7), Conditions(agreement=0.7, verification=4.0)
    servers = [gains([(cheap, 1), (dear, 1), (cheap, 1)], 30, salt=salt, max_depth=0) for salt in (1, 2)]
    first, second, third = (fmean(phase) for phase in zip(*servers, strict=True))
    assert first > 1.5
    assert second > 0.93  # draft tokens all the same take a third longer
    assert third > 1.4


@pytest.mark.parametrize(
    "conditions",
    [Conditions(), Conditions(verdict=10.0), Conditions(companion=0.15)],
    ids=["all pays", "verdicts are slow", "rows are dear"],
)
def test_it_is_nearly_as_fast_as_the_best_fixed_mode(conditions: Conditions) -> None:
    async def serve(server: Server, mode: str) -> float:
        await server.answer(num_questions=10, mode=mode)
        return await server.answer(num_questions=5, mode=mode)

    def over_best(salt: int) -> float:
        modes = ("sd", "lr_sd", "auto")  # the others are slower in each of these
        taken = {mode: served(Server(salt, conditions, num_steps=12), partial(serve, mode=mode)) for mode in modes}
        return taken.pop("auto") / min(taken.values())

    # Nine servers, for a single one may take a span of bad luck for what a way takes.
    found = [over_best(salt) for salt in range(9)]
    assert median(found) <= 1.1, found


# Several processes of the step loop --------------------------------------------------------------------------------------

LESSONS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["step", "drafted", "verdict", "decided", "committed"]),
    st.booleans(),
    st.floats(0.001, 0.1),
    st.integers(1, 40),
)


@answers(30)
@given(st.lists(LESSONS, max_size=60))
def test_what_one_process_measures_all_of_them_learn(tmp_path_factory: pytest.TempPathFactory, lessons: list[Any]) -> None:
    """And they take the same way, whoever measured what in which order."""
    path = tmp_path_factory.mktemp("server") / "notice"
    seats, clock = Seats.make(path), Clock()
    Lessons.make(path)
    loops = [Learned(clock, OtherLoops(seats.seat(loop), Lessons.beside(path))) for loop in range(3)]
    policies = [Measured(request(), learned, 4, JUDGE, can_draft=True) for learned in loops]
    for loop, kind, flag, seconds, num in lessons:
        prices = loops[loop].prices
        match kind:
            case "step":
                with prices.step(drafts=flag) as work:
                    clock.now_s += seconds
                    work.num_tokens = num
            case "drafted":
                with prices.drafting() as work:
                    clock.now_s += seconds
                    work.num_tokens = num
            case "verdict":
                prices.judged(JUDGE, seconds)
            case "decided":
                loops[loop].decided(JUDGE, flag, -seconds if num % 2 else None)
            case "committed":
                clock.now_s += seconds
                policies[loop].committed(num, num, accepted=flag if num % 2 else None)
    for learned in loops:
        learned.catch_up()
    first, *others = [
        (
            state_of(learned.trial(ProposerName.DRAFT_MODEL, JUDGE, WAYS)),
            [state_of(learned.prices.target[drafts].crowding) for drafts in (True, False)],
            [state_of(learned.prices.target[drafts].token_s) for drafts in (True, False)],
            state_of(learned.prices.drafted_token_s),
            learned.acceptance[JUDGE].rate,
            learned.acceptance[JUDGE].confidence.chance(-0.05),
        )
        for learned in loops
    ]
    assert others == [first, first]


def state_of(of: Any) -> Any:
    """All that an object holds, as text that can be compared."""
    if isinstance(of, dict):
        return {str(key): state_of(value) for key, value in of.items()}
    return {name: state_of(value) for name, value in vars(of).items()} if hasattr(of, "__dict__") else repr(of)


def test_a_process_that_has_missed_how_a_trial_began_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lessons, "NUM", 8)
    monkeypatch.setattr(Lessons, "_MARGIN", 1)
    path, clock = tmp_path / "notice", Clock()
    seats = Seats.make(path)
    Lessons.make(path)
    first, late = (Learned(clock, OtherLoops(seats.seat(loop), Lessons.beside(path))) for loop in range(2))
    policy = Measured(request(), first, 4, JUDGE, can_draft=True)
    for drafts in (True, False):
        for _ in range(LEAST_STEPS):
            first.prices.learn("step", drafts, 0.0, 1.0, 10)
    for _ in range(12 * SPAN_STEPS):
        clock.now_s += 1.0
        policy.committed(10)
    late.catch_up()
    assert set(late._trials) == set(first._trials) and late._trials


def test_a_process_that_has_missed_how_a_trial_began_takes_the_others_way() -> None:
    """It would heed no step of theirs else, nor they of its own."""
    late, about = Learned(Clock()), (90.0, 240, SPAN_STEPS, 64)
    late._learn("committed", 6, "draft_model", JUDGE, WAYS, True, (False, False), [1.0] * len(WAYS), True, False, *about)
    trial = late._trials[6, "draft_model", JUDGE, WAYS]
    assert (trial.way, trial._span.num_steps) == (Way(False, False), SPAN_STEPS)


def test_steps_that_were_begun_at_another_load_count_for_none() -> None:
    """A call of the target alone that outlasts a burst was slow by the others' doing."""
    shared = Learned(Clock())
    policy = Measured(request(), shared, 0, JUDGE, can_draft=False)
    of = (policy.request.proposer, JUDGE, (Way(False, False),))
    with ExitStack() as burst:
        for _ in range(8):
            burst.enter_context(shared.prices.request())
        begun = shared.trial(*of).turn
    trial = shared.trial(*of)
    for turn, num_spans in ((begun, 0), (trial.turn, 1)):
        shared.committed(of, turn, 90.0, 240, 2 * SPAN_STEPS, policy._predicted, fresh=True)
        assert trial.num_spans == num_spans


def test_a_request_joins_a_way_with_its_first_step_of_it() -> None:
    clock = Clock()
    shared = Learned(clock)
    trial = shared.trial(request().proposer, JUDGE, WAYS[1::2])
    first, second = (Measured(request(), shared, 4, JUDGE, can_draft=False) for _ in range(2))

    def commit(policy: Measured, num_steps: int) -> None:
        for _ in range(num_steps):
            clock.now_s += 1.0
            policy.committed(10)

    with shared.prices.request():  # the trial's; these two are followed without being in flight
        trial.way, trial._num_turns = trial._ways[1], 1
        commit(first, 2)  # one was begun the other way, the next joins
        commit(first, SPAN_STEPS - 1)
        commit(second, 2)
        commit(first, SPAN_STEPS - 1)
        assert trial.num_spans == 0
        commit(first, 1)
        assert trial.num_spans == 1


def test_spans_end_where_the_load_goes_up_and_down_all_the_time() -> None:
    """Each step then joins the way of its load."""
    clock = Clock()
    shared = Learned(clock)
    of = request().proposer, JUDGE, WAYS[1::2]
    policy = Measured(request(), shared, 4, JUDGE, can_draft=False)
    with shared.prices.request():
        quiet = shared.trial(*of)
        with ExitStack() as crowd:
            for _ in range(7):
                crowd.enter_context(shared.prices.request())
            busy = shared.trial(*of)
        busy.way = next(way for way in busy._ways if way != quiet.way)
        for _ in range(1 + MOST_OVER * SPAN_STEPS):
            with ExitStack() as crowd:
                for _ in range(7):
                    crowd.enter_context(shared.prices.request())
                policy.begin()
                clock.now_s += 1.0
                policy.committed(10)
            policy.begin()
            clock.now_s += 1.0
            policy.committed(10)
    assert quiet.num_spans > 0


def test_answers_of_one_call_each_count_at_the_load_that_their_requests_make() -> None:
    """A request that comes is one more in flight than it finds. Steps of another load say nothing of this one."""

    async def serve(server: Server) -> tuple[int, int]:
        await server.answer(num_clients=2, num_questions=10)
        assert server.world.learned is not None
        (trial,) = (one for key, one in server.world.learned._trials.items() if key[0] == 1)
        trial.way = trial._best = ALONE
        trial._kept[ALONE] = 2
        before = trial.num_spans
        await server.answer(num_clients=2, num_questions=40)
        return before, trial.num_spans

    before, after = served(Server(num_steps=4), serve)
    assert after > before


def test_a_proposer_that_is_gone_leaves_the_ways_without_draft_tokens() -> None:
    """Else steps with draft tokens would wait for a price that they never get, and the trial for steps without them."""
    clock = Clock()
    policy = Measured(request(), Learned(clock), 4, JUDGE, can_draft=True)
    assert policy.uses_draft_tokens, "their price is not known"
    policy.lose_draft_tokens()
    for _ in range(3 * SPAN_STEPS):
        assert not policy.uses_draft_tokens
        clock.now_s += 1.0
        policy.committed(10)
    assert policy._trial.num_spans == 2, "all but the first step, which began before, or three spans less it"


def test_a_row_is_weighed_and_a_way_tried_by_the_requests_of_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    seats = Seats.make(path)
    Lessons.make(path)
    learned = Learned(Clock(), OtherLoops(seats.seat(0), Lessons.beside(path)))
    with learned.prices.request():
        seats.seat(0).enter()
        alone, trial_alone = learned.least_chance, learned.trial(ProposerName.NGRAM, JUDGE, WAYS)
        for _ in range(7):
            seats.seat(1).enter()
        assert learned.least_chance == pytest.approx(8 * alone)
        assert learned.trial(ProposerName.NGRAM, JUDGE, WAYS) is not trial_alone
