"""The benchmarks run and say what they measured; what they make of figures is exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import bench.engine
import bench.gpu
import bench.layout
import bench.overhead
import bench.profile
import bench.verifiers
from bench.overhead import LARGE, Overhead, random_models
from bench.profile import Stopwatch
from bench.timing import Spread, in_turns, ratio
from bench.verifiers import Case, VerifierFigures
from demo.asking import demo_spec
from demo.tokenizer import load_tokenizer
from lr_backend.build.checkpoints import check_checkpoint
from lr_backend.engine import Role
from lr_backend.steps.step import Step, StepEnd
from lr_backend.verify import Reason, StepPair, Verdict
from tests.support.embedded_engines import tiny_checkpoint


def run(main: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(main)  # type: ignore[type-var]
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1280, tie_word_embeddings=True)


def test_the_engine_benchmark_ends_with_its_figures(checkpoint: Path) -> None:
    output = run(bench.engine.main, str(checkpoint), "--rounds", "1", "--prefix", "20", "--no-served")

    figures = json.loads(output.strip().splitlines()[-1])
    assert {"decode_vs_transformers", "batch8_scaling", "verify8_cost", "prefix_reused_share", "device"} <= figures.keys()
    assert figures["prefix_reused_share"] >= 0.95
    assert all(figures[name] > 0 for name in figures["ranges"])


def test_the_gpu_benchmark_ends_with_its_figures() -> None:
    output = run(bench.gpu.main, "--shape", "tiny", "--device", "cpu", "--prefix", "20", "--rounds", "1", "--batch", "4")

    figures = json.loads(output.strip().splitlines()[-1])
    assert figures["tokens_per_s"].keys() == {"eager"}  # there are no graphs on a CPU
    assert set(figures["tokens_per_s"]["eager"]) == {"1", "4"}
    assert all(value > 0 for values in figures["tokens_per_s"]["eager"].values() for value in values)
    assert figures["roof_tokens_per_s"] > 0 and figures["device"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_says_that_there_is_none() -> None:
    app = typer.Typer()
    app.command()(bench.gpu.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert "needs a CUDA device" in result.output


def test_a_token_reads_all_weights_but_the_embedding() -> None:
    spec = bench.gpu.SHAPES["qwen3-8b"]
    weights = bench.gpu.bytes_read_a_token(spec, torch.bfloat16, 0)
    assert weights / 2 == pytest.approx(8.19e9 - 151936 * 4096, rel=1e-3)
    assert bench.gpu.bytes_read_a_token(spec, torch.bfloat16, 10) == weights + 10 * 36 * 2 * 8 * 128 * 2


def test_the_profile_adds_up_the_parts_of_an_iteration(checkpoint: Path) -> None:
    output = run(bench.profile.main, str(checkpoint), "--prefix", "20", "--batch", "2", "--weight-dtype", "same")

    columns = json.loads(output.strip().splitlines()[-1])["us_an_iteration"]
    assert set(columns) == {f"2, {name}" for name in bench.profile.SAMPLINGS}
    for parts in columns.values():
        assert {"in C: decoder, draws", "matrix products"} & set(parts)
        assert set(parts) <= {name for name, _, _ in bench.profile.PARTS}
        assert all(microseconds > 0 for microseconds in parts.values())


def test_a_stopwatch_counts_exclusive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(bench.profile.time, "perf_counter", lambda: now)
    watch = Stopwatch()
    inner = watch.wrap("inner", lambda: spend(3.0))

    def outer() -> None:
        spend(1.0)
        inner()
        spend(0.5)
        inner()

    watch.wrap("outer", outer)()
    assert watch.seconds == {"outer": 1.5, "inner": 6.0}


def test_overhead_is_what_neither_target_nor_judge_accounts_for() -> None:
    large = Overhead(wall_s=10.0, target_s=8.0, judge_s=1.5, num_tokens=100, num_steps=5, num_calls=10)
    busy = Overhead(wall_s=1.0, target_s=0.9, judge_s=0.2, num_tokens=100, num_steps=5, num_calls=10)

    assert (large.seconds, large.share, large.ms_a_call) == pytest.approx((0.5, 0.05, 50.0))
    assert busy.share == 0.0
    line = bench.overhead.summary({"100 M random": large, "demo": busy})
    assert (line["overhead_share"], line["demo_calls_a_step"]) == (0.05, 2.0)


def test_random_models_are_checkpoints_that_can_be_served(tmp_path: Path) -> None:
    small = {"hidden_size": 256, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 768}
    spec = random_models(demo_spec(), tmp_path, {Role.TARGET: {**LARGE, "num_layers": 1}, Role.DRAFT: small})

    spec.loop_config()
    assert check_checkpoint(spec.checkpoint_dir(Role.TARGET)).vocab_size > 0
    assert check_checkpoint(spec.checkpoint_dir(Role.DRAFT)).vocab_size > 0
    assert spec.checkpoint_dir(Role.JUDGE) == demo_spec().checkpoint_dir(Role.JUDGE)
    tokenizer = load_tokenizer(spec.checkpoint_dir(Role.TARGET))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<think>")


def test_turns_rotate_and_the_first_round_is_not_kept() -> None:
    calls: list[str] = []

    def action(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = in_turns({name: (lambda name=name: action(name)) for name in "abc"}, 3)  # type: ignore[misc]

    assert calls == [*"abc", *"abc", *"bca", *"cab"]
    assert figures == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 6.0, 9.0], [1.0, 2.0, 4.5], 2.0) == Spread(median=4.0, low=4.0, high=6.0)
    assert Spread(1.0, 0.5, 2.0).text(1) == "1.0 (0.5 to 2.0)"


def test_layouts_take_turns_and_their_first_answers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = 0.0, []

    def answer(name: str, seconds: float) -> int:
        nonlocal now
        now += seconds
        order.append(name)
        return 10

    monkeypatch.setattr(bench.layout.time, "perf_counter", lambda: now)
    figures = bench.layout.measure(
        {"a": lambda question, seed: answer("a", 1.0 + seed), "b": lambda question, seed: answer("b", 2.0)}, 2
    )

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": pytest.approx([200.0, 300.0]), "b": pytest.approx([200.0, 200.0])}


def test_a_verifiers_figures_count_what_it_accepts_and_what_it_should_not_have() -> None:
    step = Step((1,), StepEnd.DELIMITER)
    pair = StepPair(step, step, "", "", "id", np.asarray([1], dtype=np.int32))
    cases = [Case(pair, same, problem) for problem, same in enumerate((True, True, False, False))]
    verdicts = [Verdict(accepted, Reason.JUDGE, verifier="judge") for accepted in (True, False, True, False)]

    figures = VerifierFigures.of(cases, verdicts, [0.001, 0.002, 0.004, 0.002])

    assert (figures.accepted.value, figures.agreed.value, figures.wrong.value) == (0.5, 0.5, 0.5)
    assert figures.wrong.total == 2
    assert figures.ms_a_verdict == pytest.approx(2.0)
    assert figures.by == {"judge": 4}


def test_the_comparison_of_verifiers_runs_on_the_demo_models() -> None:
    output = run(bench.verifiers.main, "--problems", "1", "--pairs", "4", "--threads", "1")

    figures = json.loads(output.strip().splitlines()[-1])
    assert set(figures) == {"drafted", "changed", "second domain"}
    rows = figures["changed"]
    assert {"random 0.5", "exact", "numeric veto alone", "judge", "score 9", "cascade"} <= rows.keys()
    assert all(row["num_pairs"] == 4 for row in rows.values())
    assert rows["exact"]["accept_rate"] == 0.0
    assert rows["exact"]["false_accept_rate"] is None
