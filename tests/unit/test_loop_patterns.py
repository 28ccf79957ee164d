"""All accept/reject patterns at depth 8, against a step-by-step reference written from the paper's description."""

from __future__ import annotations

import pytest

from lr_backend.engine import EngineCall
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, NotFinite, TargetUnavailable
from lr_backend.request import Origin
from lr_backend.testing import Script, run_virtual
from tests.support.world import BREAK, CLOSE, END, FIRST_LETTER, PROMPT, THINK, World

DEPTH = 8
TARGET_WORD, DRAFT_WORD = FIRST_LETTER, FIRST_LETTER + 1


def _position(context: tuple[int, ...]) -> int:
    return sum(token == BREAK for token in context)


def _writer(word: int):  # type: ignore[no-untyped-def]
    """Step p is ``word`` p + 1 times; after DEPTH steps the reasoning closes, then one word and the end."""

    def script(context: tuple[int, ...], seed: int) -> int:
        if len(context) == len(PROMPT):
            return THINK
        if CLOSE in context:
            return END if context[-1] != CLOSE else word
        position = _position(context)
        if position == DEPTH:
            return CLOSE
        step = context[::-1].index(BREAK) if BREAK in context else len(context) - len(PROMPT) - 1
        return word if step <= position else BREAK

    return script


def _reference(pattern: int) -> list[tuple[int, ...]]:
    """One step at a time: draft, write the target's, keep the draft if the judge says so."""
    target, draft = _writer(TARGET_WORD), _writer(DRAFT_WORD)
    prefix = list(PROMPT)
    steps = []
    for position in range(DEPTH):
        script = draft if pattern >> position & 1 else target
        step: list[int] = []
        while not step or step[-1] != BREAK:
            step.append(script((*prefix, *step), 0))
        steps.append(tuple(step))
        prefix.extend(step)
    return steps


@pytest.mark.parametrize(
    ("mode", "own_branches", "every"), [("lr", False, 1), ("lr", True, 3), ("lr_sd", False, 7), ("lr_sd", True, 7)]
)
def test_every_pattern_of_verdicts_commits_what_the_paper_says(mode: str, own_branches: bool, every: int) -> None:
    """2^8 patterns; the judge decides by the length of the step, hence by position."""
    for pattern in range(0, 2**DEPTH, every):

        def alike(first: str, second: str, pattern: int = pattern) -> bool:
            assert "think>" not in first + second  # a verifier reads what is stated, and no marks
            letters = second.strip()
            return bool(pattern >> (len(letters) - 1) & 1)

        world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), alike, own_branches=own_branches)

        outcome = run_virtual(world.answer(mode=mode, max_depth=DEPTH, trace=True, deterministic=True))

        records = [record for record in outcome.ledger.records if record.index < DEPTH]
        expected = _reference(pattern)
        flat = tuple(token for step in expected for token in step)
        assert outcome.completion_ids[: len(flat)] == flat, f"{pattern:08b}"
        origins = [Origin.DRAFT if pattern >> position & 1 else Origin.CORRECTION for position in range(DEPTH)]
        assert [record.origin for record in records] == origins
        usage = outcome.usage
        assert usage.num_steps_accepted == pattern.bit_count() + 1  # the closing step is the same in both
        assert usage.num_steps_rejected.get("judge", 0) == DEPTH - pattern.bit_count()
        assert usage.num_steps_late == 0
        # Each position costs a judge call; equal or closing steps cost none.
        assert len(world.judge.calls) >= DEPTH


def test_a_fully_accepted_chain_takes_the_time_of_two_target_steps() -> None:
    """Steps of equal cost T, drafts of cost c T: three steps in 2cT + T instead of 3T (paper, section 1)."""
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True)

    def takes(seconds: float):  # type: ignore[no-untyped-def]
        def delay(call: EngineCall, num_tokens: int) -> float:
            return seconds

        return delay

    world.target.delay, world.draft.delay, world.judge.delay = takes(1.0), takes(0.1), takes(0.0)

    outcome = run_virtual(world.answer(mode="lr", max_depth=3, trace=True))

    committed = [record.committed_s for record in outcome.ledger.records]
    assert committed[2] == pytest.approx(1.2)
    first, second = outcome.ledger.records[:2]
    assert (first.drafted_finished_s, first.target_started_s, first.target_finished_s) == pytest.approx((0.1, 0.0, 1.0))
    assert (second.drafted_finished_s, second.target_started_s, second.target_finished_s) == pytest.approx((0.2, 0.1, 1.1))
    assert world.target.max_in_flight == 3


NUM_AHEAD = 2
"""Drafted steps before the target step that fails below."""


def failing_ahead(num_failures: int, error: EngineError) -> World:
    """Draft and target write the same; the target fails two drafted steps ahead of the first root, so often."""
    world = World.of(_writer(TARGET_WORD), _writer(TARGET_WORD))
    world.target.delay, world.draft.delay = (lambda call, _: 1.0), (lambda call, _: 0.1)
    world.target.fail = lambda call: error if 0 < len(calls_at(world, NUM_AHEAD)) <= num_failures and is_at(call) else None
    return world


def is_at(call: EngineCall, position: int = NUM_AHEAD) -> bool:
    return _position(tuple(call.input_ids.tolist())) == position


def calls_at(world: World, position: int) -> list[float]:
    """When the target's calls after so many steps started."""
    return [recorded.started_s for recorded in world.target.calls if is_at(recorded.call, position)]


FAILURES = [EngineUnavailable("the queue is full"), EngineRejected("too long"), NotFinite()]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_target_step_that_fails_ahead_starts_again_as_the_root(error: EngineError) -> None:
    world = failing_ahead(1, error)

    outcome = run_virtual(world.answer(mode="lr", max_depth=4, trace=True))

    whole = World.of(_writer(TARGET_WORD), _writer(TARGET_WORD))
    assert outcome.completion_ids == run_virtual(whole.answer(mode="ar", stream=False)).completion_ids
    root_there_s = outcome.ledger.records[NUM_AHEAD - 1].committed_s
    assert calls_at(world, NUM_AHEAD) == pytest.approx([0.2, root_there_s]) and root_there_s == pytest.approx(1.1)
    # Until the root has moved nothing is started further ahead, and nothing behind the step until it is written.
    assert min(calls_at(world, NUM_AHEAD + 1)) >= root_there_s
    assert sum(span.failed for span in outcome.ledger.spans) == 1
    assert outcome.usage.num_steps_accepted == DEPTH + 1 and not outcome.usage.degraded
    world.assert_idle()


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_target_step_that_fails_at_the_root_ends_the_request(error: EngineError) -> None:
    world = failing_ahead(2, error)

    with pytest.raises(TargetUnavailable if isinstance(error, EngineUnavailable) else type(error)):
        run_virtual(world.answer(mode="lr", max_depth=4))

    assert len(calls_at(world, NUM_AHEAD)) == 2
    assert len(world.received) == NUM_AHEAD
    world.assert_idle()


@pytest.mark.parametrize("own_branches", [False, True])
def test_a_target_step_that_hangs_ahead_of_a_pending_verdict_loses_nothing(own_branches: bool) -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True, own_branches=own_branches)
    world.config = world.config.model_copy(update={"timeouts": world.config.timeouts.model_copy(update={"target_s": 1.5})})
    whole = run_virtual(world.fresh().answer(mode="lr", max_depth=4))
    drafted = [*PROMPT, *(token for step in _reference(2**DEPTH - 1)[:NUM_AHEAD] for token in step)]
    hangs = iter([1e6])

    def target_s(call: EngineCall, num_tokens: int) -> float:
        return next(hangs, 1.0) if call.input_ids.tolist() == drafted else 1.0

    world.target.delay, world.draft.delay, world.judge.delay = target_s, (lambda call, _: 0.1), (lambda call, _: 5.0)

    outcome = run_virtual(world.answer(mode="lr", max_depth=4))

    assert outcome.completion_ids == whole.completion_ids
    assert next(hangs, None) is None and sum(span.failed for span in outcome.ledger.spans) == 1
    world.assert_idle()


def test_the_target_step_is_used_after_a_rejection_and_never_written_again() -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: False)

    outcome = run_virtual(world.answer(mode="lr", max_depth=4, stream=True))

    prefixes = [tuple(recorded.call.input_ids.tolist()) for recorded in world.target.calls]
    assert len(set(prefixes)) == len(prefixes)
    assert outcome.usage.num_steps_rejected == {"judge": DEPTH}


def test_the_window_slides_and_keeps_what_runs_below_an_accepted_step() -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True, own_branches=False)

    run_virtual(world.answer(mode="lr", max_depth=4))

    prefixes = [tuple(recorded.call.input_ids.tolist()) for recorded in world.draft.calls]
    assert len(set(prefixes)) == len(prefixes)  # nothing is drafted twice
    assert not world.target.cancelled
    # The one draft that cannot win runs below the last step, whose reasoning closes.
    assert len(world.draft.cancelled) <= 1


@pytest.mark.parametrize("own_branches", [False, True])
def test_a_correction_costs_a_verdict_only_where_nobody_goes_on_from_it(own_branches: bool) -> None:
    """Every step is rejected: own branches have the next step ready when the verdict comes."""
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: False, own_branches=own_branches)
    world.target.delay, world.draft.delay, world.judge.delay = (lambda call, _, s=s: s for s in (1.0, 0.1, 1.0))

    outcome = run_virtual(world.answer(mode="lr", max_depth=4, trace=True))

    committed = [record.committed_s for record in outcome.ledger.records][:DEPTH]
    expected = [position + 2.0 for position in range(DEPTH)] if own_branches else [2.0 * (n + 1) for n in range(DEPTH)]
    assert committed == pytest.approx(expected)
    assert outcome.usage.num_steps_rejected == {"judge": DEPTH}
    prefixes = [tuple(recorded.call.input_ids.tolist()) for recorded in world.target.calls]
    assert len(set(prefixes)) == len(prefixes)  # what it has written is kept


def test_an_own_branch_is_stopped_when_the_drafted_step_is_accepted() -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True)
    world.target.delay, world.draft.delay, world.judge.delay = (lambda call, _, s=s: s for s in (1.0, 0.1, 0.5))

    outcome = run_virtual(world.answer(mode="lr", max_depth=2))

    assert outcome.usage.num_steps_accepted == DEPTH + 1
    path = (*PROMPT, *outcome.completion_ids)
    begun = {recorded.call.request_id: tuple(recorded.call.input_ids.tolist()) for recorded in world.target.calls}
    aside = [name for name, prefix in begun.items() if prefix != path[: len(prefix)]]
    assert aside
    assert set(aside) <= set(world.target.cancelled)


@pytest.mark.parametrize("max_depth", [1, 2, 3, 5])
def test_at_most_max_depth_target_steps_run_and_drafting_runs_one_past_them(max_depth: int) -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: False)
    world.target.delay = lambda call, num_tokens: 100.0
    world.draft.delay = lambda call, num_tokens: 1.0

    run_virtual(world.answer(mode="lr", max_depth=max_depth, max_tokens=40))

    assert world.target.max_in_flight == max_depth
    first_round = [recorded for recorded in world.draft.calls if recorded.started_s < 100.0]
    assert len(first_round) == max_depth


@pytest.mark.parametrize("pattern", [0, 0b01100101, 2**DEPTH - 1])
def test_a_trace_keeps_no_copies_of_the_text_before_each_node(pattern: int) -> None:
    def alike(first: str, second: str) -> bool:
        return bool(pattern >> (len(second.strip()) - 1) & 1)

    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), alike)
    world.target.delay, world.draft.delay, world.judge.delay = (lambda call, _, s=s: s for s in (1.0, 0.1, 1.0))

    ledger = run_virtual(world.answer(mode="lr", width=2, max_depth=3, temperature=0.6, trace=True)).ledger

    kept = {span.job.node for span in ledger.spans if span.job is not None}
    kept |= {node for move in ledger.moves.values() for node in (*move.position.subtree(), *move.discarded)}
    assert len(kept) > 2 * DEPTH
    assert sum(len(node.prefix) > 0 for node in kept) <= 1  # where the reasoning has ended


def test_a_late_draft_is_not_waited_for() -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True)
    world.draft.delay = lambda call, num_tokens: 1e6

    outcome = run_virtual(world.answer(mode="lr"))

    assert outcome.usage.num_steps_accepted == 0
    assert outcome.usage.num_steps_late == DEPTH + 1
    assert len(world.draft.cancelled) == DEPTH + 1


def test_siblings_are_judged_by_one_target_step_and_the_lowest_accepted_wins() -> None:
    def sibling_word(context: tuple[int, ...], seed: int) -> int:
        """The seed chooses the word of the whole step: siblings differ."""
        return _writer(FIRST_LETTER + 1 + seed % 7)(context, seed)

    world = World.of(_writer(TARGET_WORD), sibling_word, lambda first, second: True)

    outcome = run_virtual(world.answer(mode="lr", width=3, max_depth=2, temperature=0.6, trace=True, deterministic=True))

    drafted = [record for record in outcome.ledger.records if record.origin is Origin.DRAFT]
    assert drafted
    assert all(record.sibling == 0 for record in drafted)
    first_prefix = [r.call for r in world.draft.calls if len(r.call.input_ids) == len(PROMPT)]
    assert len({call.seed for call in first_prefix}) == 3


def test_equal_greedy_siblings_collapse_into_one() -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda first, second: True)

    run_virtual(world.answer(mode="lr", width=4, max_depth=2))

    prefixes = [tuple(recorded.call.input_ids.tolist()) for recorded in world.draft.calls]
    assert len(set(prefixes)) == len(prefixes)


@pytest.mark.parametrize(("configured", "first"), [(None, 0.6), (0.0, 0.0), (0.3, 0.3), (1.5, 0.6)])
def test_the_first_sibling_is_drafted_at_the_servers_temperature_where_that_is_lower(
    configured: float | None, first: float
) -> None:
    world = World.of(_writer(TARGET_WORD), _writer(DRAFT_WORD), lambda a, b: True, draft_temperature=configured)

    run_virtual(world.answer(mode="lr", width=2, max_depth=1, temperature=0.6, top_k=7, deterministic=True))

    at_root = [recorded.call.sampling for recorded in world.draft.calls if len(recorded.call.input_ids) == len(PROMPT)]
    assert [sampling.temperature for sampling in at_root] == [first, 0.6]
    assert all(sampling.top_k == 7 for sampling in at_root)
    assert all(recorded.call.sampling.temperature == 0.6 for recorded in world.target.calls)


def endless(letter: int) -> Script:
    """Thinks without any boundary and ends after 40 tokens."""

    def next_token(context: tuple[int, ...], seed: int) -> int:
        num_written = len(context) - len(PROMPT)
        if num_written == 0:
            return THINK
        return END if num_written == 40 else letter if num_written % 7 else FIRST_LETTER

    return next_token


@pytest.mark.parametrize("mode", ["lr", "lr_sd"])
@pytest.mark.parametrize("same", [True, False])
def test_a_capped_step_is_compared_with_one_capped_at_the_same_place(mode: str, same: bool) -> None:
    """And what follows it, in the middle of a paragraph, is drafted and judged like anything else."""
    world = World.of(endless(TARGET_WORD), endless(TARGET_WORD if same else DRAFT_WORD), lambda a, b: True)

    outcome = run_virtual(world.answer(mode=mode, deterministic=True, trace=True))

    cap = world.config.limits.max_step_tokens
    records = outcome.ledger.records
    assert [record.num_tokens for record in records] == [cap, cap, cap, 41 - 3 * cap]
    assert all(record.origin == "draft" for record in records)
    assert [record.reason for record in records] == ["exact"] * 4 if same else ["judge"] * 3 + [records[-1].reason]
    assert not outcome.usage.num_steps_rejected
    assert bool(world.judge.calls) is not same


def test_one_capped_step_beside_one_that_ended_is_rejected() -> None:
    target = endless(TARGET_WORD)

    def ends_early(context: tuple[int, ...], seed: int) -> int:
        return BREAK if len(context) - len(PROMPT) == 6 else target(context, seed)

    world = World.of(target, ends_early, lambda a, b: True)
    outcome = run_virtual(world.answer(mode="lr", deterministic=True))

    assert outcome.usage.num_steps_rejected == {"capped": 1}
    assert outcome.completion_ids[:2] == (THINK, TARGET_WORD)
