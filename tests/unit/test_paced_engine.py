"""The engine at a pace: its answers come when the hardware's would. Time is scripted, so every figure is the cost function's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lr_backend.emulated.engine import MAX_JITTER_S
from lr_backend.emulated.feed import Feed
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable, Overloaded
from lr_backend.hardware.cost import Iteration, Join
from lr_backend.hardware.overheads import Bound
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.hardware.profile import ProfileKey
from lr_backend.hardware.sharing import IDLE, LAWS, Board, CardSharing, Demand
from tests.support.paced import TARGET, Bench, close

COSTS, OVERHEADS = TARGET.costs(), TARGET.overheads()
HOP_S = OVERHEADS.hop_ms / 1e3
WITHIN_S = 3e-4
"""Of an answer: the clock ticks when it is looked at, and waits end by watching it."""
SECOND = ProfileKey("h200_sxm", "Qwen3-1.7B", 1, "bfloat16")

MakeBench = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[MakeBench]:
    made: list[Bench] = []

    def one(**fields: Any) -> Bench:
        made.append(Bench(**fields))
        return made[-1]

    yield one
    for bench in made:
        close(bench.engine)
        assert bench.texts.is_closed


def run_s(num_prompt: int, num_new: int, company: int = 0) -> float:
    """A prompt and its tokens, alone or beside others that decode as long texts."""
    decodes = sum(COSTS.seconds(Iteration((), 1 + company, (1 + company) * (num_prompt + index))) for index in range(1, num_new))
    return COSTS.seconds(Iteration((Join(num_prompt, 0),))) + decodes


def test_a_call_takes_a_hop_its_iterations_and_a_hop(make: MakeBench) -> None:
    bench = make()
    bench.time.at(1.0, lambda: bench.ask("a", 20, 40))
    answer = bench.answer("a")
    assert answer.token_ids == tuple(range(1, 41))
    assert answer.at_s == pytest.approx(1.0 + 2 * HOP_S + run_s(20, 40), abs=WITHIN_S)


def test_a_prompt_joins_between_two_iterations_and_all_that_decode_wait_for_it(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("long", 20, 30))
    # In the middle of an iteration: the next one is for both.
    bench.time.at(HOP_S + run_s(20, 5) - HOP_S + 0.004, lambda: bench.ask("second", 500, 1))
    second = bench.answer("second")
    joined = COSTS.seconds(Iteration((Join(500, 0),), 1, 25))
    assert joined > 2.0 * COSTS.seconds(Iteration((), 1, 25))
    begun = HOP_S + run_s(20, 6)
    assert second.at_s == pytest.approx(begun + joined + HOP_S, abs=WITHIN_S)
    alone = COSTS.seconds(Iteration((), 1, 26))
    assert bench.answer("long").at_s == pytest.approx(2 * HOP_S + run_s(20, 30) + joined - alone, abs=2 * WITHIN_S)


def test_requests_together_share_iterations(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: [bench.ask(name, 32, 50) for name in "abcd"])
    last = max(bench.answer(name).at_s for name in "abcd")
    assert last < 1.2 * (2 * HOP_S + run_s(32, 50))
    assert bench.engine.stats().mean_batch_size == pytest.approx(4.0, rel=0.05)  # the first joins alone


def test_a_verification_brings_its_drafts_and_one_more_in_one_iteration(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("v", 20, 9, drafts=8))
    answer = bench.answer("v")
    assert answer.token_ids == (*range(1, 9), 7)
    assert answer.at_s == pytest.approx(2 * HOP_S + COSTS.seconds(Iteration((Join(28, 0, 8),))), abs=WITHIN_S)


def test_sampled_drafts_are_charged_for_their_logits_on_the_way_and_inside(make: MakeBench) -> None:
    greedy, sampled = make(), make()
    for bench, is_sampled in ((greedy, False), (sampled, True)):
        bench.time.at(0.0, lambda bench=bench, is_sampled=is_sampled: bench.ask("v", 20, 9, drafts=8, sampled=is_sampled))
    more = sampled.answer("v").at_s - greedy.answer("v").at_s
    wanted_ms = OVERHEADS.draft_logits_ms(8) + OVERHEADS.draft_logits_inside_ms(8)
    assert more == pytest.approx(wanted_ms / 1e3, abs=2 * WITHIN_S)
    assert wanted_ms > 3.0


def test_a_cancel_is_answered_after_the_iteration_with_what_there_is(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("a", 20, 400))
    bench.time.at(run_s(20, 10) + 0.002, lambda: bench.engine.cancel("a"))
    answer = bench.answer("a")
    assert answer.token_ids == tuple(range(1, 12))
    assert answer.at_s == pytest.approx(2 * HOP_S + run_s(20, 11), abs=WITHIN_S)
    assert bench.texts.cancelled == ["a"]
    bench.answers.clear()
    bench.time.at(2.0, lambda: bench.ask("a", 20, 1))
    assert bench.answer("a").token_ids == (1,)


def test_unknown_ids_are_cancelled_without_a_word(make: MakeBench) -> None:
    make().engine.cancel("nobody")


def test_slow_motion_stretches_everything(make: MakeBench) -> None:
    times = []
    for factor in (1.0, 3.0):
        bench = make(pace=replace(TARGET, slow_motion=factor))
        bench.time.at(0.0, lambda bench=bench: bench.ask("v", 40, 9, drafts=8, sampled=True))
        times.append(bench.answer("v").at_s)
    assert times[1] == pytest.approx(3.0 * times[0], abs=WITHIN_S * 2)


def test_a_text_that_is_late_delays_what_follows_and_is_counted(make: MakeBench) -> None:
    """Start to start: no time is made up for."""
    bench = make()
    bench.texts.hold = True
    bench.time.at(0.0, lambda: bench.ask("a", 20, 20))
    bench.time.at(0.5, bench.texts.release)
    first = COSTS.seconds(Iteration((Join(20, 0),)))
    assert bench.answer("a").at_s == pytest.approx(0.5 + run_s(20, 20) - first + HOP_S, abs=WITHIN_S)
    stats = bench.engine.stats()
    assert stats.late_s == pytest.approx(0.5 - HOP_S - first, abs=WITHIN_S)
    assert stats.paced_s == pytest.approx(run_s(20, 20), abs=WITHIN_S)


def test_a_thread_that_is_held_up_is_late_and_says_so(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """Up to a block of iterations needs nobody: all alike, they pass by themselves."""
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("a", 20, 900))
    bench.time.at(2.0, lambda: bench.time.stall(1.0))
    with caplog.at_level(logging.WARNING):
        answer = bench.answer("a")
    late_s = bench.engine.stats().late_s
    assert 1.0 - 32 * run_s(900, 2) < late_s <= 1.0
    assert answer.at_s == pytest.approx(late_s + 2 * HOP_S + run_s(20, 900), abs=0.01)
    (said,) = caplog.messages
    assert "late over 1" in said
    assert "Qwen3-32B TP 2 bfloat16 on h200_sxm, compiled" in said


def test_a_request_that_comes_while_the_thread_is_held_up_joins_when_it_came(make: MakeBench) -> None:
    """The iterations that it would have taken part in do not pass without it: they are late."""
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("a", 20, 900))
    bench.time.at(2.0, lambda: (bench.ask("b", 20, 1), bench.time.stall(0.2)))
    joining_s = COSTS.seconds(Iteration((Join(20, 0),), 1, 200))
    late_s = bench.engine.stats().late_s if bench.answer("b") else 0.0
    assert 0.2 - joining_s < late_s < 0.2
    assert bench.answer("b").at_s == pytest.approx(2.2 + joining_s + HOP_S, abs=WITHIN_S)


def test_an_idle_engine_that_wakes_up_late_is_late(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: (bench.ask("a", 20, 4), bench.time.stall(0.5)))
    answer, stats = bench.answer("a"), bench.engine.stats()
    assert stats.late_s == pytest.approx(0.5 - HOP_S - run_s(20, 1), abs=WITHIN_S)
    assert answer.at_s == pytest.approx(stats.late_s + 2 * HOP_S + run_s(20, 4), abs=WITHIN_S)
    assert stats.busy_s == pytest.approx(stats.paced_s + stats.late_s, abs=WITHIN_S)


def test_the_times_that_an_answer_carries_are_the_hardwares_where_a_thread_wakes_up_a_little_late(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: (bench.ask("a", 20, 4), bench.time.stall(HOP_S + 0.9 * MAX_JITTER_S)))
    result = bench.answer("a").result
    assert isinstance(result, EngineResponse)
    assert result.generation().total_s == pytest.approx(run_s(20, 4), abs=1e-6)


@pytest.mark.parametrize("is_idle", [True, False])
def test_who_comes_after_an_iteration_was_to_end_is_not_in_the_next_one_from_before(make: MakeBench, is_idle: bool) -> None:
    """The thread wakes up late, and both have happened by then: an iteration was over, and a little later a call came."""
    bench = make()
    ended_s, later_s = HOP_S + run_s(20, 1), 0.3 * MAX_JITTER_S
    bench.time.at(0.0, lambda: bench.ask("a", 20, 1 if is_idle else 3))
    bench.time.at(ended_s + later_s - HOP_S, lambda: (bench.ask("b", 20, 1), bench.time.stall(HOP_S + later_s)))
    result = bench.answer("b").result
    assert isinstance(result, EngineResponse)
    timing = result.generation()
    queue_s = 0.0 if is_idle else COSTS.seconds(Iteration((), 1, 21)) - later_s
    join = Iteration((Join(20, 0),)) if is_idle else Iteration((Join(20, 0),), 1, 22)
    assert timing.queue_s == pytest.approx(queue_s, abs=1e-5)
    assert timing.total_s == pytest.approx(queue_s + COSTS.seconds(join), abs=1e-5)


def test_an_answer_that_is_given_late_is_late(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("a", 20, 2))
    bench.time.at(HOP_S + run_s(20, 2) + HOP_S / 2, lambda: bench.time.stall(0.3))
    assert bench.answer("a").at_s == pytest.approx(2 * HOP_S + run_s(20, 2) + 0.3 - HOP_S / 2, abs=WITHIN_S)
    stats = bench.engine.stats()
    assert stats.late_s == pytest.approx(0.3 - HOP_S / 2, abs=WITHIN_S)
    assert stats.busy_s == pytest.approx(stats.paced_s, abs=WITHIN_S), "it computed nothing meanwhile"


def test_calls_with_many_draft_tokens_hold_nobody_else_up_on_the_way(make: MakeBench) -> None:
    bench = make(pace=replace(TARGET, one_hot=True))
    bench.time.at(0.0, lambda: (bench.ask("verified", 20, drafts=8, sampled=True), bench.ask("plain", 20, 1)))
    assert bench.answer("plain").at_s == pytest.approx(2 * HOP_S + run_s(20, 1), abs=WITHIN_S)


def test_an_engine_that_keeps_its_pace_says_nothing(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("a", 20, 1000))
    bench.answer("a")
    stats = bench.engine.stats()
    assert stats.paced_s > 10.0
    assert stats.late_s < 1e-3 * stats.paced_s
    assert caplog.messages == []


def test_a_text_that_cannot_be_computed_fails_its_call_alone(make: MakeBench) -> None:
    bench = make()
    bench.time.at(0.0, lambda: bench.ask("good", 20, 30))

    def ask_bad() -> None:
        bench.texts.hold = True
        bench.ask("bad", 20, 30)
        bench.texts.fail(EngineError("the model failed"))

    bench.time.at(0.1, ask_bad)
    result = bench.answer("bad").result
    assert isinstance(result, EngineError)
    assert result.message == "the model failed"
    assert len(bench.answer("good").token_ids) == 30
    assert bench.engine.stats().num_failed == 1


def test_what_breaks_a_rule_is_refused_at_once(make: MakeBench) -> None:
    bench = make(limits={"max_batch_size": 1, "max_queue_size": 1})
    bench.texts.hold = True
    with pytest.raises(EngineRejected, match="max_seq_len"):
        bench.ask("long", 2000)
    bench.ask("a")
    with pytest.raises(EngineRejected, match="'a' is in flight"):
        bench.ask("a")
    bench.ask("b")
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        bench.ask("c")
    bench.engine.close()
    assert isinstance(bench.answer("a").result, EngineUnavailable)
    with pytest.raises(EngineUnavailable):
        bench.ask("d")


def test_a_callers_failure_is_not_the_engines(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make()

    def broken(result: object) -> None:
        raise RuntimeError("the caller's")

    from tests.support.embedded_engines import request

    bench.time.at(0.0, lambda: bench.engine.submit(request((1, 2, 3), 2, request_id="a"), broken))
    bench.time.at(1.0, lambda: bench.ask("b"))
    assert bench.answer("b").token_ids == (1, 2, 3, 4)
    assert "on_done of request 'a' failed" in caplog.text


@pytest.mark.parametrize("sharing", CardSharing)
def test_who_shares_a_card_is_slowed_by_the_other(make: MakeBench, tmp_path: Path, sharing: CardSharing) -> None:
    """The other's kernels are as long as this one's, and it is never idle."""
    cards = {"target": (0, 1), "draft": (1,), "judge": (2,)}
    pace = replace(TARGET, role="target", cards=cards, board=tmp_path / "board", sharing=sharing)
    bench = make(pace=pace)
    other = Board.of(tmp_path / "board", "draft", cards, sharing)
    elsewhere = Board.of(tmp_path / "board", "judge", cards, sharing)
    own = COSTS.demand(Iteration((), 1, 30))
    other_demand = Demand(1.0, own.kernel_s)
    elsewhere.write(other_demand)
    bench.time.at(0.0, lambda: bench.ask("alone", 20, 20))
    alone_s = bench.answer("alone").at_s - 2 * HOP_S
    assert alone_s == pytest.approx(run_s(20, 20), abs=2 * WITHIN_S)

    other.write(other_demand)
    bench.time.at(1.0, lambda: bench.ask("shared", 20, 20))
    shared_s = bench.answer("shared").at_s - 1.0 - 2 * HOP_S
    assert shared_s / alone_s == pytest.approx(LAWS[sharing](own, [other_demand]), rel=0.06)
    other.close()
    elsewhere.close()


def test_inside_drafts_lengthen_the_iteration_that_verifies_them(make: MakeBench) -> None:
    pace = replace(TARGET, runtime=Runtime.LLMAPI, draft=ProfileKey("h200_sxm", "Qwen3-1.7B", 2, "bfloat16"))
    costs = pace.costs()
    assert costs.seconds(Iteration((), 1, 100, 5, 5)) > costs.seconds(Iteration((), 1, 100)) + 5e-3


def test_a_pace_survives_the_way_through_a_config_file(tmp_path: Path) -> None:
    pace = EnginePace(
        SECOND,
        runtime=Runtime.LLMAPI,
        draft=SECOND,
        role="target",
        cards={"target": (0, 1), "draft": (2,)},
        sharing=CardSharing.TIME_SLICES,
        board=tmp_path / "board",
        bound=Bound.HIGH,
        slow_motion=2.5,
    )
    assert EnginePace.from_json(pace.as_json()) == pace


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "pace: profile"),
        ("no json", "pace"),
        (EnginePace(SECOND).as_json().replace('"slow_motion":1.0', '"slow_motion":0.5'), "slow_motion=0.5: from 1 to 100"),
    ],
)
def test_a_pace_that_is_none_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EnginePace.from_json(text)
    assert "\n" not in caught.value.message


def test_a_pace_without_a_profile_stops_the_engine_from_starting(make: MakeBench) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3-32B.*TP 16"):
        Bench(pace=EnginePace(replace(TARGET.profile, tp_size=16)))


def test_a_cancel_that_comes_while_its_call_is_submitted_is_not_lost(make: MakeBench) -> None:
    bench = make()
    begin = bench.texts.begin

    def begin_and_cancel(request: EngineRequest) -> Feed:
        bench.engine.cancel(request.request_id)
        return begin(request)

    bench.texts.begin = begin_and_cancel  # type: ignore[method-assign]
    bench.time.at(0.0, lambda: bench.ask("a", 20, 40))
    assert len(bench.answer("a").token_ids) < 40


def test_a_call_that_cannot_begin_is_none(make: MakeBench) -> None:
    """Whatever keeps it from beginning: its id and its place are free again."""
    bench = make()
    begin, bench.texts.begin = bench.texts.begin, lambda request: 1 / 0  # type: ignore[method-assign, assignment]
    for _ in range(100):
        with pytest.raises(ZeroDivisionError):
            bench.ask("a")
    bench.texts.begin = begin  # type: ignore[method-assign]
    bench.time.at(0.0, lambda: bench.ask("a"))
    assert bench.answer("a").token_ids == (1, 2, 3, 4)


def test_a_call_that_meets_the_engines_end_is_answered_once(make: MakeBench) -> None:
    bench = make()

    def close_and_fail(request: EngineRequest) -> Feed:
        bench.engine.close()
        raise EngineUnavailable("the engine is closed")

    bench.texts.begin = close_and_fail  # type: ignore[method-assign]
    bench.ask("a")
    assert isinstance(bench.answer("a").result, EngineUnavailable)


def test_an_engine_that_waits_for_its_text_leaves_the_card_to_others(make: MakeBench, tmp_path: Path) -> None:
    cards = {"target": (0,), "draft": (0,)}
    bench = make(pace=replace(TARGET, role="target", cards=cards, board=tmp_path / "board", sharing=CardSharing.MPS))
    own = Board.of(tmp_path / "board", "draft", cards, CardSharing.MPS)
    slowdowns: list[float] = []

    def look() -> None:
        own.write(Demand(0.5, 1e-3))
        slowdowns.append(own.slowdown())
        own.write(IDLE)

    bench.texts.hold = True
    bench.time.at(0.0, lambda: bench.ask("a", 20, 20))
    bench.time.at(HOP_S + 0.5 * COSTS.seconds(Iteration((Join(20, 0),))), look)
    bench.time.at(0.4, look)
    bench.time.at(0.5, bench.texts.release)
    bench.answer("a")
    assert slowdowns[0] > 1.0
    assert slowdowns[1] == 1.0
    own.close()
