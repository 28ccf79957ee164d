"""How likely a drafted step is: learned from verdicts, and what is started on it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall, Generation
from lr_backend.policy.acceptance import MAX_ALPHA, USUAL_ALPHA, USUAL_UNTIL, Acceptance
from lr_backend.policy.average import Average
from lr_backend.policy.confidence import LEAST_VERDICTS, MEMORY, Confidence
from lr_backend.policy.policy import Learned
from lr_backend.request import Usage, VerifierName
from lr_backend.testing import ScriptedEngine, run_virtual
from tests.support.world import PROMPT, World, chance, imitator, storyteller

SURE, UNSURE = -1.0, -9.0


def learned(sure: float = 1.0, unsure: float = 0.0, count: int = 100) -> Confidence:
    """Has seen so many steps of either kind, of which these shares were accepted."""
    confidence = Confidence()
    for number in range(count):
        confidence.decided(SURE, number < sure * count)
        confidence.decided(UNSURE, number < unsure * count)
    return confidence


def test_an_average_begins_as_a_plain_mean_and_then_fades() -> None:
    average = Average(memory=4)
    assert average.value is None
    for value in (1.0, 2.0, 3.0):
        average.add(value)
    assert average.value == pytest.approx(2.0)
    for _ in range(50):
        average.add(10.0)
    assert average.value == pytest.approx(10.0, rel=0.01)


def test_before_enough_is_known_log_probabilities_say_nothing() -> None:
    confidence = Confidence()
    for _ in range(LEAST_VERDICTS - 1):
        confidence.decided(SURE, False)
    assert confidence.chance(SURE) is None
    confidence.decided(SURE, False)
    assert confidence.chance(SURE) == 0.0


def test_it_tells_sure_steps_from_unsure_ones() -> None:
    confidence = learned()
    sure, unsure = confidence.chance(SURE + 0.1), confidence.chance(UNSURE - 0.1)
    assert sure is not None and unsure is not None
    assert sure > 0.9
    assert unsure < 0.1


def test_old_verdicts_are_forgotten() -> None:
    confidence = learned(sure=1.0)
    for _ in range(MEMORY):
        confidence.decided(SURE, False)
    assert confidence.chance(SURE) == 0.0


@given(st.lists(st.tuples(st.floats(-1e3, 0.0), st.booleans()), max_size=80), st.floats(-1e3, 0.0))
def test_a_chance_is_a_probability(seen: list[tuple[float, bool]], log_prob: float) -> None:
    confidence = Confidence()
    for decided in seen:
        confidence.decided(*decided)
    found = confidence.chance(log_prob)
    assert 0.0 <= found <= 1.0 if found is not None else len(seen) < LEAST_VERDICTS


# The rate --------------------------------------------------------------------------------------------------------------


def test_a_first_verdict_says_little_and_many_say_all() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == USUAL_ALPHA
    acceptance.decided(False, None)
    assert 0.8 * USUAL_ALPHA < acceptance.rate < USUAL_ALPHA
    for _ in range(USUAL_UNTIL):
        acceptance.decided(False, None)
    assert acceptance.rate == pytest.approx(1.0 - MAX_ALPHA)


def test_no_step_is_taken_for_certain() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.decided(True, None)
    assert acceptance.rate == MAX_ALPHA


def test_verdicts_teach_what_a_log_probability_says() -> None:
    acceptance = Acceptance()
    for number in range(3 * LEAST_VERDICTS):
        acceptance.decided(number % 3 == 0, SURE if number % 3 == 0 else UNSURE)
    sure, unsure = (acceptance.confidence.chance(one) for one in (SURE, UNSURE))
    assert sure is not None and sure > 0.8
    assert unsure is not None and unsure < 0.2


# What is started on it -------------------------------------------------------------------------------------------------

AUTO = {"mode": "auto", "max_depth": 4, "max_tokens": 200, "num_draft_tokens": 0}


def hesitant_world(salt: int) -> World:
    """Half of the drafted steps are rejected, and the draft hesitates at their first token."""
    target = storyteller(salt, num_steps=30, break_rate=0.2)
    draft = imitator(target, salt + 1, 0.9)
    world = World.of(target, draft, lambda first, second: chance("like", salt, second[:1]) < 0.5)

    def log_prob(context: tuple[int, ...]) -> float:
        starts = len(context) > len(PROMPT) and "\n\n" in world.models.tokenizer.decode([context[-1]])
        word = world.models.tokenizer.decode([draft(context, 0)])
        return UNSURE if starts and chance("like", salt, word[:1]) >= 0.5 else SURE / 10

    world.draft.log_prob = log_prob
    world.draft.delay = lambda call, num_tokens: 0.001 * num_tokens
    return world


async def last_of(world: World, *requests: dict[str, object]) -> Usage:
    """One request after another to one server; what the last one used."""
    world.learned = Learned(asyncio.get_running_loop().time)
    outcomes = [await world.answer(request_id=f"{number}", **fields) for number, fields in enumerate(requests)]
    return outcomes[-1].usage


@pytest.mark.parametrize(
    ("fields", "learner"),
    [
        ({"mode": "auto"}, VerifierName.JUDGE),
        ({"mode": "auto", "verifier": "exact"}, VerifierName.EXACT),
        ({"mode": "lr", "verifier": "cascade"}, VerifierName.CASCADE),
        ({"mode": "lossless"}, VerifierName.EXACT),
    ],
    ids=["judge", "exact", "cascade", "lossless"],
)
def test_what_one_verifier_decides_says_nothing_of_another(fields: dict[str, object], learner: VerifierName) -> None:
    world = hesitant_world(2)
    run_virtual(last_of(world, *[{**AUTO, **fields}] * 4))
    assert world.learned is not None
    acceptance, prices = world.learned.acceptance, world.learned.prices
    assert acceptance[learner].rate != USUAL_ALPHA
    others = set(VerifierName) - {learner}
    assert all(acceptance[name].rate == USUAL_ALPHA and acceptance[name].confidence.chance(UNSURE) is None for name in others)
    assert all(prices.verdict_s[name].value is None for name in others)


def test_only_auto_asks_how_sure_the_draft_is() -> None:
    for mode in ("auto", "lr", "lossless"):
        world = hesitant_world(1)
        run_virtual(last_of(world, {**AUTO, "mode": mode}))
        assert {recorded.call.return_log_probs for recorded in world.draft.calls} == {mode == "auto"}


def test_a_draft_that_cannot_say_how_sure_it_is_is_asked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world, whole = hesitant_world(1), ScriptedEngine.generate

    async def silent(engine: ScriptedEngine, call: EngineCall) -> Generation:
        return replace(await whole(engine, call), log_probs=())

    monkeypatch.setattr(ScriptedEngine, "generate", silent)
    usage = run_virtual(last_of(world, AUTO, AUTO))
    assert not usage.degraded and usage.num_steps_accepted > 0


@pytest.mark.parametrize(("log_prob", "rows"), [(0.0, 4), (UNSURE, 1)])
def test_behind_a_step_that_the_draft_is_not_sure_of_nothing_is_begun_where_rows_have_a_price(log_prob: float, rows: int) -> None:
    target = storyteller(3, num_steps=30, break_rate=0.2)
    world = World.of(target, storyteller(4, num_steps=30, break_rate=0.2), own_branches=False)
    world.draft.log_prob = lambda context: log_prob
    world.draft.delay = lambda call, num_tokens: 0.001 * num_tokens

    async def answer() -> None:
        world.learned = Learned(asyncio.get_running_loop().time)
        for crowd in (0, 1, 2, 3) * 10:
            for prices in world.learned.prices.target.values():
                prices.crowding.add(crowd, 0.01 * (1.0 + 0.2 * crowd))
                prices.token_s.add(0.01)
        acceptance = world.learned.acceptance[VerifierName.JUDGE]
        for number in range(100):
            sure = number % 4 > 0
            acceptance.decided(sure, SURE if sure else UNSURE)
        await world.answer(mode="auto", max_depth=4, num_draft_tokens=0, max_tokens=60)

    run_virtual(answer())
    assert world.target.max_in_flight == rows
