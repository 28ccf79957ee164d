"""The paper's table: what is held as published, what vLLM is taken to cost, and that the fit and the last line hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import paper
from bench.paper import (
    RERUN_SETTING,
    TABLE,
    VLLM_CALL_MS,
    VLLM_HTTP_MS,
    VLLM_LOOKUP_MS,
    VLLM_LOOP_MS,
    VLLM_PROFILES,
    Emulation,
    Gain,
    Published,
    Row,
    machine_of,
    overheads_of,
    summary,
)
from lr_backend.build.spec import PACKAGE_ROOT
from lr_backend.emulated.workload import published
from lr_backend.engine import Role
from lr_backend.hardware.cost import Iteration, Join, ProfileCosts
from lr_backend.hardware.overheads import Bound
from lr_backend.hardware.profile import ProfileKey, available, find
from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.request import Mode

TARGET = find(ProfileKey("h100_sxm", "Qwen3-32B", 2, "bfloat16"), VLLM_PROFILES)
SMALL = Emulation(num_texts=2, num_steps=12)
DECODE = Iteration((), 1, 1000)


def test_every_cell_of_the_table_is_there_and_in_the_ranges_that_the_paper_names() -> None:
    assert len(TABLE) == 14 and set(TABLE) == set(published())
    for values, low, high in (
        ([was.lr for was in TABLE.values()], 1.04, 1.71),
        ([was.sd for was in TABLE.values() if was.sd is not None], 1.25, 1.53),
        ([was.lr_sd for was in TABLE.values()], 1.32, 2.11),
    ):
        assert (len(values), min(values), max(values)) == (14, low, high)
    assert {paper.pair_of(cell) for cell in TABLE} == set(paper.MODELS)


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm"])
@pytest.mark.parametrize("pair", list(paper.MODELS))
@pytest.mark.parametrize("role", list(Role))
def test_every_role_has_a_profile_of_vllms_kernels(system: str, pair: str, role: Role) -> None:
    profile = paper.profile_of(system, pair, role)
    assert profile.source["database"] == "vLLM 0.24.0" and "vLLM 0.8.3" in profile.source["deployed"]
    assert "vLLM 0.24.0; not a run on" in profile.label
    costs = ProfileCosts(profile, overheads_of(profile))
    for check in profile.checks:
        if "num_decodes" in check:
            iteration = Iteration((), int(check["num_decodes"]), int(check["num_decodes"] * check["kv_tokens"]))
        else:
            iteration = Iteration((Join(int(check["num_new"]), int(check["num_cached"])),) * int(check["num_joins"]))
        off = costs.kernels_ms(iteration) / check["ms"] - 1.0
        assert -0.06 < off < (0.12 if check.get("num_joins", 1) > 1 else 0.07), check


def test_make_profiles_asks_for_these_too() -> None:
    spec = importlib.util.spec_from_file_location("hardware_profiles", PACKAGE_ROOT / "tools" / "hardware_profiles.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hardware_profiles", tool)
        spec.loader.exec_module(tool)
        wanted = [entry for entry in tool.wanted() if entry["framework"] == "vllm"]
    keys = {ProfileKey.of(one["system"], one["model"], one["tp_size"], one["dtype"]) for one in wanted}
    assert len(wanted) == len(keys) and keys == set(available(VLLM_PROFILES))


def test_these_profiles_are_not_offered_to_whoever_serves() -> None:
    assert all(find(key).source["database"].startswith("TensorRT-LLM") for key in available())
    assert len(list(available(VLLM_PROFILES))) == 10


def test_what_vllm_adds_to_its_kernels() -> None:
    plain, looking_up = (overheads_of(TARGET, looks_up=looks_up) for looks_up in (False, True))
    kernels_ms = ProfileCosts(TARGET, plain).kernels_ms(DECODE)
    assert plain.iteration_ms(kernels_ms, 0, 1, 0) == pytest.approx(kernels_ms + VLLM_LOOP_MS.value)
    assert looking_up.loop_ms - plain.loop_ms == pytest.approx(VLLM_LOOKUP_MS.value)
    # Graphs serve iterations with joins too: no launches one by one, as the LLM API has them there.
    assert plain.iteration_ms(5.0, 1, 1, 0) < replace(plain, replays_joins=False).iteration_ms(5.0, 1, 1, 0)
    assert plain.hop_ms == VLLM_CALL_MS.value / 2.0
    assert overheads_of(TARGET, http=True).hop_ms == (VLLM_CALL_MS.value + VLLM_HTTP_MS.value) / 2.0


def test_the_ends_of_its_constants_hold_the_middle() -> None:
    found = [overheads_of(TARGET, looks_up=True, http=True, bound=bound) for bound in (Bound.LOW, Bound.VALUE, Bound.HIGH)]
    for values in ([one.loop_ms for one in found], [one.hop_ms for one in found]):
        assert values == sorted(set(values))


def _gain_by_lookups(rate: float, num_draft_tokens: int) -> float:
    workload = replace(published()["qwen3-aime24"], num_steps=20, ngram_hit_rate=rate)
    scenario = Scenario(workload, machine_of("h100_sxm", "qwen3", num_draft_tokens))
    alone, taken = (simulate(one, Policy(Mode.AR)).latency_s for one in (replace(scenario, machine=PLAIN), scenario))
    return alone / taken


PLAIN = machine_of("h100_sxm", "qwen3")


def test_ngrams_cost_where_nothing_repeats_and_pay_where_much_does() -> None:
    assert _gain_by_lookups(0.0, 8) < 1.0 < _gain_by_lookups(0.3, 8) < _gain_by_lookups(0.6, 8)
    assert _gain_by_lookups(0.6, 2) < _gain_by_lookups(0.6, 8)


def test_only_target_and_draft_look_up() -> None:
    places = machine_of("h100_sxm", "r1", 8).places
    assert {role for role, place in places.items() if place.looks_up and place.num_draft_tokens == 8} == {Role.TARGET, Role.DRAFT}
    assert places[Role.JUDGE].hops.there_s > places[Role.DRAFT].hops.there_s == places[Role.TARGET].hops.there_s


def test_the_fitted_rate_brings_token_speculation_to_what_was_published() -> None:
    cell = "qwen3-humaneval"
    rate = SMALL.fitted_rate(cell)
    assert 0.0 < rate < 0.8
    workload = replace(published()[cell], num_steps=SMALL.num_steps or 0, ngram_hit_rate=rate)
    seconds = [
        simulate(Scenario(workload, machine_of("h100_sxm", "qwen3", drafts)), Policy(Mode.AR), num_sets=2).latency_s
        for drafts in (0, 8)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(TABLE[cell].sd, rel=0.03)


@pytest.mark.parametrize("cell", list(TABLE))
def test_every_cell_has_a_fitted_rate(cell: str) -> None:
    assert 0.05 < published()[cell].ngram_hit_rate < 0.75


def test_the_rates_still_bring_what_they_were_fitted_to() -> None:
    """If this fails, scripted texts or costs have changed: ``python -m bench paper --fit``, and the table anew."""
    cell = "qwen3-livecodebench"
    alone, taken = (
        sum(
            simulate(Scenario(published()[cell], machine_of("h100_sxm", "qwen3", drafts)), paper.ALONE, seed).latency_s
            for seed in range(3)
        )
        for drafts in (0, 8)
    )
    assert alone / taken == pytest.approx(TABLE[cell].sd, rel=0.05)


def test_the_page_has_the_figures_of_the_committed_run() -> None:
    folder = PACKAGE_ROOT / "docs" / "benchmarks"
    page, document = (
        (folder / "paper.md").read_text(encoding="utf-8"),
        json.loads((folder / "paper.json").read_text(encoding="utf-8")),
    )
    assert {row["cell"] for row in document["rows"]} == set(TABLE)
    for row in [*document["rows"], document["rerun"]]:
        was = row["published"]
        assert was["sd"] is None or row["sd"]["mean"] == pytest.approx(was["sd"], rel=0.05)  # fitted over more answers
        lr = [was["lr"], row["papers"]["mean"], row["ratio_lr"], row["own"]["mean"], row["own_gain_lr"]]
        both = [was["lr_sd"], row["papers_sd"]["mean"], row["ratio_lr_sd"], row["own_sd"]["mean"], row["own_gain_lr_sd"]]
        lr += [row["ours"]["mean"], row["gain_lr"]]
        both += [row["ours_sd"]["mean"], row["gain_lr_sd"]]
        figures = " | ".join(f"{value:.2f}" for value in (row["alpha"], *lr, row["sd"]["mean"], *both))
        assert f"| {row['cell']} | {figures} |" in page


def test_a_mean_of_texts_has_an_error() -> None:
    gain = Gain((10.0, 20.0), (5.0, 10.0))
    assert (gain.mean, gain.error, gain.by_text) == (2.0, 0.0, [2.0, 2.0])
    assert Gain((10.0, 10.0, 10.0), (5.0, 4.0, 6.0)).error == pytest.approx(0.235, abs=0.01)
    assert gain.as_dict() == {"mean": 2.0, "error": 0.0, "low": 2.0, "high": 2.0}


def _row(was: Published, papers: float, ours: float) -> Row:
    one, own, two = (Gain((gain,), (1.0,)) for gain in (papers, (papers + ours) / 2.0, ours))
    return Row("r1-gpqa", was, 0.35, 0.35, sd=one, papers=one, own=own, ours=two, papers_sd=one, own_sd=own, ours_sd=two)


def test_the_last_line_has_medians_and_counts_what_is_ahead() -> None:
    rows = [_row(Published(1.0, 1.0, 4.0), 2.0, 3.0), _row(Published(2.0, 1.0, 2.0), 2.0, 3.0)]
    said = summary(rows, rows[0])
    assert said == {
        "cells": 2,
        "median_ratio_lr": 1.5,
        "median_ratio_lr_sd": 0.75,
        "median_own_gain_lr": 1.25,
        "median_own_gain_lr_sd": 1.25,
        "median_gain_lr": 1.5,
        "median_gain_lr_sd": 1.5,
        "ahead_lr": 2,
        "ahead_lr_sd": 1,
        "rerun_lr": 2.0,
        "rerun_lr_sd": 2.0,
    }


def test_the_second_run_is_of_another_machine_and_setting() -> None:
    assert (RERUN_SETTING.system, RERUN_SETTING.num_draft_tokens, RERUN_SETTING.papers.max_depth) == ("h200_sxm", 6, 4)
    assert (paper.PAPERS.max_depth, paper.PAPERS.width, paper.Setting().num_draft_tokens) == (6, 1, 8)


def test_one_cell_is_printed_with_the_line_of_figures_last(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(paper.main)
    output = tmp_path / "paper.json"
    options = ["--cell", "r1-gsm8k", "--texts", "2", "--steps", "8", "--workers", "1", "--output", str(output)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    said = json.loads(result.output.splitlines()[-1])
    document = json.loads(output.read_text(encoding="utf-8"))
    assert said == document["summary"] and said["cells"] == 1
    (row,) = document["rows"]
    assert row["cell"] == "r1-gsm8k" and row["published"] == {"lr": 1.71, "sd": 1.39, "lr_sd": 2.11}
    assert row["papers"]["low"] <= row["papers"]["mean"] <= row["papers"]["high"]
    assert "aiconfigurator-core" in document["label"] and "vLLM" in document["label"]
    assert CliRunner().invoke(app, options).output.splitlines()[-1] == result.output.splitlines()[-1], "nothing is left to chance"
