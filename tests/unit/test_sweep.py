"""The sweep: what its rows say of each other, and how a page is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import stood_for
from lr_backend.cli.app import app
from lr_backend.emulated.workload import Workload
from lr_backend.errors import ConfigError
from lr_backend.hardware.machine import Hops
from lr_backend.plan.losses import LIMITS
from lr_backend.plan.simulation import CALL_CPU_S, Policy, Scenario, simulate, simulate_steady, with_loop
from lr_backend.plan.sweep import TARGET_LIMITS, as_markdown, rank, sweep
from lr_backend.request import Mode

SHORT = Workload(0.6, token_agreement=0.75, word_agreement=0.5, prompt_tokens=200, num_steps=4)


def test_load_costs_latency_and_saves_gpu_seconds() -> None:
    found = sweep(stood_for("qwen3-32b"), "h200_sxm", SHORT, (1, 8), (Mode.AR,), num_answers=8, price=3.6, limits=True)
    alone, crowded = found.rows
    assert (alone.num_answers, crowded.num_answers) == (8, 8)
    assert crowded.p50_s > alone.p50_s and alone.p99_s >= alone.p50_s
    assert crowded.gpu_s_per_answer < alone.gpu_s_per_answer
    assert alone.gpu_s_per_answer * alone.answers_per_s == pytest.approx(4.0)
    assert alone.cost == pytest.approx(alone.gpu_s_per_answer / 1000.0)
    assert alone.limited_by == TARGET_LIMITS


def test_speculation_is_swept_in_both_placements() -> None:
    found = sweep(stood_for("qwen3-32b"), "h200_sxm", SHORT, (1,), (Mode.AR, Mode.LR))
    assert [(row.placement, row.mode) for row in found.rows] == [
        ("TP 4, target alone", Mode.AR),
        ("TP 4, beside the target", Mode.LR),
        ("TP 2, apart", Mode.LR),
    ]
    assert len({row.p50_s for row in found.rows}) == 3


def test_a_target_that_always_drafts_is_swept_in_the_modes_that_it_serves() -> None:
    found = sweep(stood_for("qwen3-32b-llmapi"), "h200_sxm", SHORT, (1,))
    modes = [Mode.SD, Mode.LR_SD, Mode.AUTO]
    assert [(row.placement, row.mode) for row in found.rows] == [
        (placement, mode) for placement in ("TP 4, beside the target", "TP 2, apart") for mode in modes
    ]
    assert set(found.left_out) == {"ar", "lr"}
    compiled = sweep(stood_for("qwen3-32b"), "h200_sxm", SHORT, (1,), (Mode.SD,))
    assert found.rows[0].p50_s < 0.9 * compiled.rows[0].p50_s, "its draft tokens need no call of the draft model"


def test_what_a_target_drafts_with_at_no_known_pace_is_not_swept() -> None:
    spec = stood_for("qwen3-32b-llmapi")
    speculative = spec.target.speculative.model_copy(update={"kind": "eagle3"})  # type: ignore[union-attr]
    other = spec.model_copy(update={"target": spec.target.model_copy(update={"speculative": speculative})})
    with pytest.raises(ConfigError, match="a pace is known, not of eagle3"):
        sweep(other, "h200_sxm", SHORT, (1,))


def with_limits(spec: GpuDeployment, **limits: int) -> GpuDeployment:
    return spec.model_copy(update={"lookahead": {**spec.lookahead, "limits": {**spec.lookahead["limits"], **limits}}})


def test_loads_and_draft_tokens_beyond_the_deployments_limits_are_left_out() -> None:
    spec = with_limits(stood_for("qwen3-32b"), max_in_flight_requests=2)
    found = sweep(spec, "h200_sxm", SHORT, (1, 4), (Mode.AR,))
    assert [row.load for row in found.rows] == [1]
    assert found.left_out == {"load 4": "qwen3-32b has at most 2 requests in flight"}
    target = spec.target.model_copy(update={"max_draft_len": 2})
    short = sweep(spec.model_copy(update={"target": target}), "h200_sxm", SHORT, (1,), (Mode.LR, Mode.SD))
    assert {row.mode for row in short.rows} == {Mode.LR}
    assert short.left_out == {"sd": "the target of qwen3-32b takes at most 2 draft tokens, not 4"}


def test_what_is_predicted_looks_ahead_as_far_as_the_deployment_does() -> None:
    alone, two, four = (
        sweep(with_limits(stood_for("qwen3-32b"), max_depth=depth), "h200_sxm", SHORT, (1,), (Mode.LR,), num_answers=4).rows[0]
        for depth in (0, 2, 4)
    )
    assert alone.p50_s > two.p50_s > four.p50_s


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_prompt_tokens": 199}, "takes prompts of at most 199 tokens, and these have 200"),
        ({"max_tokens": 95}, "writes answers of at most 95 tokens, and these have 96 on average"),
    ],
)
def test_texts_beyond_the_deployments_limits_are_refused(limits: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep(with_limits(stood_for("qwen3-32b"), **limits), "h200_sxm", SHORT, (1,), (Mode.AR,))


def test_so_many_are_in_flight_at_all_times() -> None:
    scenario, policy = Scenario(replace(SHORT, num_steps=3, step_spread=0.9)), Policy(Mode.AR, 0, num_requests=4)
    steady = simulate_steady(scenario, policy, num_answers=8).target_batch
    drained = simulate(scenario, policy, num_sets=3).target_batch
    assert steady > 3.9, "the next one comes as soon as one is answered"
    assert drained < 3.5, "over answers as unlike as these, sets run empty"


def test_a_mode_that_learns_is_asked_the_same_questions() -> None:
    texts = replace(SHORT, step_spread=0.9)
    found = [
        simulate_steady(Scenario(texts), Policy(mode, 0, num_requests=2), learns_from=4, num_answers=3)
        for mode in (Mode.AR, Mode.AUTO)
    ]
    lengths = [[usage.completion_tokens for usage in one.usages] for one in found]
    assert lengths[0] == lengths[1] and len(set(lengths[0])) > 1
    assert [len(one.before) for one in found] == [2, 4]
    swept = sweep(stood_for("qwen3-32b"), "h200_sxm", SHORT, (2,), (Mode.LR, Mode.AUTO))
    assert [row.mode for row in swept.rows] == [Mode.LR, Mode.AUTO] * 2


def behind_loops(spec_name: str, num_loops: int) -> GpuDeployment:
    spec = stood_for(spec_name)
    return spec.model_copy(update={"server": spec.server.model_copy(update={"num_loops": num_loops})})


def test_a_slow_step_loop_limits_until_more_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.plan.simulation.CALL_CPU_S_OF_LR", 0.015)
    specs, texts = (behind_loops("qwen3-32b-1gpu", number) for number in (1, 8)), replace(SHORT, num_steps=2)
    slow, fast = (sweep(spec, "h200_sxm", texts, (8,), (Mode.LR,), limits=True).rows[0] for spec in specs)
    assert slow.limited_by == "step loop" and fast.limited_by != "step loop"
    assert slow.p50_s > 1.2 * fast.p50_s


def test_a_second_step_loop_helps_two_requests_and_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.plan.simulation.CALL_CPU_S_OF_LR", 0.2)
    specs, texts = (behind_loops("qwen3-32b-1gpu", number) for number in (1, 2)), replace(SHORT, num_steps=2)
    (alone, crowded), (alone_of_two, shared) = (sweep(spec, "h200_sxm", texts, (1, 2), (Mode.LR,)).rows for spec in specs)
    assert alone_of_two == alone
    assert shared.p50_s < 0.8 * crowded.p50_s


def test_what_the_loop_takes_alone_is_part_of_the_hop() -> None:
    machine = Scenario(SHORT).machine
    slow = {role: replace(place, hops=Hops(there_s=0.002)) for role, place in machine.places.items()}
    behind = with_loop(replace(machine, places=slow), 3, 8, Mode.LR_SD)
    assert behind.loop_s == pytest.approx(CALL_CPU_S / 3)
    assert {place.hops.there_s for place in behind.places.values()} == {0.002 - behind.loop_s}


def test_a_quantile_is_one_of_the_values() -> None:
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank([float(number) for number in range(1, 201)], 0.99) == 198.0
    assert rank([5.0], 0.99) == 5.0


def test_the_command_writes_a_page_and_json_beside_it(tmp_path: Path) -> None:
    texts, page = tmp_path / "short.toml", tmp_path / "page.md"
    texts.write_text(SHORT.as_toml(), encoding="utf-8")
    asked = ["emulate", "--workload", str(texts), "--load", "1", "--mode", "ar", "--price", "2", "-o", str(page)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    document = json.loads(page.with_suffix(".json").read_text())
    assert (document["spec"], document["system"], document["price"]) == ("qwen3-32b", "h200_sxm", 2.0)
    assert document["workload"] == str(texts)
    note = f"{document['label']}; roles that share cards do so by CUDA MPS"
    assert note.endswith("not a run on h200_sxm; roles that share cards do so by CUDA MPS")
    assert note in page.read_text() and note in result.output
    (row,) = document["rows"]
    assert f"| {row['cost']:.4f} |" in page.read_text() and "limited by" not in page.read_text()


def test_a_page_without_a_price_has_no_costs_and_says_limits_where_asked() -> None:
    found = sweep(stood_for("qwen3-32b"), "h200_sxm", SHORT, (1,), (Mode.LR,), limits=True)
    lines = as_markdown(found).splitlines()
    assert "cost" not in lines[0] and lines[0].endswith("| limited by |")
    assert {line.count("|") for line in lines} == {10}
    assert all(row.limited_by in (TARGET_LIMITS, *LIMITS) for row in found.rows)


@pytest.mark.parametrize("wrong", [["--mode", "lossless"], ["-o", "page.txt"], ["--load", "0"]])
def test_what_it_cannot_do_it_refuses(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["emulate", *wrong]).exit_code == 2
