"""The simulation of the loop: against the paper's formulas where they hold, and sensible where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from typer.testing import CliRunner

from lr_backend.build.pace import stood_for
from lr_backend.cli import plan as cli_plan
from lr_backend.cli.app import app
from lr_backend.embedded.stats import EngineStats
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.virtual import VirtualEngine
from lr_backend.engine import EngineCall, Generation
from lr_backend.errors import EngineRejected
from lr_backend.loop.assemble import Engines
from lr_backend.plan import simulation, table
from lr_backend.plan.fitting import Fitted
from lr_backend.plan.losses import losses
from lr_backend.plan.simulation import Policy, Prediction
from lr_backend.plan.table import plan
from lr_backend.policy.formulas import ceiling
from lr_backend.request import Mode
from tests.support.scenarios import changed, fitted

LONG = fitted(acceptance_rate=0.6, num_steps=160)
SHORT = changed(LONG, num_steps=40, step_tokens=16)


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LEAST_STEPS", 30)
    monkeypatch.setattr(table, "LEAST_SEEDS", 1)


def simulate(known: Fitted, policy: Policy, seed: int = 0) -> Prediction:
    return simulation.simulate(known.scenario, policy, seed)


def speedup(known: Fitted, policy: Policy) -> float:
    return simulation.speedup(known.scenario, policy)


@pytest.mark.parametrize(("alpha", "c", "k"), [(0.5, 0.1, 4), (0.7, 0.2, 8), (0.63, 0.3, 2), (0.6, 0.1, 1)])
def test_without_overheads_it_gains_what_the_formulas_say(alpha: float, c: float, k: int) -> None:
    scenario = changed(LONG, acceptance_rate=alpha, draft_token_s=c)
    ahead, alone = (simulate(scenario, policy) for policy in (Policy(max_depth=k), Policy(Mode.AR)))
    met = ahead.step_acceptance_rate
    assert met is not None
    assert met == pytest.approx(alpha, abs=0.07)
    assert alone.latency_s / ahead.latency_s == pytest.approx(ceiling(met, c, k), rel=0.08)


def test_the_target_alone_takes_a_tokens_time_a_token() -> None:
    alone = simulate(SHORT, Policy(Mode.AR))
    assert alone.latency_s == pytest.approx(alone.usages[0].completion_tokens * SHORT.times.target_token_s)
    assert alone.target_batch == 1.0


@pytest.mark.parametrize(
    "change", [{"verdict_s": 10.0}, {"crowding": 0.3}, {"call_s": 2.0}, {"loop_s": 2.0}, {"num_cores": 1}, {"draft_token_s": 0.5}]
)
def test_every_overhead_costs(change: dict[str, float]) -> None:
    policy = Policy(max_depth=4)
    assert speedup(changed(SHORT, **change), policy) < speedup(SHORT, policy)


def test_branches_share_the_targets_iterations() -> None:
    assert simulate(SHORT, Policy(max_depth=4)).target_batch > 1.3


def test_drafts_that_are_never_accepted_gain_nothing() -> None:
    """A little less: after a correction the next step joins the batch when the iteration of what it replaces is over."""
    gain = speedup(changed(SHORT, acceptance_rate=0.0), Policy(max_depth=4))
    assert 1.0 - 1.0 / SHORT.workload.step_tokens < gain <= 1.0


def test_width_finds_more_acceptable_steps() -> None:
    scenario = changed(SHORT, acceptance_rate=0.4)
    assert speedup(scenario, Policy(width=3)) > speedup(scenario, Policy(width=1))


def test_width_finds_nothing_where_further_candidates_are_never_accepted() -> None:
    scenario = changed(SHORT, acceptance_rate=0.4, sibling_acceptance_rate=0.0)
    wide, narrow = (simulate(scenario, Policy(width=width)).step_acceptance_rate for width in (3, 1))
    assert wide == pytest.approx(narrow, abs=0.15)


def test_one_thread_makes_all_calls_one_after_another() -> None:
    """A hand-over holds up nobody else; what the loop itself takes holds up all that it does next."""
    handed_over, in_turns = (changed(SHORT, **{name: 3.0}) for name in ("call_s", "loop_s"))
    wide = Policy(width=3, max_depth=4)
    assert speedup(in_turns, wide) < 0.7 * speedup(handed_over, wide)


def test_the_targets_own_steps_need_no_verdict() -> None:
    scenario = changed(SHORT, acceptance_rate=0.6, exact_rate=0.6, verdict_s=10.0)
    asked, spared = (simulate(one, Policy()).usages[0] for one in (changed(scenario, exact_rate=0.0), scenario))
    assert spared.num_judge_calls < asked.num_judge_calls
    assert spared.num_steps_accepted_by.get("exact", 0) > 10


def test_many_requests_leave_a_crowded_target_nothing_to_gain_and_auto_sees_it() -> None:
    scenario = changed(SHORT, crowding=1.0, num_steps=100, step_tokens=12)
    fixed = speedup(scenario, Policy(max_depth=4, num_requests=4))
    chosen = speedup(scenario, Policy(Mode.AUTO, max_depth=4, num_requests=4, fields={"num_draft_tokens": 0}))
    assert fixed < 0.9
    assert chosen > 0.92


def test_the_same_seed_predicts_the_same() -> None:
    varied = changed(SHORT, step_spread=0.5)
    assert simulate(varied, Policy(), 3) == simulate(varied, Policy(), 3) != simulate(varied, Policy(), 4)


@pytest.mark.parametrize(
    "change", [{"acceptance_rate": 1.1}, {"draft_token_s": 0.0}, {"crowding": -1.0}, {"num_cores": 0}, {"step_tokens": 1}]
)
def test_scenarios_that_mean_nothing_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        changed(SHORT, **change)


@pytest.mark.parametrize("policy", [Policy(max_depth=17), Policy(width=0), Policy(num_requests=0)])
def test_policies_that_mean_nothing_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="out of range"):
        simulate(SHORT, policy)


@pytest.mark.usefixtures("few_texts")
def test_the_command_prints_a_row_a_depth() -> None:
    arguments = ("--alpha", "0.6", "--c", "0.2", "--k", "1", "--k", "3", "--verdict", "0.1", "--step-tokens", "8", "--json")
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["max_depth"] for row in rows] == [1, 3]
    told = {"mode": "lr", "requests": 1, "alpha": 0.6, "c": 0.2, "rough": False, "num_texts": 1}
    assert all(told.items() <= row.items() for row in rows)
    assert rows[0]["speedup"] < rows[1]["speedup"] < rows[1]["ceiling"] * 1.1


@pytest.mark.usefixtures("few_texts")
def test_the_formula_is_of_whole_steps_alone() -> None:
    arguments = ["plan", "--alpha", "0.6", "--c", "0.2", "--k", "1", "--mode", "lr_sd", "--step-tokens", "8"]
    row = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert row["ceiling"] is None and row["speedup"] > 0.0
    assert CliRunner().invoke(app, arguments).exit_code == 0


@pytest.mark.usefixtures("few_texts")
def test_each_cost_taken_away_gains_and_all_of_them_most() -> None:
    small = changed(SHORT, step_tokens=8)
    scenario = changed(small, verdict_s=1.5, loop_s=0.2, crowding=0.2, num_cores=1.5)
    found = {one.without: one.speedup for one in losses(scenario.scenario, Policy(max_depth=4))}

    assert list(found) == ["nothing", "verdicts", "the loop's own time", "crowded iterations", "shared cores", "all of these"]
    assert found["nothing"] == pytest.approx(plan(scenario.scenario, (4,))[0].speedup)
    assert min(found.values()) == found["nothing"]
    assert max(found.values()) == found["all of these"]
    assert found["all of these"] == pytest.approx(plan(small.scenario, (4,))[0].speedup)


@pytest.mark.usefixtures("few_texts")
def test_the_command_says_what_each_cost_takes_from_the_best_row() -> None:
    arguments = ["--alpha", "0.7", "--c", "0.1", "--verdict", "0.3", "--k", "1", "--k", "4", "--step-tokens", "6"]
    result = CliRunner().invoke(app, ["plan", *arguments, "--costs", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row.get("without") for row in rows] == [None, None, "nothing", "verdicts", "all of these"]
    assert {row["max_depth"] for row in rows[2:]} == {4}
    assert rows[2]["speedup"] == rows[1]["speedup"] < rows[3]["speedup"]

    table = CliRunner().invoke(app, ["plan", *arguments, "--costs"])
    assert "without" in table.output
    assert "verdicts" in table.output


def test_the_command_names_what_is_out_of_range() -> None:
    result = CliRunner().invoke(app, ["plan", "--alpha", "1.5", "--c", "0.1"])
    assert result.exit_code == 2
    assert "acceptance_rate=1.5" in result.output


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--spec", "qwen3-32b"], "--spec tells what --system needs, and changes nothing without it"),
        (["--card-sharing", "mps"], "--card-sharing tells what --system needs"),
        (["--draft-tokens", "4"], "--draft-tokens is of draft tokens, and mode lr has none"),
        (["--proposer", "ngram"], "--proposer is of draft tokens, and mode lr has none"),
    ],
)
def test_options_without_effect_are_refused(wrong: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--alpha", "0.7", "--c", "0.1", *wrong])
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_the_price_of_an_engines_own_draft_tokens_is_not_guessed() -> None:
    arguments = ["plan", "--alpha", "0.7", "--c", "0.1", "--mode", "sd", "--token-agreement", "0.8", "--proposer", "engine"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--proposer engine" in result.output


def test_what_comes_after_the_reasoning_gains_nothing() -> None:
    """As long as the reasoning, and written at the target's own pace: then half of the time is left as it was."""
    scenario = changed(SHORT, answer_tokens=SHORT.workload.num_steps * SHORT.workload.step_tokens)
    gain, of_the_reasoning = (speedup(one, Policy(max_depth=4)) for one in (scenario, SHORT))
    assert gain == pytest.approx(2.0 / (1.0 + 1.0 / of_the_reasoning), rel=0.02)


def test_prompts_that_are_cached_were_computed_before_at_no_cost() -> None:
    scenario = changed(SHORT, prompt_tokens=1000).scenario

    async def ask(engines: Engines, texts: Texts) -> EngineStats:
        await engines.target.generate(EngineCall("one", texts.prompt(0), 1))
        assert isinstance(engines.target, VirtualEngine)
        return engines.target.timeline.stats()

    ways = (scenario, replace(scenario, prompts_are_cached=True))
    computed, cached = (simulation.run_on_engines(one, 0, ask)[0] for one in ways)
    assert (computed.num_tokens_reused, cached.num_tokens_reused) == (0, 999)
    assert cached.num_requests == cached.num_iterations == 1


def test_a_steady_load_fails_as_its_first_answer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: VirtualEngine, call: EngineCall) -> Generation:
        raise EngineRejected("too long")

    monkeypatch.setattr(VirtualEngine, "generate", refuse)
    with pytest.raises(EngineRejected, match="too long"):
        simulation.simulate_steady(SHORT.scenario, Policy(Mode.AR, num_requests=3), num_answers=3)


def test_a_text_that_does_not_fit_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the deployment's own limit says, which is looked at first."""
    arguments = ["plan", "--alpha", "0.6", "--system", "h200_sxm", "--k", "2", "--steps", "2", "--prompt-tokens", "1500000"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "takes prompts of at most 8192 tokens" in " ".join(refused.output.split())
    monkeypatch.setattr(cli_plan, "texts_refused", lambda spec, workload: "")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "the target has memory for" in " ".join(result.output.split())


def test_a_first_verdict_that_rejects_does_not_turn_lookahead_off() -> None:
    """Fresh servers, one answer each: whatever came first, most of the answer is looked ahead from."""
    scenario = changed(SHORT, acceptance_rate=0.8, draft_token_s=0.15, step_spread=0.9, step_tokens=12)
    gains = []
    for seed in range(6):
        alone, auto = (
            simulation.simulate(scenario.scenario, policy, seed).latency_s
            for policy in (Policy(Mode.AR), Policy(Mode.AUTO, max_depth=8))
        )
        gains.append(alone / auto)
    assert min(gains) > 1.1 and fmean(gains) > 1.8


ALWAYS_DRAFTS = ["plan", "--alpha", "0.6", "--steps", "6", "--k", "2", "--system", "h200_sxm", "--spec", "qwen3-32b-llmapi"]


@pytest.mark.usefixtures("few_texts")
def test_a_target_that_always_drafts_is_planned_with_its_own_drafts() -> None:
    asked = [*ALWAYS_DRAFTS, "--mode", "lr_sd", "--token-agreement", "0.8", "--json"]
    found, said = (CliRunner().invoke(app, [*asked, *more]) for more in ([], ["--proposer", "engine", "--draft-tokens", "4"]))
    assert found.exit_code == 0, found.output
    assert found.output == said.output


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--mode", "lr"], "--mode lr: the target of qwen3-32b-llmapi drafts by itself in every call"),
        (["--mode", "sd", "--proposer", "draft_model"], "takes no draft tokens from elsewhere"),
        (["--mode", "sd", "--draft-tokens", "8"], "--draft-tokens 8: the target of qwen3-32b-llmapi drafts 4 in every pass"),
    ],
)
def test_what_a_target_that_always_drafts_does_not_serve_is_not_planned(wrong: list[str], said: str) -> None:
    asked = [*ALWAYS_DRAFTS[:5], *ALWAYS_DRAFTS[7:], *wrong]
    result = CliRunner().invoke(app, asked)
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--requests", "65"], "--requests 65: qwen3-32b-apart has at most 64 requests in flight"),
        (["--prompt-tokens", "8193"], "takes prompts of at most 8192 tokens, and these have 8193"),
        (["--steps", "800"], "writes answers of at most 16368 tokens, and these have 19200 on average"),
        (["--mode", "sd", "--draft-tokens", "11"], "--draft-tokens 11: the target of qwen3-32b-apart takes at most 10"),
        (["--k", "4", "--k", "9"], "--k 9: qwen3-32b-apart looks at most 8 steps ahead"),
        (["--width", "5"], "--width 5: qwen3-32b-apart drafts at most 4 candidates for a step"),
    ],
)
def test_what_the_deployment_refuses_is_not_planned(wrong: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--alpha", "0.6", "--system", "h200_sxm", *wrong])
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_deployment_that_looks_nowhere_ahead_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = stood_for("qwen3-32b-apart")
    limits = {**spec.lookahead["limits"], "max_depth": 0}
    alone = spec.model_copy(update={"lookahead": {**spec.lookahead, "limits": limits}})
    monkeypatch.setattr("lr_backend.cli.plan.stood_for", lambda name: alone)
    result = CliRunner().invoke(app, ["plan", "--alpha", "0.6", "--system", "h200_sxm"])
    assert (result.exit_code, "--mode lr: qwen3-32b-apart looks at most 0 steps ahead" in result.output) == (2, True)
