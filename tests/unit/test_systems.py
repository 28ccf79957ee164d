"""Random models of real shapes: steps of one length, scripted acceptance, and what is made of the times."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from lr_client import Client, Options, Result, Usage
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import bench.peers
from bench.__main__ import app
from bench.kit import hardware as hardware_module
from bench.kit.hardware import Hardware
from bench.kit.intervals import Estimate
from bench.kit.measure import Sample
from bench.kit.random_models import SHAPES, chance_of, ending_ids, random_deployment
from bench.kit.serving import demo_spec
from bench.peers import rate_ratio
from bench.systems import ALPHAS, DEPTHS, SIZES, Measured, Setting, figures, measure, settings
from demo.problems import problems
from demo.tokenizer import load_tokenizer
from lr_backend.build.checkpoints import check_checkpoint
from lr_backend.build.repository import build_repository
from lr_backend.embedded.checkpoint import tensor_shapes
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.random_checkpoint import write_random_config
from lr_backend.engine import Role, Sampling
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest
from lr_backend.errors import CheckpointError
from lr_backend.policy.formulas import ceiling
from lr_backend.triton.models import load_tokenizer as load_any_tokenizer

TINY = dict.fromkeys(Role, "tiny")
FREE = Hardware(cost_ratio=0.25, target_token_s={1: 0.01, 2: 0.01}, beside_draft=1.0)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("systems")
    random_deployment(folder, TINY)
    return folder


def test_settings_are_ar_and_every_acceptance_at_every_depth() -> None:
    chosen = settings([0.5, 0.8], [2, 4])
    assert chosen == [Setting(None), Setting(0.5, 2), Setting(0.5, 4), Setting(0.8, 2), Setting(0.8, 4)]
    assert chosen[0].options(10, seed=1).mode == "ar"
    options = chosen[1].options(10, seed=1)
    assert (options.verifier, options.max_depth, options.mode) == ("chance_500", 2, "lr")


def test_settings_that_follow_one_another_ask_different_questions() -> None:
    class Scripted:
        def __init__(self) -> None:
            self.asked: list[tuple[str, Options]] = []

        def ask(self, question: str, options: Options, *, timeout_s: float) -> Result:
            self.asked.append((question, options))
            ahead = {"num_steps_accepted": 3, "num_steps_rejected": {"plug_in": 1}} if options.mode == "lr" else {}
            usage = Usage(completion_tokens=int(question.removeprefix("question ")) * 10 or 1, num_steps=5, **ahead)
            return Result(text="", reasoning="", answer="", finish_reason="stop", usage=usage)

    client, chosen = Scripted(), settings(ALPHAS, DEPTHS)
    questions = [f"question {number}" for number in range(5)]

    found = measure(cast(Client, client), chosen, questions, 10, Console(quiet=True))

    warm_up, asked = client.asked[: len(chosen)], client.asked[len(chosen) :]
    assert {question for question, _ in warm_up} == {"question 0"}
    assert len(asked) == len({(question, options.verifier, options.max_depth) for question, options in asked}) == 4 * len(chosen)
    rounds = [asked[start : start + len(chosen)] for start in range(0, len(asked), len(chosen))]
    assert all(one != other for each in rounds for (one, _), (other, _) in pairwise(each))
    assert len({options.seed for _, options in client.asked}) == len(client.asked)
    assert {setting: len(one.seconds_a_token) for setting, one in found.items()} == dict.fromkeys(chosen, 4)
    assert (found[chosen[1]].num_accepted, found[chosen[1]].num_decided) == (12, 16)
    assert found[chosen[1]].step_tokens == 100 / 20


def test_speedups_stand_beside_what_the_formulas_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_module, "SIMULATED_STEPS", 60)
    monkeypatch.setattr(hardware_module, "SIMULATED_SEEDS", 2)
    alone, half = settings([0.5], [4])
    measured = {alone: Measured((0.02, 0.02), 0, 0, 24.0), half: Measured((0.01, 0.01), 12, 20, 24.0)}

    (found,) = figures(measured, FREE)

    assert (found.alpha, found.max_depth, found.measured_alpha) == (0.5, 4, 0.6)
    assert (found.low, found.speedup, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.ceiling == pytest.approx(ceiling(0.6, 0.25, 4))
    assert found.realised_share == pytest.approx(2.0 / found.ceiling)
    assert found.hardware_ceiling == pytest.approx(found.ceiling, rel=0.25)  # nothing is shared here, so the two are near
    assert json.loads(json.dumps(found.as_dict()))["realised_share"] == pytest.approx(found.realised_share, abs=1e-4)


def test_no_token_that_could_end_a_step_is_drawn(deployment: Path) -> None:
    tokenizer = load_tokenizer(deployment / "target")
    silent = ending_ids(tokenizer)
    assert {tokenizer.eos_token_id, *tokenizer.encode(".\n\n", add_special_tokens=False)} & silent
    head = load_file(deployment / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert not head[sorted(silent)].any() and head[[token for token in range(len(head)) if token not in silent]].any(dim=1).all()

    engine = EmbeddedEngine(EngineConfig(deployment / "target", max_tokens_in_paged_kv_cache=4096))
    try:
        prompt = tuple(tokenizer.encode("Why are there 3 apples?\n\n", add_special_tokens=False))
        requests = [EngineRequest("", prompt, 200, Sampling(0.6, 20, 1.0), seed=seed) for seed in range(4)]
        written = [token for answer in run_all(engine, requests) for token in answer.token_ids]
    finally:
        engine.close()
    assert len(written) == 800
    assert not silent & set(written)
    assert len(set(written)) > 20


def test_the_deployment_can_be_built_and_its_judge_is_asked(tmp_path: Path, deployment: Path) -> None:
    spec = random_deployment(tmp_path / "models", TINY, alphas=(0.5,))
    report = build_repository(spec, tmp_path / "repository")
    assert report.written
    config = json.loads((tmp_path / "repository" / "lookahead" / "1" / "lookahead.json").read_text())
    chance = {"factory": "bench.plug_ins.verifiers:Chance", "probability": 0.5, "asks_judge": True}
    assert config["verifiers"] == {chance_of(0.5): chance}
    assert config["limits"]["max_step_tokens"] == 24
    tokenizer = load_any_tokenizer(tmp_path / "models" / "target")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<think>")


def test_a_deployment_without_a_judge_decides_by_chance_alone(tmp_path: Path) -> None:
    shapes = {role: "tiny" for role in (Role.TARGET, Role.DRAFT)}
    spec = random_deployment(tmp_path, shapes, alphas=(0.25, 0.5))
    verifiers = spec.lookahead["verifiers"]
    assert [(one["probability"], one["asks_judge"]) for one in verifiers.values()] == [(0.25, False), (0.5, False)]


def test_real_shapes_have_the_sizes_that_they_are_named_for(tmp_path: Path) -> None:
    millions = {}
    for name, shape in SHAPES.items():
        folder = write_random_config(tmp_path / name, **shape)
        spec = read(folder)
        millions[name] = sum(int(np.prod(size)) for size in tensor_shapes(spec).values()) / 1e6
    wanted = {"3m": 3, "10m": 10, "35m": 33, "100m": 95, "300m": 300, "qwen3-1.7b": 1720, "qwen3-8b": 8190, "qwen3-32b": 32762}
    for name, size in (wanted | {"qwen2.5-7b": 7616}).items():
        assert millions[name] == pytest.approx(size, rel=0.12 if size < 400 else 0.002), name
    assert {name for sizes in SIZES.values() for name in sizes} <= SHAPES.keys()


def read(folder: Path):  # type: ignore[no-untyped-def]
    from lr_backend.embedded.checkpoint import read_spec

    return read_spec(folder)


def test_an_engine_may_draw_its_weights(tmp_path: Path) -> None:
    folder = write_random_config(tmp_path / "model", **SHAPES["tiny"], vocab_size=61)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((demo_spec().checkpoint_dir(Role.TARGET) / name).read_bytes())
    engine = EmbeddedEngine(EngineConfig(folder, random_weights=True, max_tokens_in_paged_kv_cache=4096))
    try:
        (answer,) = run_all(engine, [EngineRequest("", (1, 2, 3), 8)])
    finally:
        engine.close()
    assert len(answer.token_ids) == 8
    with pytest.raises(CheckpointError, match="has neither"):
        check_checkpoint(folder)
    with pytest.raises(CheckpointError, match="beyond the model's vocabulary"):
        check_checkpoint(folder, weights_needed=False)  # the rest is looked at all the same


def test_the_command_refuses_what_it_does_not_know() -> None:
    for arguments, message in ((["--target", "9b"], "'9b' is not one of"), (["--device", "tpu"], "cpu or cuda")):
        result = CliRunner().invoke(app, ["systems", *arguments])
        assert result.exit_code == 2
        assert message in result.output


def test_ratios_of_tokens_a_second_are_paired_by_problem() -> None:
    def sample(mode: str, problem: int, seconds: float, tokens: int) -> Sample:
        return Sample(mode, problem, True, seconds, Usage(completion_tokens=tokens))

    samples = [sample("ar", n, 1.0 + n, 100 + 100 * n) for n in range(4)]
    samples += [sample("peer", n, 0.5 + 0.5 * n, 200 + 200 * n) for n in reversed(range(4))]

    def bounds(one: Estimate) -> tuple[float, float, float]:
        return one.low, one.value, one.high

    assert bounds(rate_ratio(samples, "peer")) == pytest.approx((4.0, 4.0, 4.0))
    assert bounds(rate_ratio(samples, "ar")) == pytest.approx((1.0, 1.0, 1.0))


def test_transformers_greedy_answer_is_the_same_with_an_assistant_and_with_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.peers, "MAX_TOKENS", 40)
    spec = demo_spec()
    tokenizer = load_any_tokenizer(spec.checkpoint_dir(Role.TARGET))
    peer = bench.peers.TransformersPeer(spec, tokenizer, temperature=0.0)
    problem = next(problems(1, "test"))

    plain = peer.ask(problem, 0)

    assert plain.num_tokens == 40 and "think" in plain.text
    assert peer.ask(problem, 1, assistant_model=peer.draft) == plain
    assert peer.ask(problem, 2, prompt_lookup_num_tokens=8) == plain
