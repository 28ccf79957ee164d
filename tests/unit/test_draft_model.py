"""The draft model as proposer: whatever it writes, however it fails, the answer is the target's own."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall, Role
from lr_backend.errors import EngineRejected, EngineUnavailable
from lr_backend.loop.loop import Outcome
from lr_backend.loop.seeds import derive_seed, token_draft_seed
from lr_backend.propose import Position, Proposal, make_proposer
from lr_backend.propose.draft_model import DraftModel, confident
from lr_backend.request import FinishReason, ProposerName, SegmenterName
from lr_backend.testing import Script, run_virtual
from lr_backend.trace.analysis import analyse
from lr_backend.trace.html import page
from lr_backend.trace.schema import CallOutcome, Purpose
from tests.support.traces import traced
from tests.support.world import BREAK, CLOSE, END, PROMPT, TOKENIZER, World, chance, imitator, storyteller

salts = st.integers(0, 10_000)
shapes = st.fixed_dictionaries(
    {
        "num_draft_tokens": st.sampled_from([1, 3, 16]),
        "draft_length": st.sampled_from(["fixed", "auto"]),
        "max_tokens": st.sampled_from([1, 7, 30, 200]),
        "stream": st.booleans(),
        "deterministic": st.booleans(),
        "segmenter": st.sampled_from(list(SegmenterName)),
    }
)
SD = {"mode": "sd", "proposer": "draft_model"}


def anything(salt: int) -> Script:
    """A draft that writes what it likes: ends, closing tokens and delimiters too."""
    return lambda context, seed: int(chance("anything", salt, context, seed) * len(TOKENIZER.words))


def unsure(salt: int, world: World) -> World:
    world.draft.log_prob = lambda context: math.log(max(1e-6, chance("sure", salt, context)))
    return world


def alone(world: World, **fields: object) -> Outcome:
    return run_virtual(world.fresh().answer(mode="ar", stream=False, **fields))


@given(salts, st.sampled_from([None, 0.0, 0.6, 0.95, 1.0]), shapes, salts)
def test_greedy_sd_is_the_target_alone_whatever_the_draft_says(
    salt: int, agreement: float | None, shape: dict[str, object], order: int
) -> None:
    target = storyteller(salt, tool_rate=0.2, prose=0.5 * (salt % 2))
    draft = anything(salt) if agreement is None else imitator(target, salt + 1, agreement)
    world = World.of(target, draft)
    drafting = unsure(salt, world.shuffled(order))

    outcome = run_virtual(drafting.answer(**SD, **shape))

    assert outcome.completion_ids == alone(world, max_tokens=shape["max_tokens"]).completion_ids
    assert all(END not in recorded.call.input_ids for recorded in drafting.draft.calls)
    assert outcome.usage.num_draft_calls == len(drafting.draft.calls)
    assert outcome.usage.num_draft_calls or shape["max_tokens"] == 1
    drafting.assert_idle()


@given(salts, shapes, salts)
def test_sampled_sd_follows_the_targets_own_dice(salt: int, shape: dict[str, object], order: int) -> None:
    """The scripted target's noise hangs on the call's seed; which calls there are is all that drafts may change of it."""
    target = storyteller(salt, sampled=True)
    world = World.of(target, anything(salt)).shuffled(order)

    outcome = run_virtual(world.answer(**SD, temperature=0.6, seed=salt, **shape))

    own = []
    for recorded in world.target.calls:
        prefix = tuple(recorded.call.input_ids.tolist())
        assert recorded.call.seed == derive_seed(salt, len(prefix), Role.TARGET)
        own.append(target((*prefix,), recorded.call.seed))
    starts = [len(recorded.call.input_ids) - len(PROMPT) for recorded in world.target.calls]
    assert [outcome.completion_ids[start] for start in starts] == own


@given(salts, shapes, salts)
def test_token_drafts_share_noise_with_nobody(salt: int, shape: dict[str, object], order: int) -> None:
    target = storyteller(salt, sampled=True)
    world = World.of(target, imitator(target, salt, 0.8, sampled=True)).shuffled(order)

    run_virtual(world.answer(mode="lr_sd", proposer="draft_model", temperature=0.6, seed=salt, width=2, **shape))

    asked = [recorded for recorded in world.draft.calls if "/token_draft/" in recorded.call.request_id]
    writing = [recorded.call for recorded in world.draft.calls if "/token_draft/" not in recorded.call.request_id]
    others = {call.seed for call in writing} | {recorded.call.seed for recorded in world.target.calls}
    assert not others & {recorded.call.seed for recorded in asked}
    # The same prefix may come again where an equal lower sibling arrives after a higher one; its noise is then the same too.
    beside = Counter((one.started_s, one.call.seed, tuple(one.call.input_ids.tolist())) for one in asked)
    assert max(beside.values(), default=1) == 1


def test_seeds_of_token_drafts_are_their_own() -> None:
    seeds = {token_draft_seed(seed, offset, sibling) for seed in (0, 1) for offset in range(50) for sibling in range(3)}
    others = {
        derive_seed(seed, offset, role, sibling)
        for seed in (0, 1)
        for offset in range(50)
        for sibling in range(3)
        for role in Role
    }
    assert len(seeds) == 300
    assert not seeds & others


@pytest.mark.parametrize(("configured", "asked", "drawn"), [(None, 0.6, 0.0), (0.3, 0.6, 0.3), (0.9, 0.6, 0.6), (0.9, 0.0, 0.0)])
def test_the_draft_guesses_its_best_unless_a_temperature_is_configured(
    configured: float | None, asked: float, drawn: float
) -> None:
    target = storyteller(4)
    world = World.of(target, imitator(target, 5, 0.9), draft_temperature=configured)

    run_virtual(world.answer(**SD, temperature=asked))

    assert {recorded.call.sampling.temperature for recorded in world.draft.calls} == {drawn}


@pytest.mark.parametrize("failure", [EngineUnavailable("down"), EngineRejected("too long"), "timeout"])
@given(salts, st.sampled_from(["sd", "lr_sd"]), st.integers(0, 4))
def test_a_draft_that_fails_leaves_ngrams_and_the_target(failure: object, salt: int, mode: str, after: int) -> None:
    target = storyteller(salt)
    world = World.of(target, imitator(target, salt + 1, 0.9))
    drafting = world.shuffled(salt, spread=0.01)
    engine = drafting.draft
    if isinstance(failure, str):
        timeouts = drafting.config.timeouts.model_copy(update={"draft_s": 0.5})
        drafting.config = drafting.config.model_copy(update={"timeouts": timeouts})
        delay = engine.delay
        engine.delay = lambda call, num_tokens: 1e6 if len(engine.calls) > after else delay(call, num_tokens)
    else:
        engine.fail = lambda call: failure if len(engine.calls) > after else None  # type: ignore[return-value]

    outcome = run_virtual(drafting.answer(mode=mode, proposer="draft_model"))

    assert outcome.completion_ids == alone(world).completion_ids
    failed = len(engine.calls) > after
    assert outcome.usage.degraded == (("draft",) if failed else ())
    if mode == "sd":
        assert len(engine.calls) <= after + 1  # never asked again
        assert sum(span.failed for span in outcome.ledger.spans) == failed
    drafting.assert_idle()


@given(salts, shapes, st.floats(0, 1))
def test_cancelling_stops_token_drafts_too(salt: int, shape: dict[str, object], moment: float) -> None:
    target = storyteller(salt)
    world = World.of(target, imitator(target, salt + 1, 0.9))
    duration_s = run_virtual(world.fresh().answer(**SD, **shape)).usage.latency_s

    async def attempt() -> None:
        task = asyncio.create_task(world.answer(**SD, **shape))
        await asyncio.sleep(moment * duration_s)
        task.cancel()
        await asyncio.wait({task})
        world.assert_idle()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(attempt())


def test_a_deadline_cuts_a_draft_short() -> None:
    world = World.of(storyteller(3), storyteller(3))
    world.draft.delay = lambda call, num_tokens: 100.0

    outcome = run_virtual(world.answer(**SD, deadline_s=150.0))

    assert outcome.finish_reason is FinishReason.DEADLINE
    assert len(outcome.completion_ids) > 0
    assert len(world.draft.cancelled) == 1
    world.assert_idle()


# What is proposed --------------------------------------------------------------------------------------------------------


def test_drafts_are_cut_before_the_first_that_the_draft_is_not_sure_of() -> None:
    log_probs = [math.log(0.9), math.log(0.4), math.log(0.39), math.log(0.9)]
    assert confident((1, 2, 3, 4), log_probs, 0.4) == (1, 2)
    assert confident((1, 2, 3, 4), log_probs, 0.95) == ()
    assert confident((1, 2, 3, 4), log_probs, 0.0) == (1, 2, 3, 4)
    assert confident((1, 2, 3, 4), [], 0.4) == (1, 2, 3, 4)  # an engine that does not say


@pytest.mark.parametrize("length", ["fixed", "auto"])
def test_only_auto_asks_how_sure_the_draft_is(length: str) -> None:
    target = storyteller(4)
    world = World.of(target, target)
    world.draft.log_prob = lambda context: -10.0

    outcome = run_virtual(world.answer(**SD, draft_length=length))

    assert {recorded.call.return_log_probs for recorded in world.draft.calls} == {length == "auto"}
    assert (outcome.usage.num_draft_tokens == 0) == (length == "auto")
    assert outcome.completion_ids == alone(world).completion_ids


@pytest.mark.parametrize("proposer", ["draft_model", "draft_step"])
def test_auto_asks_for_fewer_drafts_where_few_are_accepted(proposer: str) -> None:
    def longest(agreement: float) -> float:
        total = calls = 0
        for salt in range(12):
            target = storyteller(salt, break_rate=0.03)
            world = World.of(target, imitator(target, salt + 1, agreement), verified_token_cost=0.1)
            mode = "sd" if proposer == "draft_model" else "lr_sd"
            run_virtual(world.answer(mode=mode, proposer=proposer, draft_length="auto", num_draft_tokens=16))
            sizes = [len(one.call.draft_ids) for one in world.target.calls if one.call.draft_ids is not None]
            total, calls = total + sum(sizes), calls + len(sizes)
        return total / calls

    assert longest(0.3) < longest(0.98)


@pytest.mark.parametrize("await_draft", ["never", "always", "auto"])
def test_a_target_step_waits_for_its_drafted_step_where_it_shall(await_draft: str) -> None:
    target = storyteller(4)
    world = World.of(target, target)

    outcome = run_virtual(world.answer(mode="lr_sd", max_depth=2, await_draft=await_draft, trace=True))

    steps = [committed.record for committed in world.received if committed.record is not None]
    times = [(step.target_started_s, step.drafted_finished_s) for step in steps]
    waited = [started >= drafted for started, drafted in times if started is not None and drafted is not None]
    assert len(waited) > 6
    assert set(waited) == {"never": {False}, "always": {True}, "auto": {False, True}}[await_draft]
    assert outcome.completion_ids == alone(world).completion_ids


def test_a_followed_drafted_step_is_not_drafted_again() -> None:
    """In lr_sd the drafted step is the draft model's word already; the draft is asked where the target has left it."""
    target = storyteller(4)
    world = World.of(target, target)

    run_virtual(world.answer(mode="lr_sd", proposer="draft_model", max_tokens=200))

    drafting = [recorded.call for recorded in world.draft.calls if "/token_draft/" in recorded.call.request_id]
    assert drafting
    assert all(CLOSE in call.input_ids for call in drafting)  # the answer after the reasoning


def proposed_by(draft_model: Proposal | None, written: list[int], drafted: list[int] | None) -> Proposal:
    async def propose(position: Position) -> Proposal | None:
        return draft_model

    context = np.asarray([0, 1, 2, 3, 0, 1], dtype=np.int32)
    return run_virtual(make_proposer(ProposerName.DRAFT_MODEL, 3, propose)(Position(context, written, drafted, 2)))


def test_the_drafted_step_then_the_draft_model_then_lookup() -> None:
    said, silent = Proposal((8, 9), 2, "call"), None
    assert proposed_by(said, [0, 1], [0, 1, 7]) == Proposal((7,))
    assert proposed_by(said, [0, 1], [0, 4, 7]) == said
    assert proposed_by(said, [0, 1], None) == said
    assert proposed_by(Proposal((), 2, "call"), [0, 1], None).token_ids == ()  # not sure: no guess in its place
    assert proposed_by(silent, [0, 1], [5, 1, 7]) == Proposal((7,))
    assert proposed_by(silent, [0, 1], None) == Proposal((2, 3))


def test_a_draft_with_nothing_to_say_is_no_failure() -> None:
    world = World.of(storyteller(4), storyteller(4))

    async def nothing(call: EngineCall):  # type: ignore[no-untyped-def]
        from lr_backend.engine import Generation

        return Generation(())

    world.draft.generate = nothing  # type: ignore[method-assign]
    asked = DraftModel(world.draft, None, "r", token_draft_seed, lambda: True, lambda: None)  # type: ignore[arg-type]
    position = Position(np.asarray([1], dtype=np.int32), [], None, 4)

    assert run_virtual(asked(position)) is None
    outcome = run_virtual(world.answer(**SD))
    assert not outcome.usage.degraded
    assert outcome.completion_ids == alone(world).completion_ids


# What is counted and told ------------------------------------------------------------------------------------------------


def test_tokens_that_the_target_takes_over_are_not_wasted() -> None:
    target = storyteller(4)
    world = World.of(target, target)

    usage = run_virtual(world.answer(**SD)).usage

    assert usage.num_draft_calls == len(world.draft.calls) > 0
    assert usage.token_acceptance_rate == 1.0
    assert usage.num_accepted_tokens == world.draft.total_tokens
    assert usage.num_target_calls < usage.completion_tokens
    assert usage.num_wasted_tokens == 0
    assert usage.num_steps_drafted == 0


@given(salts, st.sampled_from(["sd", "lr_sd"]), shapes, salts)
def test_the_trace_tells_token_drafts_from_drafted_steps(salt: int, mode: str, shape: dict[str, object], order: int) -> None:
    target = storyteller(salt)
    world = unsure(salt, World.of(target, imitator(target, salt + 1, 0.8), lambda a, b: True).shuffled(order))

    trace = traced(world, mode=mode, proposer="draft_model", **shape)

    drafting = [call for call in trace.calls if call.purpose is Purpose.TOKEN_DRAFT]
    assert len(drafting) == sum("/token_draft/" in recorded.call.request_id for recorded in world.draft.calls)
    assert all(call.role is Role.DRAFT and call.num_committed_tokens == 0 for call in drafting)
    for call in drafting:
        assert call.num_accepted_tokens <= call.num_draft_tokens <= call.num_tokens or call.num_tokens == 0
        taken = call.outcome is CallOutcome.ACCEPTED
        assert not taken or call.num_accepted_tokens > 0
    assert sum(call.num_wasted_tokens for call in trace.calls) == trace.usage.num_wasted_tokens
    found = analyse(trace)
    assert sum(stretch.duration_ms for stretch in found.critical) == pytest.approx(trace.latency_ms, abs=0.1)
    if drafting:
        assert "token draft" in page(trace, found)


def test_waiting_for_token_drafts_is_no_bottleneck_of_sd() -> None:
    target = storyteller(4)
    trace = traced(World.of(target, target), **SD)

    assert analyse(trace).breakdown.roles[Role.DRAFT].critical_ms > 0.15 * trace.latency_ms
    assert not analyse(trace).findings


def test_nothing_is_drafted_past_an_end() -> None:
    """The draft stops where the target would, so that a closing token or a delimiter is the last draft of a verification."""
    target = storyteller(4)
    world = World.of(target, imitator(target, 5, 0.8))

    run_virtual(world.answer(**SD, num_draft_tokens=16))

    for recorded in world.target.calls:
        if recorded.call.draft_ids is not None:
            assert not set(recorded.call.draft_ids.tolist()[:-1]) & {END, BREAK}
