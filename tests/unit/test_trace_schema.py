"""What a trace holds: every call once, in agreement with what the engines saw and with usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from lr_backend.engine import Role
from lr_backend.errors import EngineUnavailable, TraceError
from lr_backend.request import FinishReason
from lr_backend.trace.schema import CallOutcome, Purpose, Trace
from tests.support.traces import NUM_STEPS, any_world, numbered_world, salts, shapes, taking, traced


@given(salts, shapes, salts)
def test_every_call_of_every_engine_appears_exactly_once(salt: int, shape: dict[str, object], order: int) -> None:
    world = any_world(salt, order)

    trace = traced(world, **shape)

    seen = [
        (role.value, round(1e3 * recorded.started_s, 3), len(recorded.call.input_ids))
        for role, engine in zip(Role, world.engines, strict=True)
        for recorded in engine.calls
    ]
    told = [(call.role.value, call.start_ms, call.num_prompt_tokens) for call in trace.calls]
    assert sorted(told) == sorted(seen)
    assert [call.start_ms for call in trace.calls] == sorted(call.start_ms for call in trace.calls)
    assert all(0 <= call.start_ms <= call.end_ms <= trace.latency_ms + 0.01 for call in trace.calls)


@given(salts, shapes, salts)
def test_tokens_agree_with_usage(salt: int, shape: dict[str, object], order: int) -> None:
    trace = traced(any_world(salt, order), **shape)

    assert sum(call.num_wasted_tokens for call in trace.calls) == trace.usage.num_wasted_tokens
    closing = sum(record.num_tokens for record in trace.steps if record.reason == "thinking_budget")  # written by no engine
    assert sum(call.num_committed_tokens for call in trace.calls) == trace.usage.completion_tokens - closing
    assert sum(record.num_tokens for record in trace.steps) == trace.usage.completion_tokens
    target = [call for call in trace.calls if call.role is Role.TARGET]
    finished = [call for call in target if call.outcome not in (CallOutcome.CANCELLED, CallOutcome.FAILED)]
    assert sum(call.num_draft_tokens for call in finished) == trace.usage.num_draft_tokens
    assert sum(call.num_accepted_tokens for call in target) == trace.usage.num_accepted_tokens


@given(salts, shapes, salts)
def test_a_trace_survives_its_json(salt: int, shape: dict[str, object], order: int) -> None:
    trace = traced(any_world(salt, order), **shape)

    text = trace.as_json()

    assert list(json.loads(text))[:2] == ["schema", "version"]
    assert Trace.from_json(text) == trace


def outcomes(trace: Trace, purpose: Purpose) -> list[str]:
    return [call.outcome.value for call in trace.calls if call.purpose is purpose]


def test_an_accepted_chain_verifies_and_a_rejected_step_is_corrected() -> None:
    trace = traced(numbered_world(*range(NUM_STEPS), own_branches=False), mode="lr", max_depth=3)
    assert set(outcomes(trace, Purpose.TARGET_STEP)) == {"verified"}
    assert set(outcomes(trace, Purpose.VERDICT)) == {"accepted"}
    assert outcomes(trace, Purpose.DRAFTED_STEP).count("accepted") == NUM_STEPS + 1
    assert {call.step for call in trace.calls if call.purpose is Purpose.ALONE} == {NUM_STEPS + 1}

    trace = traced(numbered_world(own_branches=False), mode="lr", max_depth=3)
    committed = [call for call in trace.calls if call.outcome is CallOutcome.COMMITTED and call.purpose is Purpose.TARGET_STEP]
    assert [(call.step, call.depth) for call in committed] == [(step, 0) for step in range(NUM_STEPS)]
    assert all(call.depth > 0 for call in trace.calls if call.useless and call.purpose is Purpose.TARGET_STEP)
    rejected = [call for call in trace.calls if call.purpose is Purpose.DRAFTED_STEP and call.depth == 0][:-1]
    assert {call.outcome for call in rejected} == {CallOutcome.REJECTED}


def test_an_own_branch_is_in_the_trace_where_it_was_begun_and_used_or_cut() -> None:
    cut = traced(numbered_world(*range(NUM_STEPS)), mode="lr", max_depth=3)
    assert set(outcomes(cut, Purpose.TARGET_STEP)) == {"verified", "cancelled"}
    assert outcomes(cut, Purpose.TARGET_STEP).count("verified") == NUM_STEPS + 1

    used = traced(numbered_world(), mode="lr", max_depth=3)
    committed = [call for call in used.calls if call.outcome is CallOutcome.COMMITTED and call.purpose is Purpose.TARGET_STEP]
    # Each was begun one step ahead, behind the correction that was then still to come.
    assert [(call.step, call.depth) for call in committed] == [(step, min(step, 1)) for step in range(NUM_STEPS)]
    assert used.latency_ms < traced(numbered_world(own_branches=False), mode="lr", max_depth=3).latency_ms


def test_a_late_drafted_step_that_is_the_targets_own_is_accepted() -> None:
    """Its own branch goes on in its place; its call is still the one that wrote the step."""
    world = numbered_world(same_words=True)
    world.draft.delay = taking(1.5)
    trace = traced(world, mode="lr", max_depth=2, deterministic=True)

    assert trace.usage.num_steps_accepted_by == {"exact": NUM_STEPS + 1}
    assert outcomes(trace, Purpose.DRAFTED_STEP).count("accepted") == NUM_STEPS + 1
    assert sum(call.num_committed_tokens for call in trace.calls) == trace.usage.completion_tokens
    prefixes = [tuple(recorded.call.input_ids.tolist()) for recorded in world.target.calls]
    assert len(set(prefixes)) == len(prefixes)


def test_calls_that_fail_or_are_cut_short_say_so() -> None:
    world = numbered_world()
    world.judge.fail = lambda call: EngineUnavailable("down")
    trace = traced(world, mode="lr")
    assert outcomes(trace, Purpose.VERDICT) == ["failed"]
    assert trace.usage.degraded == ("judge",)

    world = numbered_world()
    world.judge.delay = taking(1e3)
    trace = traced(world, mode="lr")
    found = outcomes(trace, Purpose.VERDICT)
    assert {"failed"} <= set(found) <= {"failed", "cancelled"}, "one that is too slow, and those whose pair was of no use by then"
    assert found.count("failed") >= trace.usage.num_steps_rejected["timeout"] > 0

    world = numbered_world(*range(NUM_STEPS))
    world.draft.delay = taking(1e6)
    late = traced(world, mode="lr")
    assert set(outcomes(late, Purpose.DRAFTED_STEP)) == {"cancelled"}

    cut = traced(numbered_world(), mode="ar", stream=False, deadline_s=0.5)
    assert (cut.finish_reason, outcomes(cut, Purpose.ALONE)) == (FinishReason.DEADLINE, ["cancelled"])


MINIMAL = {
    "schema": "lookahead-trace",
    "version": 2,
    "request_id": "r",
    "request": {"text_input": "?"},
    "finish_reason": "stop",
    "steps": [{"index": 0, "origin": "draft", "reason": "exact", "text": "so", "num_tokens": 2, "committed_s": 0.01}],
    "calls": [{"role": "draft", "purpose": "drafted_step", "outcome": "accepted", "step": 0, "start_ms": 0, "end_ms": 9.5}],
    "usage": {"completion_tokens": 2, "latency_s": 0.01},
}


@pytest.mark.parametrize(("temperature", "width"), [(0.6, 2), (0.0, 1)])
def test_a_trace_has_the_window_that_the_request_got(temperature: float, width: int) -> None:
    """Not the one that it asked for: who reads it counts candidates by it."""
    world = numbered_world()
    limits = world.config.limits.model_copy(update={"max_depth": 3, "max_width": 2})
    world.config = world.config.model_copy(update={"limits": limits})
    request = traced(world, mode="lr", max_depth=8, width=4, temperature=temperature).request
    assert (request.max_depth, request.width) == (3, width)


def test_the_first_documents_of_this_version_stay_readable() -> None:
    trace = Trace.from_json(json.dumps(MINIMAL | {"of_a_newer_server": 1}))

    assert trace.calls[0].duration_ms == 9.5
    assert trace.steps[0].text == "so"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "version 2: Invalid JSON"),
        ("[]", "version 2: Input should be an object"),
        ("{}", "request_id"),
        (json.dumps(MINIMAL | {"version": 1}), "version"),
        (json.dumps(MINIMAL | {"schema": "other"}), "schema"),
        (json.dumps(MINIMAL | {"calls": [{**MINIMAL["calls"][0], "end_ms": -1}]}), "calls.0.end_ms"),  # type: ignore[index,dict-item]
        (json.dumps(MINIMAL | {"calls": [{**MINIMAL["calls"][0], "start_ms": 10}]}), "before its start"),  # type: ignore[index,dict-item]
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)

    with pytest.raises(TraceError, match=words):
        Trace.load(file)
    with pytest.raises(TraceError, match="cannot read"):
        Trace.load(tmp_path / "none.json")
