"""The eight invariants of the step loop (docs/architecture.md), over permuted completion orders; what two runs have in common is
in test_same_text.py."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.clock import running_clock
from lr_backend.config import Timeouts
from lr_backend.engine import EngineCall
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, InvalidRequest, NotFinite, TargetUnavailable
from lr_backend.loop.answer import Answer, Committed, Outcome, TokenBudget
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.tracing import build_trace
from lr_backend.policy.acceptance import Acceptance
from lr_backend.policy.policy import Learned
from lr_backend.request import FinishReason, Mode, Origin, ProposerName
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from lr_backend.steps.step import Step, StepEnd
from lr_backend.steps.text import TextStream
from lr_backend.testing import ScriptedEngine, run_virtual
from lr_backend.trace.schema import Purpose
from lr_backend.verify import Reason
from tests.support.examples import answers
from tests.support.word_tokenizer import WordTokenizer
from tests.support.world import (
    BREAK,
    CLOSE,
    CONFIG,
    END,
    FIRST_LETTER,
    LETTERS,
    PROMPT,
    RULES,
    THINK,
    TOKENIZER,
    TOOL,
    World,
    chance,
    imitator,
    judge_script,
    storyteller,
)

salts = st.integers(0, 10_000)
agreements = st.sampled_from([0.0, 0.5, 0.9, 0.97, 1.0])
step_modes = st.sampled_from([Mode.AUTO, Mode.LR, Mode.LR_SD, Mode.LOSSLESS])
judging_modes = st.sampled_from([Mode.AUTO, Mode.LR, Mode.LR_SD])
modes = st.sampled_from(list(Mode))
shapes = st.fixed_dictionaries(
    {
        "max_depth": st.integers(0, 6),
        "width": st.integers(1, 3),
        "num_draft_tokens": st.sampled_from([0, 1, 4, 12]),
        "max_tokens": st.sampled_from([1, 7, 30, 200]),
        "proposer": st.sampled_from(list(ProposerName)),
        "stream": st.booleans(),
    }
)
own_branches = st.booleans()


def make_world(
    salt: int, agreement: float, *, like_rate: float = 0.5, sampled: bool = False, tool_rate: float = 0.0, **config: object
) -> World:
    target = storyteller(salt, sampled=sampled, tool_rate=tool_rate)
    return World.of(
        target,
        imitator(target, salt + 1, agreement, sampled=sampled),
        lambda first, second: chance("like", salt, first, second) < like_rate,
        **{"own_branches": salt % 3 > 0, **config},
    )


def plain(world: World, **fields: object) -> Outcome:
    """The target alone."""
    world = world.fresh()
    return run_virtual(world.answer(mode="ar", stream=False, **fields))


@answers()
@given(salts, agreements, modes, shapes, salts, st.none() | st.integers(1, 40))
def test_committed_text_is_final_and_there_is_one_end(
    salt: int, agreement: float, mode: Mode, shape: dict[str, object], order: int, budget: int | None
) -> None:
    world = make_world(salt, agreement, tool_rate=0.3).shuffled(order)

    outcome = run_virtual(world.answer(mode=mode, thinking_token_budget=budget, **shape))

    assert world.text == TOKENIZER.decode(outcome.completion_ids, skip_special_tokens=True)
    assert outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert (outcome.finish_reason is FinishReason.STOP) == (outcome.completion_ids[-1] == END)
    assert outcome.usage.completion_tokens == len(outcome.completion_ids)
    # A step more, and the mark that closes it.
    assert budget is None or outcome.usage.reasoning_tokens <= budget + world.config.limits.max_step_tokens + 1
    world.assert_idle()


@answers()
@given(salts, agreements, step_modes, shapes, salts)
def test_a_verifier_that_always_rejects_equals_the_target_alone(
    salt: int, agreement: float, mode: Mode, shape: dict[str, object], order: int
) -> None:
    world = make_world(salt, agreement, like_rate=0.0)

    outcome = run_virtual(world.shuffled(order).answer(mode=mode, **shape))

    assert outcome.completion_ids == plain(world, max_tokens=shape["max_tokens"]).completion_ids


@answers()
@given(salts, shapes, salts)
def test_lossless_never_takes_a_judged_step(salt: int, shape: dict[str, object], order: int) -> None:
    world = make_world(salt, 0.9, like_rate=1.0)
    shuffled = world.shuffled(order)

    outcome = run_virtual(shuffled.answer(mode="lossless", **shape))

    assert outcome.completion_ids == plain(world, max_tokens=shape["max_tokens"]).completion_ids
    assert not shuffled.judge.calls


@answers()
@given(salts, step_modes, shapes, salts)
def test_a_draft_equal_to_the_target_changes_nothing_and_needs_no_judge(
    salt: int, mode: Mode, shape: dict[str, object], order: int
) -> None:
    world = make_world(salt, 1.0, like_rate=0.0)
    shuffled = world.shuffled(order)

    outcome = run_virtual(shuffled.answer(mode=mode, **{**shape, "width": 1}))

    assert outcome.completion_ids == plain(world, max_tokens=shape["max_tokens"]).completion_ids
    assert not shuffled.judge.calls
    assert not outcome.usage.num_steps_rejected


DOUBTS = {
    "timeout": "timeout",
    "garbage": "garbage",
    "empty": "garbage",
    "not finite": "garbage",
    "refused": "judge_error",
    "error": "judge_error",
}


@pytest.mark.parametrize("doubt", DOUBTS)
@answers()
@given(salts, step_modes, salts)
def test_doubt_rejects_under_its_own_reason(doubt: str, salt: int, mode: Mode, order: int) -> None:
    world = make_world(salt, 0.9, like_rate=1.0)
    shuffled = world.shuffled(order, spread=0.01)
    if doubt == "timeout":
        shuffled.judge.delay = lambda call, num_tokens: 1e6
        shuffled.config = shuffled.config.model_copy(
            update={"timeouts": shuffled.config.timeouts.model_copy(update={"judge_s": 0.5})}
        )
    elif doubt == "garbage":
        shuffled.judge.script = lambda context, seed: 7
    elif doubt == "empty":
        shuffled.judge.script = lambda context, seed: 8
    else:
        error = {"not finite": NotFinite(), "refused": EngineRejected("no such input"), "error": EngineUnavailable("down")}[doubt]
        shuffled.judge.fail = lambda call: error

    outcome = run_virtual(shuffled.answer(mode=mode))

    assert outcome.completion_ids == plain(world).completion_ids
    if shuffled.judge.calls:
        assert set(outcome.usage.num_steps_rejected) <= {DOUBTS[doubt], "marker", "capped"}
    assert outcome.usage.degraded == (("judge",) if DOUBTS[doubt] == "judge_error" and shuffled.judge.calls else ())


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_judge_that_is_dead_does_not_make_verdicts_look_free(is_dead: bool) -> None:
    world = make_world(3, 0.5, like_rate=1.0)
    if is_dead:
        world.judge.fail = lambda call: EngineUnavailable("down")

    async def ask() -> float | None:
        world.learned = Learned(running_clock())
        usage = (await world.answer(mode="lr")).usage
        assert (usage.num_judge_calls > 0) and bool(usage.degraded) == is_dead
        return world.learned.prices.verdict_s["judge"].value

    assert (run_virtual(ask()) is None) == is_dead


@answers()
@given(salts, step_modes, shapes, salts, st.integers(0, 6))
def test_a_dead_draft_leaves_the_target_alone(salt: int, mode: Mode, shape: dict[str, object], order: int, after: int) -> None:
    world = make_world(salt, 0.9, like_rate=0.0)
    shuffled = world.shuffled(order)
    engine = shuffled.draft
    engine.fail = lambda call: EngineUnavailable("down") if len(engine.calls) > after else None

    outcome = run_virtual(shuffled.answer(mode=mode, **shape))

    assert outcome.completion_ids == plain(world, max_tokens=shape["max_tokens"]).completion_ids
    assert outcome.usage.degraded == (("draft",) if len(engine.calls) > after else ()) or shape["max_tokens"] != 200


@answers()
@given(
    salts,
    modes,
    salts,
    st.integers(0, 6),
    st.sampled_from([EngineUnavailable("down"), EngineRejected("too long")]),
    st.sampled_from(["exact", "judge"]),
)
def test_a_dead_target_is_a_typed_error(salt: int, mode: Mode, order: int, after: int, error: EngineError, verifier: str) -> None:
    world = make_world(salt, 0.9).shuffled(order)
    engine = world.target
    engine.fail = lambda call: error if len(engine.calls) > after else None

    async def attempt() -> Outcome | None:
        try:
            return await world.answer(mode=mode, verifier=verifier)
        except TargetUnavailable:
            assert isinstance(error, EngineUnavailable)
        except EngineRejected:
            assert isinstance(error, EngineRejected)
        return None

    outcome = run_virtual(attempt())

    # A call that failed where the answer does not go costs nothing. By a judge the answer is not always the target's own.
    own = None if outcome is None or verifier == "judge" else plain(make_world(salt, 0.9)).completion_ids
    assert outcome is None or own is None or outcome.completion_ids == own
    assert outcome is None or after > 0
    world.assert_idle()


@answers()
@given(salts, agreements, salts, shapes, st.sampled_from([0.3, 1.0]))
def test_target_steps_that_fail_ahead_of_the_root_change_no_word(
    salt: int, agreement: float, order: int, shape: dict[str, object], share: float
) -> None:
    shape = {**shape, "num_draft_tokens": 0}  # so that a step is one call
    world = make_world(salt, agreement, like_rate=0.0)
    failing = world.shuffled(order)

    def fail(call: EngineCall) -> EngineError | None:
        committed = sum(one.step.num_tokens for one in failing.received if one.step is not None)
        is_ahead = len(call.input_ids) > len(PROMPT) + committed
        return EngineUnavailable("full") if is_ahead and chance("fails", order, call.request_id) < share else None

    failing.target.fail = fail

    outcome = run_virtual(failing.answer(mode="lr", **shape))

    assert outcome.completion_ids == plain(world, max_tokens=shape["max_tokens"]).completion_ids
    assert not outcome.usage.degraded
    failing.assert_idle()


@answers()
@given(salts, agreements, step_modes, shapes, st.booleans(), salts, salts)
def test_a_deterministic_request_does_not_depend_on_completion_order(
    salt: int, agreement: float, mode: Mode, shape: dict[str, object], coupled: bool, order: int, other_order: int
) -> None:
    coupled = coupled or mode is Mode.LOSSLESS
    world = make_world(salt, agreement, sampled=True, tool_rate=0.2, coupled_noise=coupled)
    fields = {"mode": mode, "temperature": 0.6, "seed": salt, "deterministic": True, **shape}

    first, second = (run_virtual(world.shuffled(one).answer(**fields)) for one in (order, other_order))

    assert first.completion_ids == second.completion_ids
    assert first.usage.num_steps_accepted == second.usage.num_steps_accepted
    assert first.usage.num_steps_rejected == second.usage.num_steps_rejected


@answers()
@given(salts, modes, shapes, salts, st.floats(0, 1))
def test_cancelling_at_any_moment_stops_every_engine_call(
    salt: int, mode: Mode, shape: dict[str, object], order: int, moment: float
) -> None:
    world = make_world(salt, 0.9)
    whole = world.shuffled(order)
    duration_s = run_virtual(whole.answer(mode=mode, **shape)).usage.latency_s
    cut = world.shuffled(order)

    async def attempt() -> None:
        task = asyncio.create_task(cut.answer(mode=mode, **shape))
        await asyncio.sleep(moment * duration_s)
        finished = task.done()
        task.cancel()
        try:
            await task
            assert finished
        except asyncio.CancelledError:
            assert not finished
        cut.assert_idle()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(attempt())

    calls = [len(engine.calls) for engine in cut.engines]
    assert all(before <= after for before, after in zip(calls, (len(engine.calls) for engine in whole.engines), strict=True))
    assert whole.text.startswith(cut.text)


@answers()
@given(salts, step_modes, shapes, salts)
def test_the_answer_after_the_reasoning_is_the_targets_own(salt: int, mode: Mode, shape: dict[str, object], order: int) -> None:
    world = make_world(salt, 0.9, like_rate=1.0)
    shuffled = world.shuffled(order)

    ids = run_virtual(shuffled.answer(mode=mode, **shape)).completion_ids

    if CLOSE not in ids:
        return
    reasoning = ids[: ids.index(CLOSE) + 1]
    rest = own_tokens(world, [*PROMPT, *reasoning], len(ids) - len(reasoning))
    assert ids == (*reasoning, *rest)
    stepwise = [recorded.call for recorded in shuffled.draft.calls if "/draft_tokens/" not in recorded.call.request_id]
    assert all(CLOSE not in call.input_ids for call in stepwise)


@answers()
@given(salts, agreements, step_modes, shapes, salts)
def test_nothing_is_speculated_below_an_end(
    salt: int, agreement: float, mode: Mode, shape: dict[str, object], order: int
) -> None:
    world = make_world(salt, agreement, like_rate=1.0, tool_rate=0.3).shuffled(order)

    outcome = run_virtual(world.answer(mode=mode, **shape))

    assert END not in outcome.completion_ids[:-1]
    completion = outcome.completion_ids
    # A target that writes alone, and that nobody watches, writes on past the reasoning: only an end token is an end to it.
    by_steps = shape["stream"] or (shape["max_depth"] and mode is not Mode.AUTO)
    for engine in (world.target, world.draft):
        for recorded in engine.calls:
            written = tuple(recorded.call.input_ids[len(PROMPT) :].tolist())
            assert END not in written
            # Below a step with a closing token nothing was written before that step was committed (a step that is itself
            # being written in chunks may hold one).
            closing = [index for index, token in enumerate(written) if token in RULES.closing_ids]
            closing = [index for index in closing if RULES.cut([*written[index + 1 :], END], 10**6).end is StepEnd.DELIMITER]
            assert not by_steps or all(written[: index + 1] == completion[: index + 1] for index in closing)
            if recorded.call.draft_ids is not None:
                drafts = recorded.call.draft_ids.tolist()
                assert not set(drafts[:-1]) & ({END, CLOSE} if by_steps and CLOSE not in written else {END})


@answers()
@given(salts, modes, shapes, salts)
def test_every_accepted_step_was_judged_or_equal(salt: int, mode: Mode, shape: dict[str, object], order: int) -> None:
    """Replayed by a slow reference: each committed step is the target's own after what was committed before, or was judged to
    mean the same as the target's own step there."""
    world = make_world(salt, 0.9).shuffled(order)
    verdicts: dict[tuple[str, str], bool] = {}

    def alike(first: str, second: str) -> bool:
        return verdicts.setdefault((first, second), chance("like", salt, first, second) < 0.5)

    world.judge.script = judge_script(alike)

    outcome = run_virtual(world.answer(mode=mode, trace=True, **shape))

    prefix, end = list(PROMPT), len(PROMPT) + int(str(shape["max_tokens"]))
    for record in outcome.ledger.records:
        ids = outcome.completion_ids[len(prefix) - len(PROMPT) :][: record.num_tokens]
        if record.reason == "judge":
            most = min(CONFIG.limits.max_step_tokens, end - len(prefix))
            own = RULES.cut(own_tokens(world, prefix, most), most)
            assert own is not None and record.drafted_text is not None
            assert verdicts[stated(TOKENIZER.decode(own.ids)), stated(record.drafted_text)] == (record.origin == "draft")
        assert (record.origin == "draft" and record.reason == "judge") or ids == tuple(own_tokens(world, prefix, len(ids)))
        prefix.extend(ids)
    assert tuple(prefix) == (*PROMPT, *outcome.completion_ids)


def stated(text: str) -> str:
    """What the judge reads of a step: its vocabulary has no full stop."""
    return re.sub("<end>|<think>|</think>", "", text).strip().removesuffix(".")


@pytest.mark.parametrize("mode", [Mode.AR, Mode.SD, Mode.LR, Mode.AUTO])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_the_answer_with_what_is_committed(mode: Mode, stream: bool) -> None:
    """Also where nobody reads it as it is written: what there is by then is no less worth."""
    world = make_world(3, 0.9)
    for engine in world.engines:
        engine.delay = lambda call, num_tokens: 0.1 + 0.01 * num_tokens
    whole = run_virtual(world.fresh().answer(mode=mode, stream=stream))

    cut = run_virtual(world.answer(mode=mode, stream=stream, deadline_s=whole.usage.latency_s / 2))

    assert cut.finish_reason is FinishReason.DEADLINE
    assert 0 < len(cut.completion_ids) < len(whole.completion_ids)
    assert cut.completion_ids == whole.completion_ids[: len(cut.completion_ids)]
    world.assert_idle()


def test_a_hanging_target_is_reported_within_its_limit() -> None:
    world = make_world(3, 0.9)
    world.config = world.config.model_copy(update={"timeouts": world.config.timeouts.model_copy(update={"target_s": 2.0})})
    world.target.delay = lambda call, num_tokens: 1e6

    with pytest.raises(TargetUnavailable, match=r"within 2 s"):
        run_virtual(world.answer(mode="lr"))


def test_an_engine_that_answers_with_nothing_is_taken_for_dead() -> None:
    class Mute(ScriptedEngine):
        def _write(self, call: EngineCall):  # type: ignore[no-untyped-def]
            from lr_backend.engine import Generation

            return Generation(())

    world = make_world(3, 0.9)
    world.target = Mute(world.target.script)

    with pytest.raises(TargetUnavailable, match="no tokens"):
        run_virtual(world.answer(mode="lr"))


@answers()
@given(salts, agreements, step_modes, shapes, salts)
def test_a_tool_call_is_taken_word_for_word(
    salt: int, agreement: float, mode: Mode, shape: dict[str, object], order: int
) -> None:
    """Even by a judge to whom everything means the same, and also where a call goes on over several steps."""
    world = make_world(salt, agreement, like_rate=1.0, tool_rate=0.3).shuffled(order)

    learned: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Acceptance, "decided", lambda self, accepted, log_prob: learned.append(accepted))
        outcome = run_virtual(world.answer(mode=mode, trace=True, **shape))

    prefix, in_call, num_before, num_rejected = list(PROMPT), False, 0, 0
    for record in outcome.ledger.records:
        ids = outcome.completion_ids[len(prefix) - len(PROMPT) :][: record.num_tokens]
        if in_call or TOOL in ids:
            assert ids == tuple(own_tokens(world, prefix, len(ids)))
        in_call |= TOOL in ids
        num_before += not in_call
        num_rejected += not in_call and record.origin is not Origin.DRAFT
        prefix += ids
    if mode is not Mode.LOSSLESS:
        assert len(learned) <= num_before, "a call says nothing of what the judge accepts"
        assert learned.count(False) <= num_rejected


def own_tokens(world: World, prefix: list[int], num_tokens: int) -> list[int]:
    """What the target writes after ``prefix``."""
    written: list[int] = []
    while len(written) < num_tokens:
        written.append(world.target.script((*prefix, *written), 0))
    return written


@pytest.mark.parametrize(("rules", "opens", "counted"), [("marked", True, True), ("marked", False, False), ("none", True, False)])
def test_reasoning_tokens_are_those_that_a_client_can_tell_from_the_answer(rules: str, opens: bool, counted: bool) -> None:
    """A model without marks has none, and one that answers at once has not reasoned."""
    ids = (*((THINK,) if opens else ()), FIRST_LETTER, BREAK, *((CLOSE,) if opens else ()), FIRST_LETTER + 1, END)

    def script(context: tuple[int, ...], seed: int) -> int:
        return ids[len(context) - len(PROMPT)]

    world = World.of(script, script)
    if rules == "none":
        plain_rules = StepRules.from_tokenizer(TOKENIZER, [END], think_open=None, think_close=None)
        world.models = replace(world.models, rules=plain_rules)
    for fields in ({"mode": "ar", "stream": False}, {"mode": "lr", "stream": True}):
        outcome = run_virtual(world.fresh().answer(**fields))
        assert outcome.completion_ids == ids
        assert outcome.usage.reasoning_tokens == (ids.index(CLOSE) + 1 if counted else 0)


def test_blank_lines_before_the_reasoning_do_not_end_it() -> None:
    ids = (BREAK, BREAK, THINK, FIRST_LETTER, BREAK, FIRST_LETTER, THINK, BREAK, CLOSE, FIRST_LETTER + 1, END)

    def script(context: tuple[int, ...], seed: int) -> int:
        return ids[len(context) - len(PROMPT)]

    for fields in ({"mode": "ar", "stream": False}, {"mode": "ar", "stream": True}, {"mode": "lr"}):
        outcome = run_virtual(World.of(script, script).answer(**fields))
        assert (outcome.completion_ids, outcome.usage.reasoning_tokens) == (ids, ids.index(CLOSE) + 1 - ids.index(THINK))
        assert outcome.usage.num_steps_accepted > 0 or fields["mode"] == "ar"


@pytest.mark.parametrize(
    "fields",
    [{"mode": "ar", "stream": False}, {"mode": "ar"}, {"mode": "lr"}, {"mode": "lr_sd", "num_draft_tokens": 1}, {"mode": "sd"}],
    ids=str,
)
def test_what_is_written_behind_a_stop_string_is_not_counted(fields: dict[str, Any]) -> None:
    letters = tuple(range(FIRST_LETTER, FIRST_LETTER + 6))
    ids = (THINK, *letters[:2], BREAK, *letters[2:], BREAK, END)

    def script(context: tuple[int, ...], seed: int) -> int:
        return ids[len(context) - len(PROMPT)]

    world = World.of(script, script)
    outcome = run_virtual(world.answer(stop=[LETTERS[3:5]], trace=True, **fields))
    end = ids.index(letters[4]) + 1
    assert (outcome.finish_reason, world.text) == ("stop", f"<think>{LETTERS[:2]}\n\n{LETTERS[2]}")
    assert outcome.completion_ids == ids[:end]
    assert (outcome.usage.completion_tokens, outcome.usage.reasoning_tokens) == (end, end)
    records = outcome.ledger.records
    assert sum(record.num_tokens for record in records) == end
    assert "".join(record.text for record in records) == TOKENIZER.decode(ids[:end])
    for call in build_trace(outcome, "request").calls:
        in_answer = call.purpose in (Purpose.TARGET_STEP, Purpose.DRAFTED_STEP) and call.outcome in ("committed", "accepted")
        assert call.num_committed_tokens > 0 or not in_answer


@pytest.mark.parametrize("raw", [True, False])
def test_a_completion_keeps_its_first_blank_in_records_too(raw: bool) -> None:
    class Strips(WordTokenizer):
        def decode(self, token_ids: Any, **kwargs: Any) -> str:
            return super().decode(token_ids, **kwargs).removeprefix(LETTERS[0])

    def script(context: tuple[int, ...], seed: int) -> int:
        return (FIRST_LETTER, FIRST_LETTER + 1, END)[len(context) - len(PROMPT)]

    world = World.of(script, script)
    strips = Strips(TOKENIZER.words, special=frozenset({"<end>"}))  # LETTERS[0] is the blank
    world.models = replace(world.models, tokenizer=strips)
    outcome = run_virtual(world.answer(mode="ar", raw=raw, trace=True))
    text = LETTERS[:2] if raw else LETTERS[1]
    assert (world.text, "".join(record.text for record in outcome.ledger.records)) == (text, text)


def test_the_texts_of_steps_are_the_answer_though_one_ends_inside_a_character() -> None:
    class Utf8:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return bytes(token_ids).decode("utf-8", errors="replace")

    tokenizer: Any = Utf8()
    told: list[Committed] = []
    ledger, rules = Ledger(lambda: 0.0, 1), StepRules.build(BLANK_LINE, {}, [0])
    text, steps_text = TextStream(tokenizer), TextStream(tokenizer)
    answer = Answer(np.array([1], np.int32), TokenBudget(99), rules, text, tokenizer, ledger, told.append, steps_text)
    whole = "a€😀b€".encode()[:-1]
    for ids in (whole[:3], whole[3:6], whole[6:]):
        answer.commit(Step(tuple(ids), StepEnd.CAP), Origin.TARGET, Reason.NONE)
    answer.flush()
    texts = [one.text for one in ledger.records]
    assert texts == ["a", "€", "😀b\ufffd"] and "".join(one.text for one in told) == "".join(texts)


@pytest.mark.parametrize(
    ("turn", "reasons"), [((CLOSE, FIRST_LETTER, END, FIRST_LETTER), True), ((END, FIRST_LETTER, CLOSE), False)]
)
def test_reasoning_that_was_closed_in_an_earlier_turn_is_not_this_answers(turn: tuple[int, ...], reasons: bool) -> None:
    """A short answer of the assistant leaves its mark among the prompt's last tokens, where a prompt closes the reasoning too."""
    ids = (THINK, FIRST_LETTER, BREAK, CLOSE, FIRST_LETTER + 1, END)
    prompt = (*PROMPT, *turn)

    def script(context: tuple[int, ...], seed: int) -> int:
        return ids[len(context) - len(prompt)]

    outcome = run_virtual(World.of(script, script).answer(prompt, mode="lr"))
    assert outcome.completion_ids == ids
    assert (outcome.usage.reasoning_tokens, outcome.usage.num_draft_calls > 0) == ((4, True) if reasons else (0, False))


@pytest.mark.parametrize("said", [{}, {"max_tokens": 100_000}])
def test_a_request_without_a_limit_may_write_all_that_the_server_allows(said: dict[str, int]) -> None:
    world = make_world(3, 0.9)
    whole = plain(world, **said)
    assert whole.finish_reason is FinishReason.STOP
    most = len(whole.completion_ids) - 1
    short = make_world(3, 0.9, limits=world.config.limits.model_copy(update={"max_tokens": most}))
    cut = plain(short, **said)
    assert (cut.finish_reason, cut.completion_ids) == (FinishReason.LENGTH, whole.completion_ids[:most])


def test_a_stretch_of_several_steps_has_the_time_of_all_of_them() -> None:
    """The limit is of a step: an engine is not dead because an answer is long."""
    world = make_world(3, 0.9, timeouts=Timeouts(target_s=10.0, request_s=10000.0))
    most = world.config.limits.max_step_tokens
    whole = plain(world, max_tokens=10 * most)
    for seconds_a_token, is_dead in ((9.0 / most, False), (11.0 / most, True)):
        slow = world.fresh()
        slow.target.delay = lambda call, num_tokens, pace_s=seconds_a_token: pace_s * call.max_new_tokens
        answer = slow.answer(mode="ar", stream=False, max_tokens=10 * most)
        if is_dead:
            with pytest.raises(TargetUnavailable, match=r"did not answer within 40 s"):
                run_virtual(answer)
        else:
            assert run_virtual(answer).completion_ids == whole.completion_ids


def test_what_is_written_when_the_servers_own_time_is_up_is_kept() -> None:
    world = make_world(3, 0.9, timeouts=Timeouts(target_s=1000.0, request_s=60.0))
    world.target.delay = lambda call, num_tokens: float(num_tokens)
    cut = run_virtual(world.answer(mode="ar", stream=False))
    assert cut.finish_reason is FinishReason.DEADLINE and cut.completion_ids


def test_a_verifier_that_is_none_leaves_nothing_behind() -> None:
    """Its name is the client's: whatever were kept by it would grow for ever."""
    world = make_world(3, 0.9)
    world.learned = Learned(lambda: 0.0)
    for number in range(3):
        with pytest.raises(InvalidRequest, match="verifier"):
            run_virtual(world.answer(mode="auto", verifier=f"made_up_{number}"))
    assert not world.learned._trials
