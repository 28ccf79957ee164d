"""How likely a drafted step is: learned from verdicts, and what is started on it."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.loop.confidence import LEAST_VERDICTS, MEMORY, Confidence
from lr_backend.loop.loop import Outcome
from lr_backend.loop.pace import Pace
from lr_backend.loop.tree import Node, Tree
from lr_backend.request import Usage, VerifierName
from lr_backend.step import Step, StepEnd
from lr_backend.testing import run_virtual
from lr_backend.verify import Reason, Verdict
from tests.support.world import PROMPT, World, chance, imitator, storyteller

SURE, UNSURE = -1.0, -9.0


def learned(sure: float = 1.0, unsure: float = 0.0, count: int = 100) -> Confidence:
    """Has seen so many steps of either kind, of which these shares were accepted."""
    confidence = Confidence()
    for number in range(count):
        confidence.decided(SURE, number < sure * count)
        confidence.decided(UNSURE, number < unsure * count)
    return confidence


def test_before_enough_is_known_every_step_is_likely() -> None:
    confidence = Confidence()
    for _ in range(LEAST_VERDICTS - 1):
        confidence.decided(SURE, False)
    assert confidence.chance(SURE) == 1.0
    confidence.decided(SURE, False)
    assert confidence.chance(SURE) == 0.0


def test_an_engine_that_says_no_log_probabilities_is_taken_at_its_word() -> None:
    assert learned().chance(None) == 1.0


def test_it_tells_sure_steps_from_unsure_ones() -> None:
    confidence = learned()
    assert confidence.chance(SURE + 0.1) > 0.9
    assert confidence.chance(UNSURE - 0.1) < 0.1


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
    assert 0.0 <= confidence.chance(log_prob) <= 1.0


def chain(tree: Tree, chances: list[float]) -> list[Node]:
    """Draft one step below another, each of this chance, as far as the tree lets them start."""
    nodes = []
    for number, likely in enumerate(chances):
        started = tree.start_drafts()
        if not started:
            break
        started[0].chance = likely
        tree.drafted(started[0], Step((number,), StepEnd.DELIMITER))
        nodes.append(started[0])
    return nodes


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_work_goes_down_as_far_as_the_whole_chain_is_likely(chances: list[float], least: float) -> None:
    tree = Tree(np.array(PROMPT, np.int32), end=1000, max_depth=8, width=1, min_chance=least)
    nodes = chain(tree, chances)
    likely = sum(math.prod(chances[: depth + 1]) >= least for depth in range(len(chances)))
    assert len(nodes) == min(len(chances), likely + 1)
    assert len(tree.start_targets()) == 1 + min(likely, len(nodes))


def test_a_verdict_says_more_than_a_chance() -> None:
    tree = Tree(np.array(PROMPT, np.int32), end=1000, max_depth=8, width=1, min_chance=0.5)
    (node,) = chain(tree, [0.1])
    (root,) = tree.start_targets()
    tree.targeted(root, Step((9,), StepEnd.DELIMITER))
    ((_, pending),) = tree.start_verdicts()
    assert pending is node
    tree.judged(node, Verdict(True, Reason.JUDGE))
    assert tree.start_targets() == [node]


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


async def later_answer(world: World, **fields: object) -> Outcome:
    """Of a server that has answered some requests before."""
    world.pace = Pace(asyncio.get_running_loop().time)
    for number in range(4):
        await world.answer(mode="lr", request_id=f"before-{number}", max_depth=4, max_tokens=200, **fields)
    return await world.answer(mode="lr", max_depth=4, max_tokens=200, **fields)


def test_it_saves_work_and_changes_nothing_that_is_committed() -> None:
    saved = spent = 0
    for salt in range(5):
        always = run_virtual(later_answer(hesitant_world(salt)))
        likely = run_virtual(later_answer(hesitant_world(salt), min_chance=0.5))
        assert likely.completion_ids == always.completion_ids
        assert likely.usage.num_steps_accepted == always.usage.num_steps_accepted
        saved += always.usage.num_wasted_tokens - likely.usage.num_wasted_tokens
        spent += always.usage.num_wasted_tokens
    assert saved > 0.15 * spent, (saved, spent)


@pytest.mark.parametrize(
    ("fields", "learner"),
    [
        ({}, VerifierName.JUDGE),
        ({"verifier": "exact"}, VerifierName.EXACT),
        ({"verifier": "random", "verifier_threshold": 0.0}, VerifierName.RANDOM),
        ({"lossless": True}, VerifierName.EXACT),
    ],
    ids=["judge", "exact", "random", "lossless"],
)
def test_what_one_verifier_decides_says_nothing_of_another(fields: dict[str, object], learner: VerifierName) -> None:
    world = hesitant_world(2)
    run_virtual(later_answer(world, min_chance=0.5, **fields))
    assert world.pace is not None
    learned = world.pace.evidence.pop(learner)
    assert learned.acceptance.value is not None and learned.verdict_s.value is not None
    assert learned.confidence.chance(UNSURE) < 1.0
    for other in world.pace.evidence.values():
        assert other.acceptance.value is None and other.verdict_s.value is None
        assert other.confidence.chance(UNSURE) == 1.0


def test_a_request_looks_ahead_by_what_its_own_verifier_has_decided() -> None:
    """After many requests of another verifier it does what it does as a server's first."""

    async def usage(*before: dict[str, object]) -> Usage:
        world = hesitant_world(2)
        world.pace = Pace(asyncio.get_running_loop().time)
        fields = {"mode": "lr", "max_depth": 4, "max_tokens": 200, "min_chance": 0.5}
        for number, others in enumerate(before):
            await world.answer(request_id=f"before-{number}", **fields, **others)
        return (await world.answer(**fields)).usage

    first = run_virtual(usage())
    after = {name: run_virtual(usage(*[{"verifier": name}] * 4)) for name in ("exact", "judge")}

    assert after["exact"].num_wasted_tokens == first.num_wasted_tokens
    assert after["judge"].num_wasted_tokens < first.num_wasted_tokens


def test_a_deterministic_request_does_not_ask_what_others_have_learned() -> None:
    world = hesitant_world(1)
    run_virtual(later_answer(world, min_chance=0.5, deterministic=True))
    assert not any(recorded.call.return_log_probs for recorded in world.draft.calls)
