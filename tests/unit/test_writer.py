"""One step in one engine call or in many: whatever calls bring, the step is the same, and so are the books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.contract import IntArray
from lr_backend.engine import GREEDY, EngineCall, Generation, Role, Sampling, one_hot_logits
from lr_backend.errors import EngineUnavailable
from lr_backend.loop.ledger import Ledger, MeteredEngine
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.tree import Node
from lr_backend.loop.work import Change, WorkUnderWay
from lr_backend.loop.writer import DraftTokens, StepWriter
from lr_backend.policy.prices import LONG_PROMPT
from lr_backend.propose import NGram, Proposal
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.lookup import MOST_PLAIN, Lookup
from lr_backend.propose.proposal import NOTHING, Room
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from lr_backend.steps.step import Step, StepEnd
from lr_backend.testing import Script, ScriptedEngine, run_virtual
from lr_backend.trace.schema import Purpose
from tests.support.examples import answers
from tests.support.traces import taking
from tests.support.world import FickleEngine

END, BREAK, NEWLINE = 999, 300, 500
RULES = StepRules.build(BLANK_LINE, {BREAK: "\n\n"}, [END])
WITH_PAIRS = StepRules.build(BLANK_LINE, {BREAK: "\n\n", NEWLINE: "\n"}, [END])
PREFIX: IntArray = np.arange(10, dtype=np.int32)


def counting(context: tuple[int, ...], seed: int) -> int:
    """Goes on counting past a break at 300; ends after 400."""
    return context[-1] + 1 if context[-1] < 400 else END


@dataclass
class Proposing:
    """Proposes tokens of which so many are right, or nothing; keeps what it is told."""

    num_right: int = 3
    proposal: Proposal | None = None
    rooms: list[int] = field(default_factory=list)
    told: list[tuple[int, int]] = field(default_factory=list)
    follows_drafted: bool = True

    @asynccontextmanager
    async def step(
        self, prefix: IntArray, stop_words: IntArray, room: Room, drafted: GrowingText | None
    ) -> AsyncIterator[Proposing]:
        self._prefix, self._room = prefix, room
        yield self

    async def next(self, written: Sequence[int], max_tokens: int) -> Proposal:
        self.rooms.append(self._room(written))
        if self.proposal is not None:
            return self.proposal
        last = int([*self._prefix, *written][-1])
        return Proposal((*range(last + 1, last + 1 + self.num_right), 777)[:max_tokens])

    def verified(self, proposed: Sequence[int], num_accepted: int) -> None:
        self.told.append((len(proposed), num_accepted))


def writer(
    engine: ScriptedEngine, source: object = None, *, most: int = 8, sampling: Sampling = GREEDY, **options: object
) -> StepWriter:
    drafts = DraftTokens(source, most, **options) if source is not None else None  # type: ignore[arg-type]
    return StepWriter(engine, Role.TARGET, sampling, Seeds(0), "r", Ledger(lambda: 0.0, len(PREFIX)), drafts)


# Verified ----------------------------------------------------------------------------------------------------------------


def test_draft_tokens_are_verified_a_call_each_and_counted() -> None:
    engine, source = ScriptedEngine(counting), Proposing(3)
    made = writer(engine, source)

    step = run_virtual(made.speculate(PREFIX, 30, RULES.of_step))

    assert step.ids == tuple(range(10, 40))
    assert (step.end, step.closes) == (StepEnd.CAP, False)
    sizes = [len(call.call.draft_ids) if call.call.draft_ids is not None else 0 for call in engine.calls]
    # Three right ones and a wrong one, and the target's own; of the last two tokens one is the target's own.
    assert sizes == [4, 4, 4, 4, 4, 4, 4, 1]
    assert source.told == [(4, 3)] * 7 + [(1, 1)]
    assert made.ledger.verifications == source.told
    assert made.ledger.beginnings == [(4, 3)]
    assert (made.ledger.num_proposed, made.ledger.num_accepted) == (29, 22)
    assert source.rooms == list(range(30, 0, -4))[:8]


def test_nothing_is_proposed_past_the_end_of_a_step() -> None:
    engine = ScriptedEngine(counting)
    step = run_virtual(writer(engine, Proposing(300), most=16).speculate(PREFIX, 400, RULES.of_step))
    assert step.ids == tuple(range(10, BREAK + 1))
    for recorded in engine.calls:
        drafts = [] if recorded.call.draft_ids is None else recorded.call.draft_ids.tolist()
        assert BREAK not in drafts[:-1]


@pytest.mark.parametrize(("proposal", "budgets"), [(Proposal(plain_tokens=7), [7] * 4 + [2]), (NOTHING, [30])])
def test_where_there_is_nothing_to_verify_the_target_writes_as_far_as_it_is_told(proposal: Proposal, budgets: list[int]) -> None:
    engine = ScriptedEngine(counting)
    run_virtual(writer(engine, Proposing(proposal=proposal)).speculate(PREFIX, 30, RULES.of_step))
    assert [recorded.call.max_new_tokens for recorded in engine.calls] == budgets
    assert all(recorded.call.draft_ids is None for recorded in engine.calls)


def test_plain_calls_grow_while_a_lookup_finds_nothing() -> None:
    engine = ScriptedEngine(counting)
    run_virtual(writer(engine, Lookup(NGram())).speculate(PREFIX, 200, RULES.of_step))
    assert [recorded.call.max_new_tokens for recorded in engine.calls] == [4, 8, 16, 32, MOST_PLAIN, MOST_PLAIN, 12]


def saying(*ids: int) -> Script:
    return lambda context, seed: ids[len(context) - len(PREFIX)]


def test_a_delimiter_that_two_calls_write_ends_the_second_at_once() -> None:
    engine = ScriptedEngine(saying(10, 11, NEWLINE, NEWLINE, 12, 13))
    made = writer(engine, Proposing(proposal=Proposal(plain_tokens=3)))
    step = run_virtual(made.speculate(PREFIX, 30, WITH_PAIRS.of_step))
    assert (step.ids, step.end) == ((10, 11, NEWLINE, NEWLINE), StepEnd.DELIMITER)
    assert engine.total_tokens == 4, "nothing is written that nobody reads"


@pytest.mark.parametrize("source", [None, Proposing(proposal=NOTHING)])
def test_a_call_that_the_prefix_and_one_token_end_is_gone_on_with(source: object) -> None:
    engine, prefix = ScriptedEngine(saying(NEWLINE, 10, 11, BREAK)), np.array([*PREFIX[:-1], NEWLINE], np.int32)
    made = writer(engine, source)
    write = made.write if source is None else made.speculate
    step = run_virtual(write(prefix, 30, WITH_PAIRS.of_step))
    assert (step.ids, step.end) == ((NEWLINE, 10, 11, BREAK), StepEnd.DELIMITER), "a step ends by its own text"
    assert [len(recorded.call.input_ids) for recorded in engine.calls] == [10, 11]


def test_a_single_token_is_not_speculated_on() -> None:
    source = Proposing()
    engine = ScriptedEngine(counting)
    run_virtual(writer(engine, source).speculate(PREFIX, 1, RULES.of_step))
    assert (source.rooms, [recorded.call.max_new_tokens for recorded in engine.calls]) == ([], [1])


@pytest.mark.parametrize(("temperature", "width"), [(0.7, 1000), (0.0, 0)])
def test_one_hot_logits_go_with_sampled_drafts_alone(temperature: float, width: int) -> None:
    engine = ScriptedEngine(counting)
    made = writer(engine, Proposing(), sampling=Sampling(temperature), one_hot_vocab=1000)
    run_virtual(made.speculate(PREFIX, 30, RULES.of_step))
    sent = [call.call.draft_logits for call in engine.calls if call.call.draft_ids is not None]
    assert {0 if logits is None else logits.shape[1] for logits in sent} == {width}


@pytest.mark.parametrize("vocab_size", [262, 1_024, 32_000, 151_936, 152_064])
def test_a_token_that_is_certain_is_accepted_whatever_is_drawn(vocab_size: int) -> None:
    """Upstream compares p(target) > r p(draft) in FP16, with r of up to 1."""
    weights = np.exp(one_hot_logits(np.array([3], np.int32), vocab_size)[0].astype(np.float64))
    drafted, *others = np.float16(weights[[3, 0, 4]] / weights.sum())
    assert 0.999 < drafted < 1.0
    assert max(others) < 2e-6


# However it is cut -------------------------------------------------------------------------------------------------------


@answers()
@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.sampled_from([0, 280, 390]),
    st.integers(0, 9),
    st.sampled_from(["step", "answer"]),
)
def test_a_step_does_not_depend_on_the_calls_that_bring_it(
    salt: int, max_tokens: int, start: int, num_right: int, ending: str
) -> None:
    rules = RULES.of_step if ending == "step" else RULES.of_answer
    prefix = np.asarray([start], dtype=np.int32)

    async def all_ways() -> list[Step]:
        text = GrowingText()
        return [
            await writer(ScriptedEngine(counting)).write(prefix, max_tokens, rules),
            await writer(FickleEngine(counting, salt=salt)).write(prefix, max_tokens, rules),
            await writer(ScriptedEngine(counting), Proposing(num_right)).speculate(prefix, max_tokens, rules),
            await writer(FickleEngine(counting, salt=salt), Proposing(num_right)).speculate(prefix, max_tokens, rules),
            await writer(FickleEngine(counting, salt=salt)).draft(
                prefix, max_tokens, rules, text, sibling=0, sampling=GREEDY, tokens_a_call=1 + num_right
            ),
        ]

    first, *others = run_virtual(all_ways())
    assert others == [first] * 4


# Drafted -----------------------------------------------------------------------------------------------------------------


def test_a_drafted_step_is_read_while_it_is_written() -> None:
    engine = ScriptedEngine(counting, delay=taking(1.0))
    made = writer(engine)

    async def main() -> None:
        text = GrowingText()
        seen = []

        async def read() -> None:
            for num in (1, 5, 9, 13):
                await text.has(num)
                seen.append((asyncio.get_running_loop().time(), len(text.ids), text.done))

        reading = asyncio.create_task(read())
        step = await made.draft(PREFIX, 10, RULES.of_step, text, sibling=0, sampling=GREEDY, tokens_a_call=4)
        await reading
        assert step.ids == tuple(text.ids) == tuple(range(10, 20))
        assert seen == [(1.0, 4, False), (2.0, 8, False), (3.0, 10, True), (3.0, 10, True)]

    run_virtual(main())
    assert [recorded.call.max_new_tokens for recorded in engine.calls] == [4, 4, 2]


def test_a_text_that_fails_ends_for_those_who_wait_for_it() -> None:
    engine = ScriptedEngine(counting, fail=lambda call: EngineUnavailable("down") if len(call.input_ids) > 12 else None)

    async def main() -> None:
        text = GrowingText()
        waiting = asyncio.create_task(text.has(100))
        with pytest.raises(EngineUnavailable):
            await writer(engine).draft(PREFIX, 50, RULES.of_step, text, sibling=0, sampling=GREEDY, tokens_a_call=4)
        await waiting
        assert text.done and len(text.ids) == 4

    run_virtual(main())


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_texts_agree_as_far_as_both_go(ids: list[int], written: list[int]) -> None:
    text = GrowingText()
    text.extend(ids)
    assert text.agrees(written) == all(a == b for a, b in zip(ids, written, strict=False))


@pytest.mark.parametrize("scored", [False, True])
def test_the_log_probability_is_that_of_the_steps_own_tokens(scored: bool) -> None:
    """A call may bring more than the step."""

    async def unstopped(call: EngineCall) -> Generation:
        ids = tuple(range(int(call.input_ids[-1]) + 1, int(call.input_ids[-1]) + 9))
        return Generation(ids, log_probs=tuple(-float(one) for one in ids) if call.return_log_probs else ())

    engine = ScriptedEngine(counting)
    engine.generate = unstopped  # type: ignore[method-assign]
    made = writer(engine)
    prefix = np.asarray([297], dtype=np.int32)
    step = run_virtual(made.draft(prefix, 50, RULES.of_step, GrowingText(), sibling=0, sampling=GREEDY, scored=scored))
    assert step.ids == (298, 299, BREAK)
    assert step.log_prob == (-897.0 if scored else None)


def test_an_engine_that_keeps_silent_is_taken_for_dead_by_every_way_of_writing() -> None:
    async def nothing(call: EngineCall) -> Generation:
        return Generation(())

    engine = ScriptedEngine(counting)
    engine.generate = nothing  # type: ignore[method-assign]
    made = writer(engine, Proposing())
    for work in (
        lambda: made.write(PREFIX, 9, RULES.of_step),
        lambda: made.speculate(PREFIX, 9, RULES.of_step),
        lambda: made.draft(PREFIX, 9, RULES.of_step, GrowingText(), sibling=0, sampling=GREEDY),
    ):
        with pytest.raises(EngineUnavailable, match="no tokens"):
            run_virtual(work())


def test_all_that_begins_before_a_model_has_read_the_prompt_waits_for_that() -> None:
    """Steps behind drafted ones too: what they take is no price of a step."""

    @dataclass
    class Slow:
        async def generate(self, call: EngineCall) -> Generation:
            await asyncio.sleep(1.0)
            return Generation((1,))

        async def close(self) -> None: ...

    async def main() -> None:
        ledger = Ledger(asyncio.get_running_loop().time, LONG_PROMPT)
        target = MeteredEngine(Slow(), Role.TARGET, ledger, timeout_s=None)
        calls = [
            asyncio.create_task(target.generate(EngineCall(name, PREFIX, len(PREFIX) + 1, draft_ids=PREFIX))) for name in "ab"
        ]
        await asyncio.sleep(0.5)
        assert ledger.num_read(Role.TARGET) == LONG_PROMPT
        await asyncio.gather(*calls)
        assert (ledger.num_read(Role.TARGET), ledger.num_read(Role.DRAFT)) == (0, LONG_PROMPT)
        assert not list(ledger.timed_verifications())
        await target.generate(EngineCall("c", PREFIX, len(PREFIX) + 1, draft_ids=PREFIX))
        assert list(ledger.timed_verifications()) == [(len(PREFIX), 0, 1.0)]

    run_virtual(main())


def test_work_that_is_cancelled_has_come_to_its_end_even_where_whoever_waits_for_it_is_cancelled() -> None:
    @dataclass
    class LetsGoLate:
        async def generate(self, call: EngineCall) -> Generation:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(1.0)
            return Generation((1,))

        async def close(self) -> None: ...

    async def main() -> None:
        ledger = Ledger(asyncio.get_running_loop().time, len(PREFIX))
        target = MeteredEngine(LetsGoLate(), Role.TARGET, ledger, timeout_s=None)
        work = WorkUnderWay(ledger)

        async def ask() -> Change:
            await target.generate(EngineCall("a", PREFIX, 4))
            return lambda: None

        work.start(Node(PREFIX), Purpose.TARGET_STEP, ask)
        await asyncio.sleep(1.0)
        ending = asyncio.create_task(work.cancel_all())
        await asyncio.sleep(0.5)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert [span.cancelled for span in ledger.spans] == [True]
        assert all(span.finished_s is not None for span in ledger.spans)

    run_virtual(main())
