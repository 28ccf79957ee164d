"""The draft model's draft tokens: the answer is the target's own whatever they are, and no word is asked for twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.clock import running_clock
from lr_backend.contract import IntArray
from lr_backend.engine import GREEDY, EngineCall, Generation, Role
from lr_backend.errors import EngineRejected, EngineUnavailable
from lr_backend.loop.answer import Outcome
from lr_backend.policy.policy import Learned
from lr_backend.propose import DraftModel, Proposal
from lr_backend.propose.draft_model import MOST_AHEAD
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.proposal import NOTHING, Room
from lr_backend.request import FinishReason
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from lr_backend.testing import Script, ScriptedEngine, run_virtual
from lr_backend.trace.analysis import analyse
from lr_backend.trace.html import page
from lr_backend.trace.schema import CallOutcome, Purpose
from tests.support.examples import answers
from tests.support.traces import taking, traced
from tests.support.world import BREAK, CLOSE, END, PROMPT, TOKENIZER, World, chance, imitator, storyteller

salts = st.integers(0, 10_000)
shapes = st.fixed_dictionaries(
    {
        "num_draft_tokens": st.sampled_from([1, 3, 16]),
        "max_tokens": st.sampled_from([1, 7, 30, 200]),
        "stream": st.booleans(),
        "deterministic": st.booleans(),
    }
)
SD = {"mode": "sd", "proposer": "draft_model"}
PREFIX: IntArray = np.arange(10, dtype=np.int32)
STOPS = StepRules.build(BLANK_LINE, {}, [999]).stop_words
CALL_TOKENS = 4


# By itself -------------------------------------------------------------------------------------------------------------


def counting(context: tuple[int, ...], seed: int) -> int:
    return context[-1] + 1


@dataclass
class Drafting:
    """A draft model that counts on, a second a call."""

    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(counting, delay=taking(1.0)))
    tokens_first: int = CALL_TOKENS
    patient: bool = False
    follows_drafted: bool = True
    room: Room = lambda ids: 400 - len(ids)
    num_ids: int | None = None
    failures: int = 0
    taken: list[tuple[str, int, int]] = field(default_factory=list)

    def _failed(self) -> None:
        self.failures += 1

    @property
    def model(self) -> DraftModel:
        return DraftModel(
            engine=self.engine,
            sampling=GREEDY,
            request_id="r",
            seed=lambda start, offset: 0,
            tokens_a_call=CALL_TOKENS,
            available=lambda: not self.failures,
            failed=self._failed,
            tokens_first=self.tokens_first,
            follows_drafted=self.follows_drafted,
            proposed=lambda *told: self.taken.append(told),
            patient=self.patient,
            num_ids=self.num_ids,
        )

    def step(self, drafted: GrowingText | None = None):  # type: ignore[no-untyped-def]
        return self.model.step(PREFIX, STOPS, self.room, drafted)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_pieces_of_the_drafted_step_are_proposed_while_it_is_written() -> None:
    drafting = Drafting()

    async def main() -> None:
        text, later = GrowingText(), asyncio.get_running_loop().call_later
        later(1.0, text.extend, (10, 11))
        later(2.0, text.extend, (12,))
        later(3.0, text.end)
        async with drafting.step(text) as drafts:
            assert (await drafts.next([], 8), now_s()) == (Proposal((10, 11)), 1.0)
            drafts.verified((10, 11), 2)
            assert (await drafts.next([10, 11], 8), now_s()) == (Proposal((12,)), 2.0)
            assert not drafting.engine.calls
            # It ends before the target's step does: from there on the draft is asked.
            assert (await drafts.next([10, 11, 12, 13], 8), now_s()) == (Proposal((14, 15, 16, 17)), 4.0)
        assert not drafting.taken  # they are no tokens of its own calls

    run_virtual(main())
    assert drafting.engine.calls[0].call.input_ids.tolist()[10:] == [10, 11, 12, 13]


def test_the_drafted_step_is_left_where_the_target_leaves_it() -> None:
    drafting = Drafting()

    async def main() -> None:
        text = GrowingText()
        text.extend((10, 11, 50, 51))
        text.end()
        async with drafting.step(text) as drafts:
            assert (await drafts.next([], 8)).token_ids == (10, 11, 50, 51)
            assert (await drafts.next([10, 11, 12], 8)).token_ids == (13, 14, 15, 16)

    run_virtual(main())


@pytest.mark.parametrize("read", ["drafted step", "own tokens"])
def test_a_proposal_ends_before_an_id_that_the_target_has_not(read: str) -> None:
    """It may refuse the call, which ends the request."""
    drafting = Drafting(num_ids=12, follows_drafted=read == "drafted step")

    async def main() -> None:
        text = GrowingText()
        text.extend((10, 11, 12, 13))
        text.end()
        async with drafting.step(text) as drafts:
            assert await drafts.next([], 8) == Proposal((10, 11))
            drafts.verified((10, 11), 2)
            assert await drafts.next([10, 11], 8) == Proposal(plain_tokens=1), "the target writes it alone"
            assert (await drafts.next([10, 11, 7], 8)).token_ids == (8, 9, 10, 11), "and is followed from where it leaves it"

    run_virtual(main())


def test_a_drafted_step_whose_words_are_unlikely_is_not_read() -> None:
    drafting = Drafting(follows_drafted=False)

    async def main() -> None:
        text = GrowingText()
        text.extend((50, 51))
        async with drafting.step(text) as drafts:
            assert (await drafts.next([], 8)).token_ids == (10, 11, 12, 13)

    run_virtual(main())


def test_the_first_call_of_a_step_may_write_fewer() -> None:
    """The target waits for it. Behind words of its own the draft begins anew with as many as ever."""
    drafting = Drafting(tokens_first=2)

    async def main() -> None:
        async with drafting.step() as drafts:
            assert (await drafts.next([], 8)).token_ids == (10, 11)
            assert (await drafts.next([10, 11], 8)).token_ids == (12, 13, 14, 15)
            assert (await drafts.next([10, 11, 50], 8)).token_ids == (51, 52, 53, 54)

    run_virtual(main())


def test_drafting_goes_on_while_a_verification_runs_but_not_far() -> None:
    drafting = Drafting()

    async def main() -> None:
        async with drafting.step() as drafts:
            assert (await drafts.next([], CALL_TOKENS), now_s()) == (Proposal((10, 11, 12, 13)), 1.0)
            await asyncio.sleep(100.0)
            assert len(drafting.engine.calls) == MOST_AHEAD
            # All were right, and a token more: what follows is there already.
            assert (await drafts.next([10, 11, 12, 13, 14], CALL_TOKENS), now_s()) == (Proposal((15, 16, 17, 18)), 101.0)
            await asyncio.sleep(100.0)
            assert len(drafting.engine.calls) == MOST_AHEAD + 2

    run_virtual(main())
    texts = [recorded.call.input_ids.tolist()[10:] for recorded in drafting.engine.calls]
    assert texts == [list(range(10, 10 + CALL_TOKENS * number)) for number in range(len(texts))]


def test_it_begins_anew_where_the_target_disagrees_and_nowhere_else() -> None:
    drafting = Drafting()

    async def main() -> None:
        async with drafting.step() as drafts:
            await drafts.next([], CALL_TOKENS)
            assert (await drafts.next([10, 11, 12, 13], CALL_TOKENS)).token_ids == (14, 15, 16, 17)
            assert (await drafts.next([10, 11, 70], CALL_TOKENS)).token_ids == (71, 72, 73, 74)
            assert (await drafts.next([10, 11, 70, 71], CALL_TOKENS)).token_ids[:3] == (72, 73, 74)

    run_virtual(main())
    texts = [recorded.call.input_ids.tolist()[10:] for recorded in drafting.engine.calls]
    anew = [text for text in texts if 70 in text]
    assert anew[0] == [10, 11, 70]
    assert len(set(map(tuple, texts))) == len(texts)
    assert len(drafting.engine.cancelled) == 2  # that of the text which was left, and the one under way at the end


def test_what_is_taken_over_is_told_to_the_call_that_wrote_it() -> None:
    drafting = Drafting()

    async def main() -> None:
        async with drafting.step() as drafts:
            await drafts.next([], CALL_TOKENS)
            await asyncio.sleep(10.0)
            proposal = await drafts.next([10, 11], 5)
            assert proposal.token_ids == (12, 13, 14, 15, 16)
            drafts.verified(proposal.token_ids, 3)

    run_virtual(main())
    assert drafting.taken == [("r/draft_tokens/0", 2, 2), ("r/draft_tokens/1", 3, 1)]


@answers()
@given(salts, st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_patient_proposals_do_not_depend_on_when_tokens_come(order: int, accepted: list[int]) -> None:
    """Nor on whether a drafted step is still being written."""

    def proposals(order: int | None) -> list[tuple[int, ...]]:
        def seconds(*what: object) -> float:
            return 0.0 if order is None else 10.0 * chance("takes", order, *what) ** 2

        drafting = Drafting(ScriptedEngine(counting, delay=lambda call, _: seconds(call.request_id)), patient=True)

        async def main() -> list[tuple[int, ...]]:
            text, found = GrowingText(), []

            async def write() -> None:
                for number, piece in enumerate(((10, 11), (12, 13, 14), (60, 61))):
                    await asyncio.sleep(seconds("piece", number))
                    text.extend(piece)
                text.end()

            writing = asyncio.create_task(write())
            async with drafting.step(text) as drafts:
                written: list[int] = []
                for number, count in enumerate(accepted):
                    proposed = (await drafts.next(written, CALL_TOKENS)).token_ids
                    found.append(proposed)
                    await asyncio.sleep(seconds("verification", number))
                    written += [*proposed[:count], 10 + len(written) + len(proposed[:count])]
            await writing
            return found

        return run_virtual(main())

    assert proposals(order) == proposals(None)


@answers()
@given(salts, st.floats(0.0, 12.0))
def test_no_call_is_left_behind(salt: int, moment_s: float) -> None:
    drafting = Drafting()

    async def main() -> None:
        async def use() -> None:
            async with drafting.step() as drafts:
                written: list[int] = []
                while True:
                    written += (await drafts.next(written, CALL_TOKENS)).token_ids[: int(5 * chance(salt, len(written)))]
                    written.append(int(90 * chance("own", salt, len(written))))
                    await asyncio.sleep(0.7)

        using = asyncio.create_task(use())
        await asyncio.sleep(moment_s)
        using.cancel()
        await asyncio.wait({using})
        assert len(asyncio.all_tasks()) == 1
        assert not drafting.engine.in_flight

    run_virtual(main())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_draft_that_fails_has_nothing_more_to_propose(after: int) -> None:
    drafting = Drafting()
    drafting.engine.fail = lambda call: EngineUnavailable("down") if len(drafting.engine.calls) > after else None

    async def main() -> None:
        async with drafting.step() as drafts:
            written: list[int] = []
            while (proposal := await drafts.next(written, CALL_TOKENS)) is not NOTHING:
                written += proposal.token_ids
            assert len(written) <= after * CALL_TOKENS
            assert await drafts.next(written, CALL_TOKENS) is NOTHING
        async with drafting.step() as drafts:
            assert await drafts.next([], CALL_TOKENS) is NOTHING

    run_virtual(main())
    assert (drafting.failures, len(drafting.engine.calls)) == (1, after + 1)


def test_an_error_that_is_no_engines_is_not_swallowed() -> None:
    drafting = Drafting()

    async def broken(call: EngineCall) -> Generation:
        raise RuntimeError("a bug")

    drafting.engine.generate = broken  # type: ignore[method-assign]

    async def main() -> None:
        async with drafting.step() as drafts:
            await drafts.next([], CALL_TOKENS)

    with pytest.raises(RuntimeError, match="a bug"):
        run_virtual(main())


@pytest.mark.parametrize("end", [4, 6, 8, 400])
def test_nothing_is_drafted_past_the_end_of_the_step(end: int) -> None:
    """At a stop word, also where a call ends just there, or at the last token that there is room for."""
    drafting = Drafting(ScriptedEngine(lambda context, seed: 999 if len(context) == 9 + end else context[-1] + 1))
    drafting.room = lambda ids: 0 if 999 in ids else 10 - len(ids)

    async def main() -> None:
        async with drafting.step() as drafts:
            await drafts.next([], CALL_TOKENS)
            await asyncio.sleep(100.0)
            proposed = (await drafts.next([10, 11], 10)).token_ids
            assert len(proposed) == min(end, 10) - 2

    run_virtual(main())
    for recorded in drafting.engine.calls:
        assert 999 not in recorded.call.input_ids
        assert len(recorded.call.input_ids) + recorded.call.max_new_tokens <= len(PREFIX) + 10


def test_a_call_that_comes_back_short_ends_nothing() -> None:
    drafting = Drafting()
    whole = drafting.engine.generate

    async def short(call: EngineCall) -> Generation:
        generation = await whole(call)
        return replace(generation, token_ids=generation.token_ids[:1])

    drafting.engine.generate = short  # type: ignore[method-assign]

    async def main() -> None:
        async with drafting.step() as drafts:
            assert (await drafts.next([], CALL_TOKENS)).token_ids == (10,)
            await asyncio.sleep(100.0)
            assert (await drafts.next([10, 11], CALL_TOKENS)).token_ids == (12, 13, 14, 15)

    run_virtual(main())


def test_a_draft_with_nothing_to_say_is_no_failure() -> None:
    world = World.of(storyteller(4), storyteller(4))

    async def nothing(call: EngineCall) -> Generation:
        return Generation(())

    world.draft.generate = nothing  # type: ignore[method-assign]

    outcome = run_virtual(world.answer(**SD))
    assert not outcome.usage.degraded
    assert outcome.completion_ids == alone(world).completion_ids


# In the loop -----------------------------------------------------------------------------------------------------------


def anything(salt: int) -> Script:
    """A draft that writes what it likes: ends, closing tokens and delimiters too."""
    return lambda context, seed: int(chance("anything", salt, context, seed) * len(TOKENIZER.words))


def alone(world: World, **fields: object) -> Outcome:
    return run_virtual(world.fresh().answer(mode="ar", stream=False, **fields))


def asked_for_tokens(world: World) -> list[EngineCall]:
    return [recorded.call for recorded in world.draft.calls if "/draft_tokens/" in recorded.call.request_id]


@answers()
@given(salts, st.sampled_from([None, 0.0, 0.6, 0.95, 1.0]), shapes, salts)
def test_greedy_sd_is_the_target_alone_whatever_the_draft_says(
    salt: int, agreement: float | None, shape: dict[str, object], order: int
) -> None:
    target = storyteller(salt, tool_rate=0.2)
    draft = anything(salt) if agreement is None else imitator(target, salt + 1, agreement)
    world = World.of(target, draft)
    drafting = world.shuffled(order)

    outcome = run_virtual(drafting.answer(**SD, **shape))

    assert outcome.completion_ids == alone(world, max_tokens=shape["max_tokens"]).completion_ids
    assert all(END not in recorded.call.input_ids for recorded in drafting.draft.calls)
    assert outcome.usage.num_draft_calls == len(drafting.draft.calls)
    assert outcome.usage.num_draft_calls or shape["max_tokens"] == 1
    end = len(PROMPT) + int(str(shape["max_tokens"]))
    for recorded in drafting.draft.calls:
        assert len(recorded.call.input_ids) + recorded.call.max_new_tokens <= end
    drafting.assert_idle()


@answers()
@given(salts, shapes, salts)
def test_sampled_sd_follows_the_targets_own_dice(salt: int, shape: dict[str, object], order: int) -> None:
    """Where noise hangs on the call: which calls there are is all that drafts may change of it."""
    target = storyteller(salt, sampled=True)
    world = World.of(target, anything(salt)).shuffled(order)

    outcome = run_virtual(world.answer(**SD, temperature=0.6, seed=salt, **shape))

    calls = [recorded.call for recorded in world.target.calls]
    assert len({call.seed for call in calls}) == len(calls)
    own = [target(tuple(call.input_ids.tolist()), call.seed) for call in calls]
    assert [outcome.completion_ids[len(call.input_ids) - len(PROMPT)] for call in calls] == own


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("asked", [0.0, 0.6])
def test_the_draft_takes_its_likeliest_unless_it_draws_with_the_targets_noise(coupled: bool, asked: float) -> None:
    target = storyteller(4)
    world = World.of(target, imitator(target, 5, 0.9), coupled_noise=coupled)

    run_virtual(world.answer(**SD, temperature=asked, top_k=7))

    drawn = {(recorded.call.sampling.temperature, recorded.call.sampling.top_k) for recorded in world.draft.calls}
    assert drawn == {(asked if coupled else 0.0, 7)}


@pytest.mark.parametrize("failure", [EngineUnavailable("down"), EngineRejected("too long"), "timeout"])
@answers()
@given(salts, st.sampled_from(["sd", "lr_sd"]), st.integers(0, 4))
def test_a_draft_that_fails_leaves_the_target(failure: object, salt: int, mode: str, after: int) -> None:
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
    # A call that was given up as nobody needed it has not failed.
    failed = any(span.failed for span in outcome.ledger.spans)
    assert outcome.usage.degraded == (("draft",) if failed else ())
    if mode == "sd":
        assert sum(span.failed for span in outcome.ledger.spans) <= 1  # never asked again
        assert not failed or engine.calls[-1].call.request_id not in engine.cancelled or isinstance(failure, str)
    drafting.assert_idle()


def test_what_is_written_after_the_draft_has_failed_counts_for_no_way_and_no_price() -> None:
    target = storyteller(3, num_steps=60)
    world = World.of(target, imitator(target, 4, 0.9))
    world.draft.fail = lambda call: EngineUnavailable("down")

    async def ask() -> Learned:
        world.learned = Learned(running_clock())
        outcome = await world.answer(mode="auto", max_depth=0, proposer="draft_model", stream=False)
        assert outcome.usage.degraded == ("draft",) and outcome.usage.num_target_calls > 3
        return world.learned

    learned = run_virtual(ask())

    assert all(trial.num_spans == 0 for trial in learned._trials.values())
    assert learned.prices.target[True].token_s.count == 1  # what the draft was asked for
    assert learned.prices.target[False].token_s.count > 1


def test_how_many_draft_tokens_bring_most_is_learned_from_answers() -> None:
    """Where each takes long to write, and is right in three places of five, fewer than may be."""
    target = storyteller(3, num_steps=60)
    world = World.of(target, imitator(target, 4, 0.6))

    async def ask() -> Learned:
        world.learned = Learned(running_clock())
        await world.answer(**SD, num_draft_tokens=8, max_tokens=400)
        return world.learned

    world.draft.delay = lambda call, num_tokens: float(num_tokens)
    learned = run_virtual(ask())
    assert 1 <= learned.draft_length["draft_model"].best(8) < 8
    assert learned.draft_length["engine"].best(8) == 8, "of another proposer nothing was seen"


def test_a_deadline_cuts_a_draft_short() -> None:
    world = World.of(storyteller(3), storyteller(3))
    world.draft.delay = taking(100.0)

    outcome = run_virtual(world.answer(**SD, deadline_s=150.0))

    assert outcome.finish_reason is FinishReason.DEADLINE
    assert len(outcome.completion_ids) > 0
    assert len(world.draft.cancelled) == 1
    world.assert_idle()


def fast_drafts(world: World) -> World:
    world.draft.delay = lambda call, num_tokens: 0.001 * num_tokens
    return world


def test_a_followed_drafted_step_is_not_drafted_again() -> None:
    """It is the draft model's word already; the draft is asked for tokens where there is no drafted step."""
    target = storyteller(4, num_steps=20)
    world = fast_drafts(World.of(target, target))

    outcome = run_virtual(world.answer(mode="lr_sd", proposer="draft_model", num_draft_tokens=4, max_depth=3))

    ids = outcome.completion_ids
    assert CLOSE in ids
    assert asked_for_tokens(world)
    assert all(CLOSE in call.input_ids for call in asked_for_tokens(world))  # the answer after the reasoning
    drafted = [recorded.call for recorded in world.draft.calls if "/draft_tokens/" not in recorded.call.request_id]
    # Every token of the reasoning is drafted once, and no other.
    starts = [len(call.input_ids) - len(PROMPT) for call in drafted]
    assert len(set(starts)) == len(starts)
    reasoning = ids.index(CLOSE) + 1
    assert sum(generation_of(world, call) for call in drafted) == reasoning
    assert outcome.usage.token_acceptance_rate == 1.0


def generation_of(world: World, call: EngineCall) -> int:
    """Tokens that a call to the draft brought."""
    return len(world.draft._write(call).token_ids) if call.request_id not in world.draft.cancelled else 0


def test_the_target_follows_the_drafted_step_piece_by_piece() -> None:
    target = storyteller(4, num_steps=20, break_rate=0.05)
    world = World.of(target, target)

    run_virtual(world.answer(mode="lr_sd", num_draft_tokens=2, max_depth=1))

    first = [recorded for recorded in world.draft.calls if "/draft/" in recorded.call.request_id][:3]
    assert [recorded.call.max_new_tokens for recorded in first] == [2, 2, 2]
    verified = next(recorded for recorded in world.target.calls if recorded.call.draft_ids is not None)
    assert verified.started_s == first[1].started_s  # as soon as its first piece is there


def test_drafted_steps_are_written_in_one_go_where_nobody_reads_them_meanwhile() -> None:
    target = storyteller(4)
    for fields in ({"mode": "lr"}, {"mode": "lr_sd", "proposer": "engine"}, {"mode": "lr_sd", "proposer": "ngram"}):
        world = World.of(target, target)
        run_virtual(world.answer(num_draft_tokens=2, **fields))
        assert max(recorded.call.max_new_tokens for recorded in world.draft.calls) == world.config.limits.max_step_tokens


@pytest.mark.parametrize(
    ("temperature", "coupled", "draft_temperature", "follows"),
    [(0.0, False, None, True), (0.6, False, None, False), (0.6, True, None, True), (0.6, False, 0.0, True)],
)
def test_the_target_reads_the_drafted_step_only_where_it_is_likely_to_have_the_same_words(
    temperature: float, coupled: bool, draft_temperature: float | None, follows: bool
) -> None:
    """One that was drawn with other noise differs after the first few."""
    target = storyteller(4, num_steps=20)
    world = World.of(target, target, coupled_noise=coupled, draft_temperature=draft_temperature)

    run_virtual(world.answer(mode="lr_sd", temperature=temperature, num_draft_tokens=2, max_depth=1, deterministic=True))

    steps = [recorded.call for recorded in world.draft.calls if "/draft_tokens/" not in recorded.call.request_id]
    assert steps[0].max_new_tokens == (2 if follows else world.config.limits.max_step_tokens)
    begins_a_step = {len(call.input_ids) for call in asked_for_tokens(world)} & {len(call.input_ids) for call in steps}
    assert bool(begins_a_step) is not follows


@pytest.mark.parametrize("mode", ["sd", "lr_sd"])
def test_draft_tokens_are_never_asked_for_twice(mode: str) -> None:
    """No two calls for draft tokens of one step begin behind the same words."""
    for salt in range(10):
        target = storyteller(salt, num_steps=20)
        world = World.of(target, imitator(target, salt + 1, 0.8), lambda first, second: False)
        run_virtual(world.answer(mode=mode, stream=True, num_draft_tokens=4, deterministic=True))
        texts = [tuple(call.input_ids.tolist()) for call in asked_for_tokens(world)]
        assert len(set(texts)) == len(texts)


# What is counted and told ------------------------------------------------------------------------------------------------


def test_tokens_that_the_target_takes_over_are_not_wasted() -> None:
    target = storyteller(4)
    world = fast_drafts(World.of(target, target))

    usage = run_virtual(world.answer(**SD, stream=False)).usage

    assert usage.num_draft_calls == len(world.draft.calls) > 0
    assert usage.token_acceptance_rate == 1.0
    assert usage.num_target_calls < usage.completion_tokens
    assert usage.num_steps_drafted == 0
    # But for those that the target draws itself, one a verification.
    assert usage.num_wasted_tokens == world.draft.total_tokens - usage.num_accepted_tokens <= usage.num_target_calls


@given(salts, st.sampled_from(["sd", "lr_sd"]), shapes, salts)
def test_the_trace_tells_draft_tokens_from_drafted_steps(salt: int, mode: str, shape: dict[str, object], order: int) -> None:
    target = storyteller(salt)
    world = World.of(target, imitator(target, salt + 1, 0.8), lambda a, b: True).shuffled(order)

    trace = traced(world, mode=mode, proposer="draft_model", **shape)

    drafting = [call for call in trace.calls if call.purpose is Purpose.DRAFT_TOKENS]
    assert len(drafting) == len(asked_for_tokens(world))
    assert all(call.role is Role.DRAFT and call.num_committed_tokens == 0 for call in drafting)
    for call in drafting:
        assert call.num_accepted_tokens <= call.num_draft_tokens <= call.num_tokens or call.num_tokens == 0
        taken = call.outcome is CallOutcome.ACCEPTED
        assert not taken or call.num_accepted_tokens > 0
    assert sum(call.num_wasted_tokens for call in trace.calls) == trace.usage.num_wasted_tokens
    found = analyse(trace)
    assert sum(stretch.duration_ms for stretch in found.critical) == pytest.approx(trace.latency_ms, abs=0.1)
    if drafting:
        assert "draft tokens" in page(trace, found)


def test_nothing_is_drafted_past_an_end() -> None:
    """The draft stops where the target would, so that a closing token or a delimiter is the last draft of a verification."""
    target = storyteller(4)
    world = World.of(target, imitator(target, 5, 0.8))

    run_virtual(world.answer(**SD, num_draft_tokens=16))

    for recorded in world.target.calls:
        if recorded.call.draft_ids is not None:
            assert not set(recorded.call.draft_ids.tolist()[:-1]) & {END, BREAK}
