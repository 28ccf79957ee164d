"""Each verifier on its own: what it accepts, and that whatever goes wrong rejects under its own reason."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.config import Bounds
from lr_backend.engine import EngineCall, Generation
from lr_backend.errors import EngineUnavailable, InvalidRequest, LookaheadError
from lr_backend.request import THRESHOLDS, LookaheadRequest, Mode, VerifierName, with_defaults
from lr_backend.steps.step import Step, StepEnd
from lr_backend.testing import ScriptedEngine, run_virtual
from lr_backend.verify import ExactVerifier, Reason, StepPair, Verdict, VerifierParts, make_verifier
from lr_backend.verify.cascade import Band, CascadeVerifier, NumericVeto, Opinion, SameText
from lr_backend.verify.factory import band
from lr_backend.verify.grade import GradeScorer
from lr_backend.verify.judge_prompt import JudgePrompt, parse_grade
from lr_backend.verify.scores import RandomVerifier, ThresholdVerifier
from lr_backend.verify.similarity import EmbeddingScorer
from tests.support.world import CONFIG, MODELS, World, imitator, storyteller

PREFIX = np.asarray([1, 2, 3], dtype=np.int32)


def make_pair(target: str = "a", drafted: str = "b", *, ids: tuple[int, ...] = (5, 6, 7)) -> StepPair:
    return StepPair(Step((9, *ids), StepEnd.DELIMITER), Step(ids, StepEnd.DELIMITER), target, drafted, "call", PREFIX)


@dataclass
class Scripted:
    """A scorer or embedder that says what it was told to; exceptions are raised."""

    answer: float | Reason | Exception
    delay_s: float = 0.0
    reason: Reason = Reason.EMBEDDING
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def measure(self, pair: StepPair) -> float | Reason:
        assert not isinstance(self.answer, Exception)
        return self.answer

    async def similarity(self, first: str, second: str) -> float:
        self.calls.append((first, second))
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        assert not isinstance(self.answer, Reason)
        return self.answer


@dataclass(frozen=True)
class Sure:
    """A verifier that always says the same."""

    accepted: bool

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(self.accepted, Reason.JUDGE, verifier="judge")


# Thresholds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0.95, Verdict(True, Reason.EMBEDDING, 0.95, "embedding")),
        (0.949, Verdict(False, Reason.EMBEDDING, 0.949, "embedding")),
        (Reason.TIMEOUT, Verdict(False, Reason.TIMEOUT, None, "embedding")),
        (Reason.GARBAGE, Verdict(False, Reason.GARBAGE, None, "embedding")),
    ],
)
def test_a_threshold_is_the_least_score_that_accepts(answer: float | Reason, expected: Verdict) -> None:
    assert run_virtual(ThresholdVerifier(Scripted(answer), 0.95).verify(make_pair())) == expected


def test_a_score_that_is_no_number_rejects() -> None:
    assert not run_virtual(ThresholdVerifier(Scripted(math.nan), 0.0).verify(make_pair())).accepted


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple), st.floats(0, 1))
def test_chance_is_a_function_of_the_pair_and_the_seed(seed: int, ids: tuple[int, ...], probability: float) -> None:
    first, second = (run_virtual(RandomVerifier(probability, seed).verify(make_pair(ids=ids))) for _ in range(2))

    assert first == second
    assert first.score is not None and 0.0 <= first.score < 1.0
    assert first.accepted == (first.score < probability)
    assert not run_virtual(RandomVerifier(0.0, seed).verify(make_pair(ids=ids))).accepted
    assert run_virtual(RandomVerifier(1.0, seed).verify(make_pair(ids=ids))).accepted


def test_chance_accepts_its_share() -> None:
    accepted = [run_virtual(RandomVerifier(0.3, seed).verify(make_pair())).accepted for seed in range(2000)]

    assert 0.26 < sum(accepted) / len(accepted) < 0.34


# The cascade -------------------------------------------------------------------------------------------------------


def consider(stage: SameText | NumericVeto | Band, pair: StepPair) -> Opinion:
    return run_virtual(stage.consider(pair))


def test_white_space_apart_the_same_words_are_accepted() -> None:
    assert consider(SameText(), make_pair("So it is 5.\n\n", "So  it is 5.")).accepted is True
    assert consider(SameText(), make_pair("So X is 5", "So x is 5")).accepted is None


def test_the_numeric_stage_rejects_or_says_nothing() -> None:
    assert consider(NumericVeto(), make_pair("5 apples", "6 apples")) == Opinion(False, Reason.NUMBERS)
    assert consider(NumericVeto(), make_pair("5 apples", "5 pears")) == Opinion(None, Reason.NUMBERS)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_band_decides_outside_its_bounds_only(score: float, one: float, other: float) -> None:
    low, high = sorted((one, other))

    opinion = consider(Band(Scripted(score), low, high), make_pair())

    assert opinion.accepted == (True if score >= high else False if score < low else None)
    assert opinion.score == score


@pytest.mark.parametrize("failure", [Reason.TIMEOUT, Reason.VERIFIER_ERROR, math.nan])
def test_a_cheap_score_that_fails_leaves_the_pair_to_the_judge(failure: float | Reason) -> None:
    cascade = CascadeVerifier((SameText(), NumericVeto(), Band(Scripted(failure), 0.4, 0.9)), Sure(True))

    assert run_virtual(cascade.verify(make_pair())) == Verdict(True, Reason.JUDGE, None, "judge")


@pytest.mark.parametrize(
    ("pair", "score", "expected"),
    [
        (make_pair("It is 5", "It  is 5"), 0.0, Verdict(True, Reason.SAME_TEXT, None, "same_text")),
        (make_pair("It is 5", "It is 6"), 1.0, Verdict(False, Reason.NUMBERS, None, "numbers")),
        (make_pair("It is 5", "That gives 5"), 0.99, Verdict(True, Reason.EMBEDDING, 0.99, "embedding")),
        (make_pair("It is 5", "Tom goes home"), 0.1, Verdict(False, Reason.EMBEDDING, 0.1, "embedding")),
        (make_pair("It is 5", "Then it is 5"), 0.7, Verdict(False, Reason.JUDGE, None, "judge")),
    ],
)
def test_the_first_stage_that_decides_signs_the_verdict(pair: StepPair, score: float, expected: Verdict) -> None:
    cascade = CascadeVerifier((SameText(), NumericVeto(), Band(Scripted(score), 0.4, 0.9)), Sure(False))

    assert run_virtual(cascade.verify(pair)) == expected


def test_a_requests_threshold_takes_the_place_of_the_upper_bound() -> None:
    bounds = Bounds(reject_below=0.4, accept_from=0.9)

    assert band(Scripted(0.0), bounds, None) == Band(Scripted(0.0), 0.4, 0.9)
    assert band(Scripted(0.0), bounds, 0.2) == Band(Scripted(0.0), 0.2, 0.2)


# Models that are asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("embedder", "expected"),
    [
        (Scripted(0.5), 0.5),
        (Scripted(0.5, delay_s=3.0), Reason.TIMEOUT),
        (Scripted(LookaheadError("broken")), Reason.VERIFIER_ERROR),
    ],
)
def test_an_embedding_model_that_fails_or_is_slow_gives_no_score(embedder: Scripted, expected: float | Reason) -> None:
    assert run_virtual(EmbeddingScorer(embedder, timeout_s=1.0).measure(make_pair(" a\n\n", "b"))) == expected
    assert embedder.calls == [("a", "b")]


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
        (Grader(7), None, 7.0),
        (Grader(10), None, Reason.GARBAGE),
        (Grader(7), 0.5, Reason.TIMEOUT),
        (Grader(7, fail=True), None, Reason.VERIFIER_ERROR),
    ],
)
def test_the_target_grades_in_one_token_or_not_at_all(engine: Grader, timeout_s: float | None, expected: float | Reason) -> None:
    scorer = GradeScorer(engine, MODELS.judge_prompt, Digits(), timeout_s)  # type: ignore[arg-type]

    assert run_virtual(scorer.measure(make_pair("①", "②"))) == expected
    (call,) = engine.calls
    assert (call.max_new_tokens, call.request_id) == (1, "call")


class Turns:
    """Renders a chat as text and "encodes" it as characters."""

    def __init__(self, opening: str) -> None:
        self.opening = opening

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: object) -> str:
        return "".join(turn["content"] for turn in conversation) + self.opening

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("opening", "tail"),
    [("<A>", "<A><think>\n\n</think>\n\n["), ("<A><think>\n", "<A><think>\n\n</think>\n\n[")],
)
def test_a_grade_is_asked_for_with_the_reasoning_closed(opening: str, tail: str) -> None:
    text = "".join(map(chr, JudgePrompt.for_grades(Turns(opening), "<think>", "</think>").ids("one", "two")))  # type: ignore[arg-type]

    assert text.endswith(tail)
    assert text.count("<think>") == 1
    assert "one" in text and "two" in text
    plain = JudgePrompt.for_grades(Turns(opening), None, None).ids("one", "two")  # type: ignore[arg-type]
    assert "</think>" not in "".join(map(chr, plain))


# The choice --------------------------------------------------------------------------------------------------------


def parse(**fields: object) -> LookaheadRequest:
    return LookaheadRequest.parse({"text_input": "?", **fields})


@pytest.mark.parametrize("name", list(VerifierName))
def test_thresholds_are_checked_by_the_verifier_they_go_with(name: VerifierName) -> None:
    rule = THRESHOLDS.get(name)
    if rule is None:
        with pytest.raises(InvalidRequest, match=rf"verifier_threshold=0\.5: goes with .* not with {name}"):
            parse(verifier=name, verifier_threshold=0.5)
        return
    assert parse(verifier=name, verifier_threshold=rule.high).threshold == rule.high
    for value in (rule.low - 0.01, rule.high + 0.01):
        with pytest.raises(InvalidRequest, match=f"verifier_threshold=.*: from {rule.low:g} to {rule.high:g}"):
            parse(verifier=name, verifier_threshold=value)


@pytest.mark.parametrize(
    ("defaults", "given_", "threshold"),
    [
        ({"verifier": "embedding", "verifier_threshold": 0.9}, {}, 0.9),
        ({"verifier": "embedding", "verifier_threshold": 0.9}, {"verifier": "embedding"}, 0.9),
        ({"verifier": "embedding", "verifier_threshold": 0.9}, {"verifier": "judge"}, None),
        ({"verifier": "embedding", "verifier_threshold": 0.9}, {"verifier": "score", "verifier_threshold": 7.0}, 7.0),
        ({"verifier": "embedding", "verifier_threshold": 0.9}, {"verifier_threshold": 0.8}, 0.8),
    ],
)
def test_a_default_threshold_goes_with_the_default_verifier(
    defaults: dict[str, object], given_: dict[str, object], threshold: float | None
) -> None:
    assert parse(**with_defaults(defaults, given_)).verifier_threshold == threshold


@pytest.mark.parametrize("mode", ["lr", "lossless"])
def test_what_this_server_lacks_is_refused_before_anything_starts(mode: str) -> None:
    world = make_world()

    with pytest.raises(InvalidRequest, match="verifier='embedding': this server"):
        run_virtual(world.answer(mode=mode, verifier="embedding"))

    assert not any(engine.calls for engine in world.engines)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", VerifierName)
def test_in_the_mode_lossless_equal_tokens_decide_whoever_is_named(name: VerifierName, mode: Mode) -> None:
    effective = parse(mode=mode, verifier=name).effective_verifier

    assert effective is (VerifierName.EXACT if mode is Mode.LOSSLESS else name)


def test_lossless_needs_no_other_verifier() -> None:
    parts = VerifierParts(
        ScriptedEngine(lambda c, s: 0),
        ScriptedEngine(lambda c, s: 0),
        MODELS.tokenizer,
        MODELS.judge_prompt,
        MODELS.judge_tokenizer,
    )

    assert isinstance(make_verifier(parse(verifier="random", mode="lossless"), CONFIG, parts), ExactVerifier)


# In the loop -------------------------------------------------------------------------------------------------------


def make_world(salt: int = 5, like: Callable[[str, str], bool] = lambda first, second: True) -> World:
    target = storyteller(salt)
    return World.of(target, imitator(target, salt + 1, 0.9), like)


def serving_all(world: World, similarity: float = 0.97) -> World:
    world.config = world.config.model_copy(update={"embedding_dir": "somewhere"})
    world.models = replace(world.models, embedder=Scripted(similarity))
    return world


@given(
    st.integers(0, 300),
    st.sampled_from([("embedding", 0.98), ("random", 0.0), ("score", 9.0)]),
    st.sampled_from(["lr", "lr_sd"]),
    st.integers(0, 1000),
)
def test_a_verifier_that_rejects_all_leaves_the_targets_own_answer(
    salt: int, choice: tuple[str, float], mode: str, order: int
) -> None:
    world = serving_all(make_world(salt))
    plain = run_virtual(world.fresh().answer(mode="ar", stream=False)).completion_ids

    name, threshold = choice
    outcome = run_virtual(world.shuffled(order).answer(mode=mode, verifier=name, verifier_threshold=threshold))

    assert outcome.completion_ids == plain
    assert set(outcome.usage.num_steps_accepted_by) <= {"exact"}


@given(st.integers(0, 300), st.sampled_from(list(VerifierName)), st.sampled_from(["lr", "lr_sd"]), st.integers(0, 1000))
def test_every_decided_step_says_by_whom(salt: int, name: VerifierName, mode: str, order: int) -> None:
    world = serving_all(make_world(salt)).shuffled(order)

    outcome = run_virtual(world.answer(mode=mode, verifier=name, trace=True))

    usage, records = outcome.usage, outcome.ledger.records
    assert sum(usage.num_steps_accepted_by.values()) == usage.num_steps_accepted
    assert Counter(record.reason for record in records if record.origin == "draft") == usage.num_steps_accepted_by
    settled = {"marker", "capped", "late", "none", "duplicate", "draft_error"}
    for record in records:
        assert (record.verifier is None) == (record.reason in settled or (record.reason == "exact"))
        if record.score is not None:
            assert record.verifier in {"embedding", "random", "score", "tokens"}
    world.assert_idle()


@given(st.integers(0, 300), st.integers(0, 1000))
def test_a_cascade_asks_the_judge_only_for_what_is_left(salt: int, order: int) -> None:
    sure, unsure = (serving_all(make_world(salt).shuffled(order), similarity) for similarity in (0.1, 0.7))

    settled = run_virtual(sure.answer(mode="lr", verifier="cascade", deterministic=True))
    asked = run_virtual(unsure.answer(mode="lr", verifier="cascade", deterministic=True))

    assert not sure.judge.calls
    assert set(settled.usage.num_steps_accepted_by) <= {"exact", "same_text"}
    assert set(settled.usage.num_steps_rejected) <= {"embedding", "marker", "capped"}
    assert bool(unsure.judge.calls) >= ("judge" in asked.usage.num_steps_accepted_by)
    assert "embedding" not in asked.usage.num_steps_rejected
    assert bool(unsure.judge.calls) >= bool(settled.usage.num_steps_rejected.get("embedding"))


def test_a_dead_grader_is_noted() -> None:
    world = make_world(7)
    down = EngineUnavailable("down")
    world.target.fail = lambda call: down if "/judge/" in call.request_id else None

    outcome = run_virtual(world.answer(mode="lr", verifier="score"))

    assert outcome.usage.degraded == ("verifier",)
    assert "verifier_error" in outcome.usage.num_steps_rejected
