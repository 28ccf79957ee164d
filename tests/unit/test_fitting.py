"""A scenario fitted to traces is the one that they were recorded in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from lr_backend.cli.app import app
from lr_backend.engine import Role
from lr_backend.errors import TraceError
from lr_backend.plan import table
from lr_backend.plan.fit_texts import acceptance_rate, fit_workload, sibling_acceptance_rate
from lr_backend.plan.fitting import Fitted, fit, fit_by_verifier
from lr_backend.plan.overrides import Overrides
from lr_backend.plan.simulation import Policy, simulate, speedup
from lr_backend.plan.table import plan
from lr_backend.request import Mode, Origin, StepRecord
from lr_backend.trace.analysis import critical_path
from lr_backend.trace.schema import Call, Purpose, Trace
from tests.support.scenarios import changed, fitted
from tests.support.traces import numbered_world, traced

BASE = fitted(acceptance_rate=0.7, target_token_s=0.02, draft_token_s=0.004, step_spread=0.3, step_tokens=16, num_steps=30)
CHANGES = [
    {},
    {"verdict_s": 0.05, "draft_token_s": 0.002},
    {"crowding": 0.3},
    {"call_s": 0.01, "acceptance_rate": 0.5},
    {"num_cores": 1.5},
    {"step_spread": 0.0, "step_tokens": 24},
    {"answer_tokens": 60},
    {"target_prompt_s": 0.002, "draft_prompt_s": 0.001, "call_s": 0.005},
    {"verdict_s": 0.03, "crowding": 0.2, "call_s": 0.005, "num_cores": 1.5, "num_steps": 15, "step_tokens": 24},
]


LR = Policy()


ANSWERED: dict[str, tuple[Trace, ...]] = {}
"""Traces cannot be changed, and most tests look at the same ones."""


def recorded(known: Fitted, policy: Policy = LR, seeds: range = range(3)) -> list[Trace]:
    return [trace for seed in seeds for trace in answered(known, policy, seed)]


def answered(known: Fitted, policy: Policy, seed: int) -> tuple[Trace, ...]:
    if (key := repr((known, policy, seed))) not in ANSWERED:
        ANSWERED[key] = simulate(known.scenario, policy, seed, trace=True).traces
    return ANSWERED[key]


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned is compared with what is planned over the same texts."""
    monkeypatch.setattr(table, "LEAST_STEPS", 60)


# Nobody knows which prompt tokens a cancelled call computed, and siblings make many of those.
@pytest.mark.parametrize(
    ("change", "width"),
    [(change, width) for change in CHANGES for width in (1, 2) if width == 1 or "target_prompt_s" not in change],
    ids=lambda value: ", ".join(value) or "nothing" if isinstance(value, dict) else f"{value}",
)
def test_the_scenario_of_the_traces_is_found_again(change: dict[str, float], width: int) -> None:
    known = changed(BASE, **change)
    texts, times = known.workload, known.times
    found = fit(recorded(known, Policy(width=width)), times.num_cores)

    step_s = texts.step_tokens * times.target_token_s
    assert found.times.target_token_s == pytest.approx(times.target_token_s, rel=0.08)
    assert found.times.draft_token_s == pytest.approx(times.draft_token_s, rel=0.12)
    assert found.times.crowding == pytest.approx(times.crowding, abs=0.05)
    assert found.times.call_s == pytest.approx(times.call_s, abs=0.015 * step_s)
    assert found.times.verdict_s == pytest.approx(times.verdict_s, abs=0.015 * step_s)
    assert found.times.target_prompt_s == pytest.approx(times.target_prompt_s, abs=0.05 * times.target_token_s)
    assert found.times.draft_prompt_s == pytest.approx(times.draft_prompt_s, abs=0.02 * times.target_token_s)
    assert found.workload.acceptance_rate == pytest.approx(texts.acceptance_rate, abs=0.1)  # 60 steps or so: chance
    assert found.workload.step_tokens == pytest.approx(texts.step_tokens, abs=2)
    assert found.workload.step_spread == pytest.approx(texts.step_spread, abs=0.06)
    assert (found.workload.num_steps, found.times.num_cores) == (texts.num_steps, times.num_cores)
    assert found.workload.answer_tokens == pytest.approx(texts.answer_tokens, abs=1)  # the end of the text is one of them


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: ", ".join(change) or "nothing")
def test_fitted_times_predict_what_the_true_ones_do(change: dict[str, float]) -> None:
    """At a depth that no trace was recorded at; with the same texts, so that chance is the same on both sides."""
    known = changed(BASE, **change)
    found = Fitted(known.workload, fit(recorded(known), known.times.num_cores).times)

    wanted, predicted = (speedup(one.scenario, Policy(max_depth=8)) for one in (known, found))
    assert predicted == pytest.approx(wanted, rel=0.1)


def test_what_is_predicted_from_traces_is_what_the_scenario_gains() -> None:
    known = changed(BASE, crowding=0.1, call_s=0.005, verdict_s=0.02)
    found = fit(recorded(known, seeds=range(6)))

    wanted, predicted = (plan(one.scenario, (4,))[0].speedup for one in (known, found))
    assert predicted == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("says", [lambda call: False, lambda call: call.num_tokens == 1, lambda call: call.role is Role.JUDGE])
def test_an_engine_that_does_not_say_of_each_call_what_it_reused_says_nothing_of_its_prompts(
    says: Callable[[Call], bool],
) -> None:
    def told(call: Call) -> Call:
        return call if says(call) else call.model_copy(update={"num_reused_tokens": None})

    known = recorded(changed(BASE, call_s=0.005))
    found = fit([trace.model_copy(update={"calls": tuple(map(told, trace.calls))}) for trace in known])

    assert (found.times.target_prompt_s, found.times.draft_prompt_s) == (0.0, 0.0)
    assert found.times.call_s == pytest.approx(0.005, abs=0.002)


def test_a_call_that_did_nothing_but_wait_is_left_out() -> None:
    """Two clocks: the engine's own says that it was in the queue to its end."""

    def waiting(call: Call) -> Call:
        return call.model_copy(update={"queue_ms": call.duration_ms})

    traces = recorded(changed(BASE, call_s=0.005))
    other = [trace.model_copy(update={"calls": (waiting(trace.calls[0]), *trace.calls[1:])}) for trace in traces]

    assert fit(other).times.target_token_s == pytest.approx(fit(traces).times.target_token_s, rel=0.02)


def test_what_a_verification_takes_beyond_a_token_is_found() -> None:
    known = changed(BASE, verification_s=0.03, token_agreement=0.8, call_s=0.005, target_prompt_s=0.0005)
    verifying = Policy(Mode.SD, fields={"proposer": "draft_model", "num_draft_tokens": 4})
    found = fit([*recorded(known), *recorded(known, verifying)])

    assert found.times.verification_s == pytest.approx(0.03, rel=0.15)
    assert found.workload.token_agreement == pytest.approx(0.8, abs=0.05)
    assert fit(recorded(known)).times.verification_s == 0.0


def test_an_engine_that_drafts_by_itself_writes_as_fast_as_it_does() -> None:
    """Its calls have drafts and take many passes; a verification takes one, and is left out."""

    def drafted(call: Call) -> Call:
        drafts = {"num_draft_tokens": 2 * call.num_tokens, "num_accepted_tokens": call.num_tokens // 2}
        return call.model_copy(update=drafts) if call.role is Role.TARGET and call.num_tokens > 3 else call

    def verified(call: Call) -> Call:
        drafts = {"num_draft_tokens": call.num_tokens, "num_accepted_tokens": max(0, call.num_tokens - 1)}
        return call.model_copy(update=drafts) if call.role is Role.TARGET else call

    def with_calls(change: Callable[[Call], Call]) -> list[Trace]:
        return [trace.model_copy(update={"calls": tuple(map(change, trace.calls))}) for trace in traces]

    traces = recorded(changed(BASE, call_s=0.005))
    assert fit(with_calls(drafted)).times == fit(traces).times
    with pytest.raises(TraceError, match="completed calls of the target without draft tokens"):
        fit(with_calls(verified))


def test_what_the_loop_takes_between_calls_is_its_own() -> None:
    traces = recorded(changed(BASE, call_s=0.005, answer_tokens=20))
    num_calls = sum(len({one.call for one in critical_path(trace) if one.call is not None}) for trace in traces)

    more = fit([paused(trace, 2.0) for trace in traces]).times.loop_s - fit(traces).times.loop_s

    assert more == pytest.approx(2.0 * len(traces) / num_calls, rel=0.02)


def paused(trace: Trace, pause_s: float) -> Trace:
    """The same calls, with a pause before the last one: the answer after the reasoning."""
    *calls, last = trace.calls
    assert last.purpose is Purpose.ALONE
    late = last.model_copy(update={"start_ms": last.start_ms + 1e3 * pause_s, "end_ms": last.end_ms + 1e3 * pause_s})
    final = trace.steps[-1].model_copy(update={"committed_s": trace.steps[-1].committed_s + pause_s})
    usage = trace.usage.model_copy(update={"latency_s": trace.usage.latency_s + pause_s})
    return trace.model_copy(update={"calls": (*calls, late), "steps": (*trace.steps[:-1], final), "usage": usage})


def test_many_traces_tell_the_acceptance_well() -> None:
    short = changed(BASE, step_tokens=8)
    assert acceptance_rate(recorded(short, seeds=range(24))) == pytest.approx(BASE.workload.acceptance_rate, abs=0.05)


def test_late_drafts_say_nothing_of_the_meaning() -> None:
    def late(record: StepRecord) -> StepRecord:
        return record.model_copy(update={"reason": "late"}) if record.origin is Origin.CORRECTION else record

    traces = recorded(BASE)
    other = [trace.model_copy(update={"steps": tuple(map(late, trace.steps[::2])) + trace.steps[1::2]}) for trace in traces]

    assert acceptance_rate(traces) < acceptance_rate(other) < 1.0


def test_a_request_whose_budget_was_spent_says_nothing_of_the_meaning() -> None:
    """It may have accepted equal tokens alone, for a while that nobody knows."""
    traces = recorded(BASE)
    usage = traces[0].usage.model_copy(update={"risk_budget_spent": True})
    spent = traces[0].model_copy(update={"usage": usage})
    assert fit_workload([spent, *traces[1:]]).acceptance_rate == fit_workload(traces[1:]).acceptance_rate
    with pytest.raises(TraceError, match="no drafted step was compared"):
        fit_workload([spent])
    request = spent.request.model_copy(update={"verifier": "cascade"})
    assert fit_by_verifier([spent.model_copy(update={"request": request}), *traces]).keys() == {"judge"}


def test_verifications_that_were_cancelled_say_nothing_of_the_draft_tokens() -> None:
    """Rejected chains and own branches leave many of them, whose tokens nobody decided on."""
    scenario = changed(BASE, token_agreement=0.85, acceptance_rate=0.3)
    policy = Policy(Mode.LR_SD, max_depth=8, fields={"proposer": "draft_model", "num_draft_tokens": 8})
    traces = recorded(scenario, policy, range(6))
    verifications = [call for trace in traces for call in trace.calls if call.role is Role.TARGET and call.num_draft_tokens]
    assert sum(not call.completed for call in verifications) > len(verifications) / 20
    assert fit_workload(traces).token_agreement == pytest.approx(0.85, abs=0.01)


def test_a_winning_sibling_says_that_those_before_it_lost() -> None:
    """Accepted: 0.7 of the candidates and not of the positions, of which 0.91 take one of two."""
    wide = recorded(BASE, Policy(width=2))
    by_position = fmean(trace.usage.step_acceptance_rate or 0.0 for trace in wide)

    assert by_position > 0.8
    assert acceptance_rate(wide) == pytest.approx(BASE.workload.acceptance_rate, abs=0.1)


def test_further_candidates_have_an_acceptance_of_their_own() -> None:
    scenario = changed(BASE, acceptance_rate=0.6, sibling_acceptance_rate=0.2, step_tokens=8)
    wide = recorded(scenario, Policy(width=2), range(8))

    assert acceptance_rate(wide) == pytest.approx(0.6, abs=0.1)
    assert sibling_acceptance_rate(wide) == pytest.approx(0.2, abs=0.1)
    assert sibling_acceptance_rate(recorded(scenario)) is None


def test_which_steps_are_accepted_and_how_is_found_again() -> None:
    """Long ones seldom, and some without a verdict, because they are the target's own."""
    scenario = changed(BASE, acceptance_rate=0.6, exact_rate=0.2, length_bias=0.8, step_spread=0.6, step_tokens=16)
    traces = recorded(scenario, seeds=range(10))
    found = fit(traces)

    assert found.workload.exact_rate == pytest.approx(0.2, abs=0.06)
    assert found.workload.length_bias == pytest.approx(0.8, abs=0.25)
    accepted, rejected = (
        fmean(one.num_tokens for trace in traces for one in trace.steps if one.origin is origin)
        for origin in (Origin.DRAFT, Origin.CORRECTION)
    )
    assert accepted < 0.8 * rejected


def test_traces_of_other_depths_tell_a_slow_target_from_a_crowded_one() -> None:
    """A window that is always full has always the same crowd."""
    scenario = changed(BASE, crowding=0.5, acceptance_rate=0.4)
    shallow = recorded(scenario, Policy(max_depth=1), range(1))

    found = fit([*recorded(scenario), *shallow, *recorded(scenario, Policy(Mode.AR), range(1))])

    assert found.times.target_token_s == pytest.approx(scenario.times.target_token_s, rel=0.05)
    assert found.times.crowding == pytest.approx(scenario.times.crowding, abs=0.05)


def asking(traces: list[Trace], **fields: object) -> list[Trace]:
    """The traces as if their requests had asked for this."""
    return [trace.model_copy(update={"request": trace.request.model_copy(update=fields)}) for trace in traces]


def test_verifiers_have_an_acceptance_of_their_own_and_share_the_times() -> None:
    strict = asking(recorded(changed(BASE, acceptance_rate=0.3)), verifier="score")
    lax = asking(recorded(changed(BASE, acceptance_rate=0.9, verdict_s=0.05)), verifier="judge")

    found = fit_by_verifier([*strict, *lax])

    assert list(found) == ["score", "judge"]
    assert found["score"].workload.acceptance_rate < 0.5 < 0.8 < found["judge"].workload.acceptance_rate  # type: ignore[index]
    assert found["score"].times.verdict_s < 0.01 < found["judge"].times.verdict_s  # type: ignore[index]
    assert len({one.times.target_token_s for one in found.values()}) == 1


def test_a_lossless_trace_says_nothing_of_the_verifier_that_it_names() -> None:
    lossless = asking(recorded(changed(BASE, acceptance_rate=0.3)), mode=Mode.LOSSLESS, verifier="judge")

    assert list(fit_by_verifier(lossless)) == ["exact"]


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ([], "no trace with lookahead among 0"),
        (recorded(BASE, Policy(Mode.AR), range(1)), "no trace with lookahead among 1"),
    ],
)
def test_what_cannot_be_fitted_is_said_by_name(traces: list[Trace], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        fit(traces)


def test_one_short_trace_is_fitted_roughly() -> None:
    found = fit(recorded(changed(BASE, num_steps=4), seeds=range(1)))

    assert found.rough
    assert found.times.target_token_s == pytest.approx(BASE.times.target_token_s, rel=0.5)
    assert found.times.draft_token_s == pytest.approx(BASE.times.draft_token_s, rel=0.5)
    assert not fit(recorded(BASE)).rough


def test_a_target_that_always_wins_the_race_leaves_nothing_to_fit() -> None:
    world = numbered_world()
    world.target.delay, world.draft.delay = world.draft.delay, world.target.delay
    with pytest.raises(TraceError, match="no drafted step was compared"):
        fit([traced(world, mode="lr")])


def test_a_trace_that_ended_before_its_first_step_is_said_by_name() -> None:
    cut = traced(numbered_world(), mode="lr", deadline_s=0.01)
    assert cut.calls and not cut.steps
    with pytest.raises(TraceError, match="no drafted step was compared"):
        fit([cut])


def test_what_is_given_stands_over_what_was_fitted() -> None:
    given = Overrides(acceptance_rate=0.2, cost_ratio=0.5, verdict_cost=0.1, step_tokens=10, num_cores=2.0)

    workload = given.of_texts(BASE.workload)
    times = given.of_times(BASE.times, workload.step_tokens)

    assert (workload.acceptance_rate, workload.step_tokens, times.num_cores) == (0.2, 10, 2.0)
    assert (times.draft_token_s, times.verdict_s) == pytest.approx((0.01, 0.02))
    assert (Overrides().of_texts(BASE.workload), Overrides().of_times(BASE.times, 24)) == (BASE.workload, BASE.times)
    with pytest.raises(ValueError, match="acceptance_rate=2"):
        Overrides(acceptance_rate=2.0).of_texts(BASE.workload)


@pytest.mark.parametrize(("given", "exact_rate"), [(0.2, 0.2), (0.6, 0.4)])
def test_an_acceptance_below_the_fitted_exact_rate_lowers_that(given: float, exact_rate: float) -> None:
    found = Overrides(acceptance_rate=given).of_texts(replace(BASE.workload, exact_rate=0.4))
    assert (found.acceptance_rate, found.exact_rate) == (given, exact_rate)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    arguments = []
    for number, trace in enumerate(recorded(BASE)):
        path = tmp_path / f"{number}.json"
        path.write_text(trace.as_json())
        arguments += ["--trace", str(path)]
    return arguments


def test_the_command_predicts_from_trace_files(files: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *files, "--k", "1", "--k", "4", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [(row["verifier"], row["max_depth"]) for row in rows] == [("judge", 1), ("judge", 4)]
    assert rows[1]["speedup"] == pytest.approx(plan(BASE.scenario, (4,))[0].speedup, rel=0.15)

    lower = CliRunner().invoke(app, ["plan", *files, "--k", "4", "--alpha", "0.1", "--json"])
    assert json.loads(lower.output)["speedup"] < 0.8 * rows[1]["speedup"]


def test_traces_of_one_pace_keep_it_and_of_two_are_refused(tmp_path: Path) -> None:
    arguments = []
    for number, trace in enumerate(recorded(BASE)):
        path = tmp_path / f"{number}.json"
        path.write_text(trace.model_copy(update={"pace": "not a run on h200_sxm"}).as_json())
        arguments += ["--trace", str(path)]
    row = CliRunner().invoke(app, ["plan", *arguments, "--k", "2", "--json"])
    assert json.loads(row.output)["pace"] == "not a run on h200_sxm"
    shown = CliRunner().invoke(app, ["plan", *arguments, "--k", "2"])
    assert shown.output.endswith("not a run on h200_sxm\n")

    path.write_text(recorded(BASE)[-1].as_json())
    unlike = CliRunner().invoke(app, ["plan", *arguments, "--k", "2"])
    assert unlike.exit_code == 1
    assert "no times fit traces of unlike pace: not a run on h200_sxm / this machine's own" in unlike.output


def test_traces_with_draft_tokens_tell_of_them_on_a_system_too(files: list[str], tmp_path: Path) -> None:
    """Their mode compares no steps, so they tell nothing of a verifier."""
    policy = Policy(Mode.SD, fields={"proposer": "draft_model", "num_draft_tokens": 4})
    path = tmp_path / "sd.json"
    path.write_text(recorded(replace(BASE, workload=replace(BASE.workload, token_agreement=0.9)), policy, range(1))[0].as_json())

    def speedup(*arguments: str) -> float:
        asked = ["plan", *arguments, "--system", "h200_sxm", "--mode", "lr_sd", "--k", "4", "--json"]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        return float(json.loads(result.output)["speedup"])

    assert speedup(*files, "--trace", str(path)) > 1.1 * speedup(*files)


def test_the_command_says_what_it_fitted(files: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *files, "--k", "2"])
    assert result.exit_code == 0, result.output
    assert "fitted to 3 traces, verifier judge" in result.output
    assert "30 steps of 16 tokens" in result.output


def test_the_command_names_what_it_lacks(tmp_path: Path) -> None:
    neither = CliRunner().invoke(app, ["plan", "--alpha", "0.5"])
    assert (neither.exit_code, "--alpha or --workload and either --c or --system are needed" in neither.output) == (2, True)

    path = tmp_path / "ar.json"
    path.write_text(recorded(BASE, Policy(Mode.AR), range(1))[0].as_json())
    for system in ([], ["--system", "h200_sxm"]):
        alone = CliRunner().invoke(app, ["plan", "--trace", str(path), *system])
        assert (alone.exit_code, "no trace with lookahead among 1" in alone.output) == (1, True)
    none = CliRunner().invoke(app, ["plan", "--alpha", "0.5", "--c", "0.1", "--mode", "sd", "--k", "8"])
    assert (none.exit_code, "mode sd has none" in none.output) == (2, True)
    missing = CliRunner().invoke(app, ["plan", "--trace", str(tmp_path / "none.json")])
    assert (missing.exit_code, "cannot read" in missing.output) == (1, True)
