"""One property over all that may differ between two runs: where the same text is promised, it is the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import Sampling
from lr_backend.loop.answer import Outcome
from lr_backend.request import ProposerName
from lr_backend.testing import run_virtual
from tests.support.examples import answers
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
samplings = st.sampled_from([Sampling(), Sampling(0.6), Sampling(1.3, 5, 0.9), Sampling(0.8, 1), Sampling(1.0, 0, 0.3)])
lengths = st.sampled_from([1, 9, 60, 200])


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
    """In one call."""
    outcome = run_virtual(world.fresh().answer(mode="ar", stream=False, **asked))
    assert outcome.usage.num_target_calls == 1
    return outcome


def of(sampling: Sampling) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


@answers(60)
@given(salts, agreements, ways, samplings, lengths, st.sampled_from(["ar", "sd", "lossless"]))
def test_where_only_the_targets_own_words_are_taken_every_way_writes_what_the_target_writes_alone(
    salt: int, agreement: float, way: dict[str, Any], sampling: Sampling, max_tokens: int, mode: str
) -> None:
    """With noise that follows from the seed and the position, at any temperature, streamed or whole."""
    world = made(salt, agreement, sampled=not sampling.greedy, coupled=True)
    asked = {"seed": salt, "max_tokens": max_tokens, **of(sampling)}

    outcome = written(world, way, mode=mode, **asked)

    assert outcome.completion_ids == alone(world, **asked).completion_ids
    assert outcome.finish_reason == alone(world, **asked).finish_reason


@answers(60)
@given(salts, agreements, ways, lengths, st.sampled_from(["ar", "sd", "lr", "lr_sd", "auto", "lossless"]), st.booleans())
def test_greedy_with_the_exact_verifier_every_way_writes_what_the_target_writes_alone(
    salt: int, agreement: float, way: dict[str, Any], max_tokens: int, mode: str, coupled: bool
) -> None:
    world = made(salt, agreement, sampled=False, coupled=coupled)

    outcome = written(world, way, mode=mode, verifier="exact", max_tokens=max_tokens)

    assert outcome.completion_ids == alone(world, max_tokens=max_tokens).completion_ids


judging = st.sampled_from(["lr", "lr_sd", "auto"])


@answers(60)
@given(salts, agreements, ways, ways, samplings, lengths, judging, judging)
def test_what_a_judge_lets_through_is_the_same_whoever_was_first_and_whatever_helped(
    salt: int,
    agreement: float,
    one: dict[str, Any],
    other: dict[str, Any],
    sampling: Sampling,
    max_tokens: int,
    mode: str,
    other_mode: str,
) -> None:
    """Of a deterministic request: it depends on the candidates that there are, and not on draft tokens, depth or own branches."""
    world = made(salt, agreement, sampled=not sampling.greedy, coupled=True)
    kept = {name: one["fields"][name] for name in ("width", "stream")}
    asked = {**of(sampling), **kept, "seed": salt, "max_tokens": max_tokens, "deterministic": True}
    depths = [max(1, way["fields"]["max_depth"]) for way in (one, other)]

    first = written(world, one, **asked, mode=mode, max_depth=depths[0])
    second = written(world, other, **asked, mode=other_mode, max_depth=depths[1])

    assert first.completion_ids == second.completion_ids
    assert first.usage.num_steps_accepted == second.usage.num_steps_accepted
    assert first.usage.num_steps_rejected == second.usage.num_steps_rejected


@answers(40)
@given(salts, agreements, ways, lengths, st.sampled_from(["lr", "lr_sd", "auto"]))
def test_without_coupled_noise_it_is_the_same_as_well(
    salt: int, agreement: float, way: dict[str, Any], max_tokens: int, mode: str
) -> None:
    """But for calls that bring more or less: each call then has noise of its own."""
    world = made(salt, agreement, sampled=True, coupled=False)
    asked = {"seed": salt, "max_tokens": max_tokens, "mode": mode, "temperature": 0.7, "deterministic": True}
    other = {**way, "order": way["order"] + 1, "own_branches": not way["own_branches"], "fickle": False}

    first, second = (written(world, one, **asked) for one in ({**way, "fickle": False}, other))

    assert first.completion_ids == second.completion_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["lossless", "lr_sd", "auto"])
@given(salts, ways)
@answers(2)
def test_nothing_outlives_a_request_that_is_cancelled_wherever_it_waits(
    mode: str, temperature: float, salt: int, way: dict[str, Any]
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
