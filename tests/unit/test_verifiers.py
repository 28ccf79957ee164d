"""Each verifier on its own: what it accepts, and that whatever goes wrong rejects under its own reason."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.plug_ins.verifiers import Chance, Embedding, Grade, grade_prompt, parse_grade
from lr_backend.engine import EngineCall, Generation
from lr_backend.errors import EngineUnavailable, InvalidRequest, LookaheadError
from lr_backend.plugins import PlugIn
from lr_backend.request import LookaheadRequest, Mode, VerifierName
from lr_backend.steps.step import Step, StepEnd
from lr_backend.testing import ScriptedEngine, run_virtual
from lr_backend.verify import ExactVerifier, Reason, StepPair, Verdict, VerifierParts, make_verifier
from lr_backend.verify.cascade import CascadeVerifier, numeric_veto, same_text
from lr_backend.verify.guarded import GuardedVerifier
from lr_backend.verify.judge_prompt import judges_prefill
from tests.support.examples import answers
from tests.support.world import CONFIG, MODELS, World, imitator, storyteller

PREFIX = np.asarray([1, 2, 3], dtype=np.int32)


def make_pair(target: str = "a", drafted: str = "b", *, ids: tuple[int, ...] = (5, 6, 7)) -> StepPair:
    return StepPair(Step((9, *ids), StepEnd.DELIMITER), Step(ids, StepEnd.DELIMITER), target, drafted, "call", PREFIX)


@dataclass
class Similarity:
    """An embedding model that says what it was told to; exceptions are raised."""

    answer: float | Exception
    delay_s: float = 0.0
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def similarity(self, first: str, second: str) -> float:
        self.calls.append((first, second))
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(frozen=True)
class Sure:
    """A verifier that always says the same."""

    accepted: bool

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(self.accepted, Reason.JUDGE, verifier="judge")


def parts_of(target: Any = None, **more: Any) -> VerifierParts:
    engine = target or ScriptedEngine(lambda context, seed: 0)
    return VerifierParts(engine, engine, MODELS.tokenizer, MODELS.judge_prompt, MODELS.judge_tokenizer, **more)


# Plug-ins that the paper compares with ------------------------------------------------------------------------------


@pytest.mark.parametrize(("cosine", "accepted"), [(0.95, True), (0.949, False), (math.nan, False)])
def test_a_threshold_is_the_least_score_that_accepts(cosine: float, accepted: bool) -> None:
    verdict = run_virtual(Embedding(model=Similarity(cosine)).verify(make_pair()))

    assert (verdict.accepted, verdict.reason) == (accepted, Reason.PLUG_IN)


def drawn(probability: float, seed: int, pair: StepPair) -> Verdict:
    verifier = Chance(probability).for_request(parse(seed=seed), parts_of())
    return run_virtual(verifier.verify(pair))


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple), st.floats(0, 1))
def test_chance_is_a_function_of_the_pair_and_the_seed(seed: int, ids: tuple[int, ...], probability: float) -> None:
    first, second = (drawn(probability, seed, make_pair(ids=ids)) for _ in range(2))

    assert first == second
    assert first.score is not None and 0.0 <= first.score < 1.0
    assert first.accepted == (first.score < probability)
    assert not drawn(0.0, seed, make_pair(ids=ids)).accepted
    assert drawn(1.0, seed, make_pair(ids=ids)).accepted


def test_chance_accepts_its_share() -> None:
    accepted = [drawn(0.3, seed, make_pair()).accepted for seed in range(2000)]

    assert 0.26 < sum(accepted) / len(accepted) < 0.34


@pytest.mark.parametrize("asks", [True, False])
def test_chance_may_take_the_time_of_a_verdict(asks: bool) -> None:
    judge = ScriptedEngine(lambda context, seed: 0)
    verifier = Chance(1.0, asks_judge=asks).for_request(parse(), parts_of(judge))

    assert run_virtual(verifier.verify(make_pair())).accepted
    assert len(judge.calls) == asks


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (Chance, {"probability": 1.5}, "probability=1.5: from 0 to 1"),
        (Grade, {"least": 0.0}, "least=0: from 1 to 9"),
        (Embedding, {"least": 2.0}, "least=2: from 0 to 1"),
    ],
)
def test_options_out_of_range_are_refused(factory: Callable[..., object], options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        factory(**options)


# What guards a deployment's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Similarity(0.99), Verdict(True, Reason.PLUG_IN, 0.99, "close")),
        (Similarity(0.5), Verdict(False, Reason.PLUG_IN, 0.5, "close")),
        (Similarity(0.99, delay_s=3.0), Verdict(False, Reason.TIMEOUT, None, "close")),
        (Similarity(LookaheadError("broken")), Verdict(False, Reason.VERIFIER_ERROR, None, "close")),
        (Similarity(TimeoutError("its own")), Verdict(False, Reason.VERIFIER_ERROR, None, "close")),
    ],
)
def test_a_plug_in_that_fails_or_is_slow_rejects(model: Similarity, expected: Verdict) -> None:
    guarded = GuardedVerifier("close", Embedding(model=model), timeout_s=1.0)

    assert run_virtual(guarded.verify(make_pair(" a\n\n", "b"))) == expected
    assert model.calls == [("a", "b")]


@pytest.mark.parametrize(
    "answer",
    [
        True,
        None,
        Verdict(True, "fine"),  # type: ignore[arg-type]
        Verdict("yes", Reason.PLUG_IN),  # type: ignore[arg-type]
        Verdict(True, Reason.PLUG_IN, "0.9"),  # type: ignore[arg-type]
        Verdict(True, Reason.PLUG_IN, [0.9]),  # type: ignore[arg-type]
        Verdict(True, Reason.PLUG_IN, math.nan),
        Verdict(True, Reason.PLUG_IN, np.float32("inf")),  # type: ignore[arg-type]
        Verdict(True, Reason.PLUG_IN, 0.9, 7),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_is_no_verdict_rejects(answer: object) -> None:
    class Talks:
        async def verify(self, pair: StepPair) -> Any:
            return answer

    assert run_virtual(GuardedVerifier("talks", Talks(), None).verify(make_pair())) == Verdict(
        False, Reason.GARBAGE, verifier="talks"
    )


def test_a_verdict_that_is_late_rejects_though_its_verifier_hides_that() -> None:
    class Hides:
        async def verify(self, pair: StepPair) -> Verdict:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(9.0)
            return Verdict(True, Reason.PLUG_IN)

    assert run_virtual(GuardedVerifier("hides", Hides(), 5.0).verify(make_pair())) == Verdict(
        False, Reason.TIMEOUT, verifier="hides"
    )
    assert run_virtual(GuardedVerifier("hides", Hides(), 10.0).verify(make_pair())).accepted


@pytest.mark.parametrize("answer", [ZeroDivisionError(), SystemExit(), "no verdict"], ids=repr)
def test_a_verifier_that_fails_for_every_step_is_logged_once(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        async def verify(self, pair: StepPair) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

    guarded = GuardedVerifier("fails", Fails(), None)
    assert not any(run_virtual(guarded.verify(make_pair())).accepted for _ in range(3))
    (line,) = caplog.records
    assert "the verifier fails" in line.getMessage() and bool(line.exc_info) is isinstance(answer, BaseException)


def test_a_score_beyond_every_float_rejects() -> None:
    class Says:
        async def verify(self, pair: StepPair) -> Verdict:
            return Verdict(True, Reason.PLUG_IN, 10**400)

    found = run_virtual(GuardedVerifier("says", Says(), None).verify(make_pair()))
    assert found == Verdict(False, Reason.VERIFIER_ERROR, verifier="says")


@pytest.mark.parametrize("accepted", [True, False])
def test_a_verdict_by_a_comparison_of_numpy_is_one(accepted: bool) -> None:
    class Says:
        async def verify(self, pair: StepPair) -> Verdict:
            score = np.float32(0.5)
            return Verdict(score < float(accepted), Reason.PLUG_IN, score)  # type: ignore[arg-type]

    found = run_virtual(GuardedVerifier("says", Says(), None).verify(make_pair()))
    assert found == Verdict(accepted, Reason.PLUG_IN, 0.5, "says") and isinstance(found.accepted, bool)


@pytest.mark.parametrize("reason", [Reason.EXACT, Reason.SAME_TEXT, Reason.LATE, Reason.RISK_BUDGET, Reason.PLUG_IN])
def test_a_plug_in_cannot_say_what_is_settled_without_it(reason: Reason) -> None:
    class Says:
        async def verify(self, pair: StepPair) -> Verdict:
            return Verdict(True, reason)

    found = run_virtual(GuardedVerifier("says", Says(), None).verify(make_pair()))
    assert found == Verdict(True, Reason.PLUG_IN, verifier="says")


def test_a_verdict_that_waits_for_a_task_that_was_cancelled_rejects() -> None:
    """A plug-in may share a call between pairs; where one of them is cancelled, the other one's request goes on."""

    class Shares:
        async def verify(self, pair: StepPair) -> Verdict:
            shared = asyncio.create_task(asyncio.sleep(1.0))
            shared.cancel()
            await shared
            raise AssertionError

    found = run_virtual(GuardedVerifier("shares", Shares(), 5.0).verify(make_pair()))
    assert found == Verdict(False, Reason.VERIFIER_ERROR, verifier="shares")


def test_a_cancelled_verdict_is_cancelled() -> None:
    async def cancelled() -> None:
        asked = asyncio.create_task(
            GuardedVerifier("slow", Embedding(model=Similarity(1.0, delay_s=9.0)), 20.0).verify(make_pair())
        )
        await asyncio.sleep(1.0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    run_virtual(cancelled())


# The cascade -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafted", "accepted"),
    [
        ("So it is 5.\n\n", "So  it is 5.", True),
        ("So X is 5", "So x is 5", None),
        ("a = 1\n\n    b  = 2 \n", "a  = 1\n    b = 2", True),
        pytest.param("for x in l:\n    s += x\nreturn s", "for x in l:\n    s += x\n    return s", False, id="another program"),
        ("    return s\n\n", "return s\n\n", False),
        (" So it is.", "So it is.", True),
        pytest.param("a:\n b: 1", "a:\nb: 1", False, id="indented by one blank"),
        pytest.param("s.replace('  ', ' ')", "s.replace(' ', '  ')", None, id="white space within quotes"),
        pytest.param("if s == 'a  b':\n    x\ny", "if s == 'a b':\n    x\n    y", False, id="another program with quotes"),
        pytest.param('"""a\n\nb"""', '"""a\nb"""', None, id="a blank line within quotes"),
        ("Tom's is 5.\n\n", " Tom's is 5.", True),
        pytest.param("So it is \ufffd", "So it is \ufffd", False, id="cut inside two characters that may differ"),
    ],
)
def test_white_space_apart_the_same_words_are_accepted(target: str, drafted: str, accepted: bool | None) -> None:
    verdict = same_text(make_pair(target, drafted))
    assert (verdict and verdict.accepted) is accepted
    if verdict is not None:
        assert verdict.reason is (Reason.SAME_TEXT if verdict.accepted else Reason.DIFFERENT)


def test_the_numeric_stage_rejects_or_says_nothing() -> None:
    assert numeric_veto(make_pair("5 apples", "6 apples")) == Verdict(False, Reason.NUMBERS, None, "numbers")
    assert numeric_veto(make_pair("5 apples", "5 pears")) is None


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (make_pair("It is 5", "It  is 5"), Verdict(True, Reason.SAME_TEXT, None, "same_text")),
        (make_pair("It is 5", "It is 6"), Verdict(False, Reason.NUMBERS, None, "numbers")),
        (make_pair("It is 5", "Then it is 5"), Verdict(False, Reason.JUDGE, None, "judge")),
    ],
)
def test_the_first_stage_that_decides_signs_the_verdict(pair: StepPair, expected: Verdict) -> None:
    cascade = CascadeVerifier((same_text, numeric_veto), Sure(False))

    assert run_virtual(cascade.verify(pair)) == expected


# Models that are asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "grade"), [("0", 0), ("9", 9), ("", None), ("10", None), (" 7", None), ("٣", None), ("x", None)]
)
def test_a_grade_is_one_digit(text: str, grade: int | None) -> None:
    assert parse_grade(text) == grade


@dataclass
class Grader:
    """A target whose tokens are the digits; the last one is none."""

    token: int
    calls: list[EngineCall] = field(default_factory=list)
    fail: bool = False

    async def generate(self, call: EngineCall) -> Generation:
        self.calls.append(call)
        if self.fail:
            raise EngineUnavailable("down")
        await asyncio.sleep(1.0)
        return Generation((self.token,))

    async def close(self) -> None: ...


class Digits:
    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: list[int], **_: object) -> str:
        return [*"0123456789", "yes"][ids[0]]


@pytest.mark.parametrize(
    ("engine", "timeout_s", "expected"),
    [
        (Grader(9), None, Verdict(True, Reason.PLUG_IN, 9.0, "grade")),
        (Grader(7), None, Verdict(False, Reason.PLUG_IN, 7.0, "grade")),
        (Grader(10), None, Verdict(False, Reason.GARBAGE, None, "grade")),
        (Grader(9), 0.5, Verdict(False, Reason.TIMEOUT, None, "grade")),
        (Grader(9, fail=True), None, Verdict(False, Reason.VERIFIER_ERROR, None, "grade")),
    ],
)
def test_the_target_grades_in_one_token_or_not_at_all(engine: Grader, timeout_s: float | None, expected: Verdict) -> None:
    parts = replace(parts_of(engine), tokenizer=Digits(), judge_s=timeout_s)  # type: ignore[arg-type]
    grade = Grade()
    grade._prompt = MODELS.judge_prompt
    guarded = GuardedVerifier("grade", grade.for_request(parse(), parts), timeout_s)

    assert run_virtual(guarded.verify(make_pair("①", "②"))) == expected
    (call,) = engine.calls
    assert (call.max_new_tokens, call.request_id) == (1, "call")


class Turns:
    """Renders a chat as text and "encodes" it as characters."""

    added_tokens_decoder: Mapping[int, str] = MappingProxyType({})

    def __init__(self, opening: str) -> None:
        self.opening, self.chat_template = opening, ""

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: object) -> str:
        return "".join(turn["content"] for turn in conversation) + self.opening

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("opening", "tail"),
    [("<A>", "<A><think>\n\n</think>\n\n["), ("<A><think>\n", "<A><think>\n\n</think>\n\n[")],
)
def test_a_grade_is_asked_for_with_the_reasoning_closed(opening: str, tail: str) -> None:
    marked = replace(parts_of(), tokenizer=Turns(opening), think_open="<think>", think_close="</think>")  # type: ignore[arg-type]
    text = "".join(map(chr, grade_prompt(marked).ids("one", "two")))

    assert text.endswith(tail)
    assert text.count("<think>") == 1
    assert "one" in text and "two" in text
    turns = Turns(opening)
    assert judges_prefill(turns) == "["
    turns.chat_template = "{{ content.split('</think>')[-1] }}"
    assert text.endswith(opening + judges_prefill(turns)), "a judge that reasons is asked likewise"
    plain = grade_prompt(replace(marked, think_open=None)).ids("one", "two")
    assert "</think>" not in "".join(map(chr, plain))


# The choice --------------------------------------------------------------------------------------------------------


def parse(**fields: object) -> LookaheadRequest:
    return LookaheadRequest.parse({"text_input": "?", **fields})


@pytest.mark.parametrize("mode", ["lr", "lossless"])
def test_what_this_server_lacks_is_refused_before_anything_starts(mode: str) -> None:
    world = make_world()

    with pytest.raises(InvalidRequest, match="verifier='embedding': this server has exact, judge, cascade"):
        run_virtual(world.answer(mode=mode, verifier="embedding"))

    assert not any(engine.calls for engine in world.engines)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", VerifierName)
def test_in_the_mode_lossless_equal_tokens_decide_whoever_is_named(name: VerifierName, mode: Mode) -> None:
    effective = parse(mode=mode, verifier=name).effective_verifier

    assert effective == (VerifierName.EXACT if mode is Mode.LOSSLESS else name)


def test_in_the_mode_lossless_a_plug_in_is_not_made() -> None:
    config = CONFIG.model_copy(update={"verifiers": {"chance": PlugIn(factory="a:B")}})

    assert isinstance(make_verifier(parse(verifier="chance", mode="lossless"), config, parts_of()), ExactVerifier)


# In the loop -------------------------------------------------------------------------------------------------------


def make_world(salt: int = 5, like: Callable[[str, str], bool] = lambda first, second: True) -> World:
    target = storyteller(salt)
    return World.of(target, imitator(target, salt + 1, 0.9), like)


PLUG_INS: dict[str, Any] = {
    "embedding": Embedding(least=0.95, model=Similarity(0.97)),
    "strict": Embedding(least=0.98, model=Similarity(0.97)),
    "chance": Chance(0.5),
    "never": Chance(0.0),
    "grade": Grade(),
}


def serving_all(world: World) -> World:
    named = {name: PlugIn(factory="its:Own") for name in PLUG_INS}
    world.config = world.config.model_copy(update={"verifiers": named})
    world.models = replace(world.models, verifiers=PLUG_INS)
    return world


@answers()
@given(st.integers(0, 300), st.sampled_from(["strict", "never", "grade"]), st.sampled_from(["lr", "lr_sd"]), st.integers(0, 1000))
def test_a_verifier_that_rejects_all_leaves_the_targets_own_answer(salt: int, name: str, mode: str, order: int) -> None:
    world = serving_all(make_world(salt))
    plain = run_virtual(world.fresh().answer(mode="ar", stream=False)).completion_ids

    outcome = run_virtual(world.shuffled(order).answer(mode=mode, verifier=name))

    assert outcome.completion_ids == plain
    assert set(outcome.usage.num_steps_accepted_by) <= {"exact"}


@answers()
@given(st.integers(0, 300), st.sampled_from([*VerifierName, *PLUG_INS]), st.sampled_from(["lr", "lr_sd"]), st.integers(0, 1000))
def test_every_decided_step_says_by_whom(salt: int, name: str, mode: str, order: int) -> None:
    world = serving_all(make_world(salt)).shuffled(order)

    outcome = run_virtual(world.answer(mode=mode, verifier=name, trace=True))

    usage, records = outcome.usage, outcome.ledger.records
    assert sum(usage.num_steps_accepted_by.values()) == usage.num_steps_accepted
    assert Counter(record.reason for record in records if record.origin == "draft") == usage.num_steps_accepted_by
    settled = {"marker", "capped", "late", "none", "duplicate", "draft_error"}
    for record in records:
        assert (record.verifier is None) == (record.reason in settled or (record.reason == "exact"))
        if record.score is not None:
            assert record.verifier in PLUG_INS
    world.assert_idle()


@answers()
@given(st.integers(0, 300), st.integers(0, 1000))
def test_a_cascade_asks_the_judge_only_for_what_is_left(salt: int, order: int) -> None:
    world = make_world(salt).shuffled(order)

    outcome = run_virtual(world.answer(mode="lr", verifier="cascade", trace=True, deterministic=True))

    decided = [record for record in outcome.ledger.records if record.verifier is not None]
    assert sum(record.verifier == "judge" for record in decided) <= len(world.judge.calls)
    assert {record.verifier for record in decided} <= {"same_text", "numbers", "judge"}


def test_a_dead_plug_in_is_noted() -> None:
    world = serving_all(make_world(7))
    down = EngineUnavailable("down")
    world.target.fail = lambda call: down if "/judge/" in call.request_id else None

    outcome = run_virtual(world.answer(mode="lr", verifier="grade"))

    assert outcome.usage.degraded == ("verifier",)
    assert "verifier_error" in outcome.usage.num_steps_rejected
