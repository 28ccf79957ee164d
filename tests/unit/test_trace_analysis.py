"""Where the time went, and failure signatures: each on a trace made for it, none on a healthy one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import EngineCall, Role
from lr_backend.request import Origin
from lr_backend.trace.analysis import Analysis, analyse
from lr_backend.trace.intervals import at_least, common, length, rows
from lr_backend.trace.schema import CallOutcome, Purpose, Trace
from tests.support.traces import NUM_STEPS, any_world, numbered_world, salts, shapes, taking, traced

ALL = range(NUM_STEPS)


def names(trace: Trace) -> list[str]:
    return [finding.name for finding in analyse(trace).findings]


def waits(analysis: Analysis, trace: Trace) -> list[tuple[str, float]]:
    """Who was waited for how long, neighbours of one role joined."""
    joined: list[tuple[str, float]] = []
    for stretch in analysis.critical:
        role = "none" if stretch.call is None else trace.calls[stretch.call].role.value
        if joined and joined[-1][0] == role:
            joined[-1] = (role, joined[-1][1] + stretch.duration_ms)
        else:
            joined.append((role, stretch.duration_ms))
    return [(role, round(duration_ms)) for role, duration_ms in joined]


@pytest.mark.parametrize("mode", ["ar", "sd", "lr", "lr_sd"])
@pytest.mark.parametrize("accepted", [ALL, [step for step in ALL if step % 3], [step for step in ALL if step % 2]])
def test_a_healthy_request_shows_no_signature(mode: str, accepted: list[int]) -> None:
    assert names(traced(numbered_world(*accepted), mode=mode, max_depth=3)) == []


def test_short_requests_show_no_signature() -> None:
    assert names(traced(numbered_world(), mode="lr", max_tokens=9)) == []
    assert names(traced(numbered_world(), mode="lr", max_tokens=1)) == []


def test_the_answer_waits_for_the_target_then_the_judge() -> None:
    """Depth 2, target 1 s, draft 0.1 s, judge 0.05 s: the second step's verdict comes 0.1 s after the first's."""
    trace = traced(numbered_world(*ALL), mode="lr", max_depth=2)

    analysis = analyse(trace)

    assert waits(analysis, trace)[:4] == [("target", 1000), ("judge", 50), ("target", 50), ("judge", 50)]
    assert analysis.breakdown.waiting_ms == pytest.approx(0.0, abs=1e-6)
    assert analysis.breakdown.batched_share is not None and analysis.breakdown.batched_share > 0.5


def test_plain_decoding_is_neither_batched_nor_overlapped() -> None:
    trace = traced(numbered_world(), mode="ar")

    found = analyse(trace).breakdown

    assert (found.batched_share, found.overlap_share) == (0.0, 0.0)
    assert found.roles[Role.TARGET].critical_ms == pytest.approx(found.latency_ms)


def test_draft_tokens_beside_a_verification_are_not_waited_for() -> None:
    """Their call comes first, and the target took some of them."""
    trace = traced(numbered_world(), mode="ar")
    first = trace.calls[0]
    of_tokens = {"role": Role.DRAFT, "purpose": Purpose.DRAFT_TOKENS, "outcome": CallOutcome.ACCEPTED}

    found = analyse(trace.model_copy(update={"calls": (first.model_copy(update=of_tokens), *trace.calls)})).breakdown

    assert found.roles[Role.DRAFT].critical_ms == 0.0
    assert found.roles[Role.DRAFT].overlapped_ms == pytest.approx(first.duration_ms)
    assert found.roles[Role.TARGET].critical_ms == pytest.approx(trace.latency_ms)


def test_a_request_in_which_nothing_ran_has_no_shares() -> None:
    trace = traced(numbered_world(), mode="ar", max_tokens=5).model_copy(update={"calls": (), "steps": ()})

    found = analyse(trace).breakdown

    assert (found.batched_share, found.overlap_share) == (None, None)
    assert found.waiting_ms == found.latency_ms


def test_rejections_in_a_row_that_throw_deep_work_away_are_a_cascade() -> None:
    (finding,) = analyse(traced(numbered_world(*range(12)), mode="lr", max_depth=4)).findings[:1]

    assert finding.name == "cascade rejection"
    assert finding.evidence[0] == "12 of 25 compared steps were rejected, up to 12 in a row"
    assert "thrown away" in finding.evidence[2]


@pytest.mark.parametrize("reason", ["timeout", "garbage", "judge_error", "verifier_error", "risk_budget"])
def test_rejections_without_a_verdict_are_no_cascade(reason: str) -> None:
    """They say nothing of the draft, and those of a verifier are named as its own."""
    trace = traced(numbered_world(*range(12)), mode="lr", max_depth=4)
    steps = [step.model_copy(update={"reason": reason}) if step.origin is Origin.CORRECTION else step for step in trace.steps]

    findings = analyse(trace.model_copy(update={"steps": tuple(steps)})).findings

    expected = f"12 of 25 drafted steps were rejected without a verdict: 12 {reason}"
    assert [finding.evidence for finding in findings] == ([] if reason == "risk_budget" else [(expected,)])


def test_without_depth_there_is_nothing_to_throw_away() -> None:
    assert "cascade rejection" not in names(traced(numbered_world(), mode="lr", max_depth=1))


def slowing_judge(call: EngineCall, num_tokens: int) -> float:
    return 0.05 if int(call.request_id.rsplit("/", 1)[1]) < NUM_STEPS // 2 else 0.1


def test_a_judge_that_slows_down_drifts() -> None:
    world = numbered_world(*ALL)
    world.judge.delay = slowing_judge

    (finding,) = analyse(traced(world, mode="lr")).findings

    assert finding.name == "verifier drift"
    assert finding.evidence == ("a verdict took 50.0 ms in the first half and 100.0 ms in the second (median)",)


def test_a_judge_that_changes_its_mind_drifts() -> None:
    accepted = [step for step in ALL if step < NUM_STEPS // 2 or step % 3 == 0]

    (finding,) = analyse(traced(numbered_world(*accepted), mode="lr")).findings

    assert finding.name == "verifier drift"
    assert finding.evidence[0].startswith("100% of the compared steps were accepted in the first half")


def test_verdicts_of_uneven_length_do_not_drift() -> None:
    world = numbered_world(*ALL)
    world.judge.delay = lambda call, num_tokens: 0.05 if int(call.request_id.rsplit("/", 1)[1]) % 2 else 0.15

    assert names(traced(world, mode="lr")) == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_draft_as_slow_as_the_target_is_the_bottleneck(deterministic: bool) -> None:
    """It comes late, or with ``deterministic`` is waited for."""
    world = numbered_world(*ALL)
    world.draft.delay = taking(1.5)

    trace = traced(world, mode="lr", deterministic=deterministic)

    (finding,) = analyse(trace).findings
    assert finding.name == "draft as bottleneck"
    assert ("waited for a drafted step" if deterministic else "no draft ready") in finding.evidence[0]


def test_waits_for_draft_tokens_are_no_bottleneck() -> None:
    """Not beside drafted steps either. Here draft tokens take a third of the latency."""
    world = numbered_world(*ALL)
    world.draft.delay = taking(0.5)
    trace = traced(world, mode="sd", proposer="draft_model", num_draft_tokens=4)
    drafted = trace.calls[0].model_copy(update={"purpose": Purpose.DRAFTED_STEP, "outcome": CallOutcome.CANCELLED})
    both = trace.model_copy(update={"calls": (*trace.calls, drafted)})

    assert analyse(both).breakdown.roles[Role.DRAFT].critical_ms > 0.3 * trace.latency_ms
    assert names(both) == []


def test_a_wait_in_which_nothing_runs_is_waiting() -> None:
    trace = traced(numbered_world(*ALL), mode="lr", max_tokens=40)
    late = trace.model_copy(update={"usage": trace.usage.model_copy(update={"latency_s": trace.usage.latency_s + 3.0})})

    assert analyse(late).breakdown.waiting_ms == pytest.approx(analyse(trace).breakdown.waiting_ms + 3000.0)
    assert all(first.end_ms == second.start_ms for first, second in pairwise(analyse(late).critical))


@given(salts, shapes, salts)
def test_the_breakdown_adds_up_whatever_happened(salt: int, shape: dict[str, object], order: int) -> None:
    trace = traced(any_world(salt, order), **shape)

    analysis = analyse(trace)

    found, critical = analysis.breakdown, analysis.critical
    assert found.waiting_ms + sum(time.critical_ms for time in found.roles.values()) == pytest.approx(trace.latency_ms)
    for role, time in found.roles.items():
        busy = sum(call.duration_ms for call in trace.calls if call.role is role)
        assert time.busy_ms == pytest.approx(busy)
    assert all(first.end_ms == second.start_ms for first, second in pairwise(critical))
    assert (critical[0].start_ms, critical[-1].end_ms) == (0.0, trace.latency_ms) if critical else trace.latency_ms == 0.0
    for share in (found.batched_share, found.overlap_share):
        assert share is None or 0.0 <= share <= 1.0 + 1e-9


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda pair: (float(pair[0]), float(sum(pair)))))


@given(intervals, intervals)
def test_interval_arithmetic_equals_counting_by_units(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    def covered(parts: list[tuple[float, float]], unit: int) -> int:
        return sum(start <= unit < end for start, end in parts)

    for num in (1, 2, 3):
        assert length(at_least(first, num)) == sum(covered(first, unit) >= num for unit in range(50))
    both = common(at_least(first, 1), at_least(second, 1))
    assert length(both) == sum(covered(first, unit) > 0 and covered(second, unit) > 0 for unit in range(50))
    placed = rows(first, [start % 3 for start, _ in first])
    for row in set(placed):
        assert not at_least([interval for interval, at in zip(first, placed, strict=True) if at == row], 2)


def test_calls_of_one_key_stay_in_line() -> None:
    assert rows([(0, 1), (0, 2), (2, 3), (2, 3)], ["a", "b", "b", "c"]) == [0, 1, 1, 0]
