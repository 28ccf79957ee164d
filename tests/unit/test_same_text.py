"""One property over all that may differ between two runs: where the same text is promised, it is the same."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lr_backend.engine import Sampling
from lr_backend.loop.answer import Outcome
from lr_backend.request import Mode, ProposerName
from lr_backend.testing import run_virtual
from tests.support.examples import answers
from tests.support.scheduled import ScheduledEngine, Sizes, drawing, scheduled
from tests.support.world import World, chance, imitator, storyteller

salts = st.integers(0, 10_000)
agreements = st.sampled_from([0.0, 0.6, 0.9, 1.0])
ways = st.fixed_dictionaries(
    {
        "order": salts,
        "fickle": st.booleans(),
        "own_branches": st.booleans(),
        "fields": st.fixed_dictionaries(
            {
                "stream": st.booleans(),
                "proposer": st.sampled_from(list(ProposerName)),
                "num_draft_tokens": st.sampled_from([0, 1, 4, 12]),
                "max_depth": st.integers(0, 5),
                "width": st.integers(1, 3),
            }
        ),
    }
)
"""How an answer may be written: what comes first, how much each call brings, what is speculated."""
WITH_DRAFT_TOKENS = {
    "order": 1,
    "fickle": False,
    "own_branches": True,
    "fields": {"stream": True, "proposer": ProposerName.DRAFT_MODEL, "num_draft_tokens": 4, "max_depth": 2, "width": 1},
}
samplings = st.sampled_from([Sampling(), Sampling(0.6), Sampling(1.3, 5, 0.9), Sampling(0.8, 1), Sampling(1.0, 0, 0.3)])
lengths = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 9, 60, 200]), "thinking_token_budget": st.sampled_from([None, None, 1, 5, 20])}
)
FOREVER_S = 1e9


def made(salt: int, agreement: float, *, sampled: bool, coupled: bool, like_rate: float = 0.5) -> World:
    """A target whose noise is that of a seed at a position, and a draft that writes much like it with the same noise."""
    target = storyteller(salt, sampled=sampled, tool_rate=0.1)
    draft = imitator(target, salt + 1, agreement, sampled=sampled)
    world = World.of(target, draft, lambda a, b: chance("like", salt, a, b) < like_rate, coupled_noise=coupled)
    return world


def written(world: World, way: dict[str, Any], **asked: Any) -> Outcome:
    world = world.fickle(way["order"]) if way["fickle"] else world.fresh()
    world.config = world.config.model_copy(update={"own_branches": way["own_branches"]})
    world = world.shuffled(way["order"])
    outcome = run_virtual(world.answer(**{**way["fields"], **asked}))
    world.assert_idle()
    assert not outcome.usage.degraded
    return outcome


def alone(world: World, **asked: Any) -> Outcome:
    return run_virtual(world.fresh().answer(mode="ar", stream=False, **asked))


def of(sampling: Sampling) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


@answers(60)
@given(salts, agreements, ways, samplings, lengths, st.sampled_from(["ar", "sd", "lossless"]))
def test_where_only_the_targets_own_words_are_taken_every_way_writes_what_the_target_writes_alone(
    salt: int, agreement: float, way: dict[str, Any], sampling: Sampling, length: dict[str, Any], mode: str
) -> None:
    """With noise that follows from the seed and the position, at any temperature, streamed or whole."""
    world = made(salt, agreement, sampled=not sampling.greedy, coupled=True)
    asked = {"seed": salt, **length, **of(sampling)}

    outcome = written(world, way, mode=mode, **asked)

    assert outcome.completion_ids == alone(world, **asked).completion_ids
    assert outcome.finish_reason == alone(world, **asked).finish_reason


@answers(60)
@given(salts, agreements, ways, lengths, st.sampled_from(["ar", "sd", "lr", "lr_sd", "auto", "lossless"]), st.booleans())
def test_greedy_with_the_exact_verifier_every_way_writes_what_the_target_writes_alone(
    salt: int, agreement: float, way: dict[str, Any], length: dict[str, Any], mode: str, coupled: bool
) -> None:
    world = made(salt, agreement, sampled=False, coupled=coupled)

    outcome = written(world, way, mode=mode, verifier="exact", **length)

    assert outcome.completion_ids == alone(world, **length).completion_ids


judging = st.sampled_from(["lr", "lr_sd", "auto"])


@answers(60)
@given(salts, agreements, ways, ways, samplings, lengths, judging, judging)
def test_what_a_judge_lets_through_is_the_same_whoever_was_first_and_whatever_helped(
    salt: int,
    agreement: float,
    one: dict[str, Any],
    other: dict[str, Any],
    sampling: Sampling,
    length: dict[str, Any],
    mode: str,
    other_mode: str,
) -> None:
    """Of a deterministic request: it depends on the candidates that there are, and not on draft tokens, depth or own branches."""
    world = made(salt, agreement, sampled=not sampling.greedy, coupled=True)
    kept = {name: one["fields"][name] for name in ("width", "stream")}
    asked = {**of(sampling), **kept, "seed": salt, **length, "deterministic": True}
    depths = [max(1, way["fields"]["max_depth"]) for way in (one, other)]

    first = written(world, one, **asked, mode=mode, max_depth=depths[0])
    second = written(world, other, **asked, mode=other_mode, max_depth=depths[1])

    assert first.completion_ids == second.completion_ids
    assert first.usage.num_steps_accepted == second.usage.num_steps_accepted
    assert first.usage.num_steps_rejected == second.usage.num_steps_rejected


@answers(40)
@given(salts, agreements, ways, lengths, st.sampled_from(["lr", "lr_sd", "auto"]))
def test_without_coupled_noise_it_is_the_same_as_well(
    salt: int, agreement: float, way: dict[str, Any], length: dict[str, Any], mode: str
) -> None:
    """But for calls that bring more or less: each call then has noise of its own."""
    world = made(salt, agreement, sampled=True, coupled=False)
    asked = {"seed": salt, **length, "mode": mode, "temperature": 0.7, "deterministic": True}
    other = {**way, "order": way["order"] + 1, "own_branches": not way["own_branches"], "fickle": False}

    first, second = (written(world, one, **asked) for one in ({**way, "fickle": False}, other))

    assert first.completion_ids == second.completion_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", Mode)
@example(3, WITH_DRAFT_TOKENS)
@given(salts, ways)
@answers(2)
def test_nothing_outlives_a_request_that_is_cancelled_wherever_it_waits(
    mode: Mode, temperature: float, salt: int, way: dict[str, Any]
) -> None:
    """At every moment at which anything completes, and just after."""
    world = made(salt, 0.9, sampled=True, coupled=True)
    asked = {**way["fields"], "mode": mode, "temperature": temperature, "seed": salt, "max_tokens": 40}

    def shuffled() -> World:
        one = world.fickle(way["order"]) if way["fickle"] else world.fresh()
        one.config = one.config.model_copy(update={"own_branches": way["own_branches"]})
        return one.shuffled(way["order"])

    whole = shuffled()
    outcome = run_virtual(whole.answer(**asked))
    spans = outcome.ledger.spans
    moments = {span.started_s for span in spans} | {span.finished_s for span in spans if span.finished_s is not None}

    async def cut_at(moment_s: float, after: int) -> None:
        cut = shuffled()
        answering = asyncio.create_task(cut.answer(**asked))
        await asyncio.sleep(moment_s)
        for _ in range(after):
            await asyncio.sleep(0)
        is_done = answering.done()
        answering.cancel()
        await asyncio.wait({answering})
        assert answering.cancelled() or is_done or answering.result().completion_ids == outcome.completion_ids
        cut.assert_idle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert whole.text.startswith(cut.text)

    for moment_s in sorted(moments):
        for after in (0, 1, 3):
            run_virtual(cut_at(moment_s, after))


# All at once -----------------------------------------------------------------------------------------------------------

LENGTH = 24
sizes = st.builds(Sizes, st.sampled_from([40, 48, 1024]), st.sampled_from([14, 20, 64]), st.sampled_from([2, 4]))
"""Of an engine: memory for an answer and its draft tokens, for hardly more, or for all; tokens of an iteration and of a block."""
promises = st.sampled_from(
    [
        *({"mode": mode} for mode in ("ar", "sd", "lossless")),
        *({"mode": mode, "verifier": "exact", "temperature": 0.0} for mode in ("lr", "lr_sd", "auto")),
        *({"mode": mode, "deterministic": True} for mode in ("lr", "lr_sd", "auto")),
    ]
)


def promised(world: World, asked: dict[str, Any]) -> tuple[int, ...]:
    """What the target writes alone; where steps are accepted by meaning, what the request comes to over engines at ease."""
    if not asked.get("deterministic"):
        kept = ("seed", "max_tokens", "temperature", "top_k", "top_p")
        return alone(world, **{name: asked[name] for name in kept}).completion_ids
    at_ease = {**asked, "mode": "lr", "max_depth": min(1, asked["max_depth"]), "stream": False}
    return run_virtual(world.fresh().answer(**at_ease)).completion_ids


def crowded(world: World, way: dict[str, Any], sizes: Sizes) -> World:
    """Engines with a scheduler, to which calls come in another order."""
    shuffled = world.shuffled(way["order"], spread=0.3)
    shuffled.config = world.config.model_copy(update={"own_branches": way["own_branches"]})
    return scheduled(shuffled, sizes)


async def beside_one_that_goes(
    world: World, asked: dict[str, Any], neighbour: dict[str, Any], leaves_s: float, after: int
) -> tuple[Outcome, list[float]]:
    """The answer to a request whose neighbour is cancelled; and the moments at which the neighbour was waiting for something."""
    answering = asyncio.create_task(world.answer(**asked))
    going = asyncio.create_task(world.answer(request_id="neighbour", **neighbour))
    await asyncio.wait({going}, timeout=leaves_s)
    for _ in range(after):
        await asyncio.sleep(0)
    moments: list[float] = []
    if going.done():
        spans = going.result().ledger.spans
        moments = [span.started_s for span in spans] + [span.finished_s for span in spans if span.finished_s is not None]
    going.cancel()
    await asyncio.wait({going})
    outcome = await answering
    for engine in world.engines:
        await engine.close()
    assert not outcome.usage.degraded
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return outcome, sorted(set(moments))


@answers(20)
@given(salts, agreements, ways, ways, samplings, sizes, promises, promises, st.integers(0, 3))
def test_whoever_else_is_there_and_goes_and_however_full_the_memory_is_the_promised_text_comes(
    salt: int,
    agreement: float,
    way: dict[str, Any],
    other: dict[str, Any],
    sampling: Sampling,
    sizes: Sizes,
    promise: dict[str, Any],
    others_promise: dict[str, Any],
    after: int,
) -> None:
    """Any order of completions, a neighbour cancelled wherever it waits, prompts in chunks, answers streamed or whole, sequences
    preempted, and tokens drawn with top-k and top-p: all together."""
    greedy = promise.get("temperature") == 0.0
    target = drawing(salt, Sampling() if greedy else sampling)
    draft = cache(imitator(target, salt + 1, agreement, sampled=True))
    world = World.of(target, draft, lambda a, b: chance("like", salt, a, b) < 0.5, coupled_noise=True)
    asked = {"seed": salt, "max_tokens": LENGTH, **of(sampling), **way["fields"], **promise}
    neighbour = {"seed": salt + 1, "max_tokens": LENGTH, **of(sampling), **other["fields"], **others_promise}
    expected = promised(world, asked)

    def answered(leaves_s: float) -> tuple[Outcome, list[float]]:
        return run_virtual(beside_one_that_goes(crowded(world, way, sizes), asked, neighbour, leaves_s, after))

    whole, moments = answered(FOREVER_S)
    assert whole.completion_ids == expected
    for moment_s in moments:
        outcome, _ = answered(moment_s)
        assert outcome.completion_ids == expected


@pytest.mark.parametrize("mode", ["ar", "lossless", "lr_sd"])
def test_the_memory_does_fill_up(mode: str) -> None:
    """Where the property above has its smallest memory."""
    sampling, num_preemptions = Sampling(0.6, 0, 0.9), 0
    for salt in range(6):
        target = drawing(salt, sampling)
        world = World.of(target, imitator(target, salt + 1, 0.9), lambda a, b: True, coupled_noise=True)
        full = crowded(world, {"order": salt, "own_branches": True}, Sizes(40, 14))
        asked = {"mode": mode, "max_depth": 5, "width": 2, "max_tokens": LENGTH, "seed": 1, "stream": False, **of(sampling)}
        run_virtual(beside_one_that_goes(full, asked, asked, FOREVER_S, 0))
        for engine in (full.target, full.draft):
            assert isinstance(engine, ScheduledEngine)
            num_preemptions += engine.num_preemptions
    assert num_preemptions > 0
