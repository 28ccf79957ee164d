"""Building engines with upstream's tools faked: what is run, what is kept, where a failed build goes on, what is refused."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lr_backend.build import gpu_build, render
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.manifest import Platform, mismatches, probe_platform
from lr_backend.build.report import BuildReport
from lr_backend.build.repository import build_repository
from lr_backend.build.runner import run_steps
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.build.trtllm_commands import Command, EngineDirs, Step
from lr_backend.cli import build as cli_build
from lr_backend.cli.app import app
from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.engine.checkpoint import WEIGHT_INDEX
from lr_backend.errors import BuildError, CheckpointError, ConfigError
from lr_backend.nvidia import Gpu
from lr_backend.serve.startup_check import Level, check_files
from tests.support.fake_trtllm import FakeTools, hopper, make_tools, write_gpu_spec
from tests.support.waiting import until

EVERY_STEP = [(role, tool) for role in ("target", "draft", "judge") for tool in ("convert", "build")]


@pytest.fixture
def tools(tmp_path: Path) -> FakeTools:
    return make_tools(tmp_path / "tools")


@pytest.fixture
def spec(tmp_path: Path) -> GpuDeployment:
    return load(write_gpu_spec(tmp_path / "project"))


def load(path: Path) -> GpuDeployment:
    spec = DeploymentSpec.load(path)
    assert isinstance(spec, GpuDeployment)
    return spec


def edited(spec: GpuDeployment, old: str, new: str) -> GpuDeployment:
    text = spec.path.read_text()
    assert old in text
    spec.path.write_text(text.replace(old, new, 1))
    return load(spec.path)


def build(spec: GpuDeployment, tools: FakeTools, platform: Platform | None = None, **options: Any) -> BuildReport:
    console = options.pop("console", Console(file=io.StringIO()))
    here = platform or hopper()
    return build_gpu_deployment(spec, tools=tools.chain, platform=lambda: here, console=console, **options)


def ran(tools: FakeTools) -> list[tuple[str, str]]:
    """(role, tool) of every call, read from the folder that it wrote to."""
    return [(Path(flags["output_dir"]).parent.name, tool) for tool, flags, _, _ in tools.calls()]


def manifest_of(report: BuildReport) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((report.output / "manifest.json").read_text())
    return content


def test_engines_are_built_role_by_role_and_the_repository_names_them(spec: GpuDeployment, tools: FakeTools) -> None:
    said = io.StringIO()
    report = build(spec, tools, command="as typed", console=Console(file=said, width=200))
    assert ran(tools) == EVERY_STEP
    assert report.written and report.output == spec.built_dir
    assert sorted(path.name for path in spec.built_dir.parent.iterdir()) == ["small", "small.engines"]
    assert {path.name for path in report.output.iterdir()} == {"target", "draft", "judge", "lookahead", "manifest.json"}
    engine = spec.built_dir.with_name("small.engines") / "target" / "engine"
    assert sorted(path.name for path in engine.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]
    assert str(engine) in (report.output / "target" / "config.pbtxt").read_text()
    assert "done target: convert" in said.getvalue() and "done judge: compile" in said.getvalue()
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    assert (config.vocab_size, config.draft_logits) == (262, "one_hot"), "261 tokens, filled up for two ranks"


@pytest.mark.parametrize("way", [{"dry_run": True}, {}, {"compile_engines": False, "only_if_stale": True}], ids=str)
@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('[lookahead.audit]\nauditor = "checker"\nchecker = "nowhere:same"', "lookahead.audit.checker: 'nowhere:same'"),
        ('[lookahead.verifiers.own]\nfactory = "nowhere:Same"', "lookahead.verifiers.own: 'nowhere:Same'"),
    ],
)
def test_code_of_the_deployments_own_that_cannot_be_imported_is_refused_before_anything_is_compiled(
    spec: GpuDeployment, tools: FakeTools, section: str, said: str, way: dict[str, bool]
) -> None:
    """By the plan, the build, and a server that renders for itself; one role's build needs none of it."""
    if not way.get("compile_engines", True):
        build(spec, tools)
    before = ran(tools)
    spec.path.write_text(f"{spec.path.read_text()}\n{section}\n")
    with pytest.raises(ConfigError, match=f"{said} cannot be imported: ModuleNotFoundError"):
        build(load(spec.path), tools, **way)
    assert ran(tools) == before
    assert build(load(spec.path), tools, role=Role.JUDGE, dry_run=True).steps


def test_the_plan_says_that_the_checker_is_there(spec: GpuDeployment, tools: FakeTools) -> None:
    spec.path.write_text(
        f'{spec.path.read_text()}\n[lookahead.audit]\nauditor = "checker"\nchecker = "demo.problems:same_step"\n'
    )
    assert build(load(spec.path), tools, dry_run=True).checked[-1] == "auditor: demo.problems:same_step"


def test_commands_run_on_the_roles_gpus_and_away_from_any_checkout(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    engines = spec.built_dir.with_name("small.engines")
    seen = {Path(flags["output_dir"]).parent.name: (visible, folder) for _, flags, visible, folder in tools.calls()}
    assert seen == {
        "target": ("0,1", str(engines / "target")),
        "draft": ("1", str(engines / "draft")),
        "judge": ("1", str(engines / "judge")),
    }


def test_the_manifest_says_what_everything_came_from(spec: GpuDeployment, tools: FakeTools) -> None:
    manifest = manifest_of(build(spec, tools, command="as typed"))
    assert (manifest["spec"], manifest["command"], manifest["dry_run"]) == ("small", "as typed", False)
    target = manifest["engines"]["target"]
    assert target["built_with"]["tensorrt_llm"] == "1.2.1"
    assert target["built_with"]["gpus"][0]["compute_capability"] == "9.0"
    assert len(target["checkpoint"]["files"]["model.safetensors"]["sha256"]) == 64
    assert [step["name"] for step in target["steps"]] == ["convert", "compile"]
    assert "--speculative_decoding_mode draft_tokens_external --max_draft_len 8" in target["steps"][1]["command"]
    assert all(step["duration_s"] >= 0 for step in target["steps"])
    assert mismatches(manifest, hopper(), {}) == ()


def test_a_failed_step_names_its_log_and_a_resumed_build_goes_on_there(spec: GpuDeployment, tools: FakeTools) -> None:
    tools.fail("build", status=7)
    with pytest.raises(BuildError, match=r"target: compile ended with status 7 (?s:.*)CUDA out of memory") as caught:
        build(spec, tools)
    log = spec.built_dir.with_name("small.engines") / "target" / "logs" / "compile.log"
    assert str(log) in caught.value.message and "--resume goes on here" in caught.value.message
    assert log.read_text().startswith("CUDA_VISIBLE_DEVICES=0,1 ")
    assert not spec.built_dir.exists(), "no repository over engines that are not there"

    tools.mend("build")
    build(spec, tools, resume=True)
    assert ran(tools) == [("target", "convert"), ("target", "build"), ("target", "build"), *EVERY_STEP[2:]]
    build(spec, tools, resume=True)
    assert len(tools.calls()) == 7, "nothing was left to do"
    build(spec, tools)
    assert len(tools.calls()) == 13, "without --resume all is done anew"


def test_a_changed_command_runs_again_with_all_that_follows(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    before = len(tools.calls())
    changed = edited(spec, "max_batch_size = 4", "max_batch_size = 3")
    build(changed, tools, resume=True)
    assert ran(tools)[before:] == [("target", "build")], "the conversion does not depend on the batch"
    changed = edited(changed, "[target]\n", '[target]\ndtype = "float16"\n')
    build(changed, tools, resume=True)
    assert ran(tools)[before + 1 :] == [("target", "convert"), ("target", "build")]


def test_changed_weights_run_everything_of_their_role_again(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    before = len(tools.calls())
    path = spec.checkpoint_dir(Role.DRAFT) / "generation_config.json"
    path.write_text(path.read_text() + " ")
    build(spec, tools, resume=True)
    assert ran(tools)[before:] == [("draft", "convert"), ("draft", "build")]


def test_another_tensorrt_makes_everything_again(spec: GpuDeployment, tools: FakeTools) -> None:
    """The TensorRT-LLM pin fixes it, but an image may be rebuilt around it; an old engine would be recorded as the new one's."""
    build(spec, tools)
    other = replace(hopper(), tensorrt="10.99")

    report = build(spec, tools, other, resume=True)

    assert ran(tools) == EVERY_STEP * 2
    assert {entry["built_with"]["tensorrt"] for entry in manifest_of(report)["engines"].values()} == {"10.99"}


def test_a_lost_product_is_made_again(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    before = len(tools.calls())
    engines = spec.built_dir.with_name("small.engines")
    (engines / "judge" / "checkpoint" / "rank0.safetensors").unlink()
    (engines / "target" / "state.json").write_text("{damaged")
    build(spec, tools, resume=True)
    assert ran(tools)[before:] == [("target", "convert"), ("target", "build"), ("judge", "convert"), ("judge", "build")]


def test_a_command_that_leaves_out_a_file_has_failed(spec: GpuDeployment, tools: FakeTools) -> None:
    tools.tell("short-build")
    with pytest.raises(BuildError, match=r"target: compile wrote no rank1\.engine"):
        build(spec, tools)


def test_an_engine_that_is_not_what_was_asked_for_is_refused(spec: GpuDeployment, tools: FakeTools) -> None:
    tools.tell("other-blocks")
    with pytest.raises(BuildError, match=r"not what was asked for: build_config\.plugin_config\.tokens_per_block is 64, not 32"):
        build(spec, tools)


def test_a_tool_that_is_not_there_is_named(spec: GpuDeployment, tools: FakeTools) -> None:
    Path(tools.chain.trtllm_build).unlink()
    with pytest.raises(BuildError, match=r"target: compile cannot be started: .*trtllm-build: No such file"):
        build(spec, tools)


def quantised(spec: GpuDeployment, texts: str = "texts/ours") -> GpuDeployment:
    lines = f'quantization = "fp8"\nkv_cache_dtype = "fp8"\ncalib_dataset = "{texts}"\ncalib_size = 16\n'
    return edited(spec, "[judge]\n", f"[judge]\n{lines}")


def test_fp8_goes_through_calibration_with_texts_of_a_folder(spec: GpuDeployment, tools: FakeTools) -> None:
    changed = quantised(spec)
    texts = changed.root / "texts" / "ours"
    texts.mkdir(parents=True)
    (texts / "train.jsonl").write_text('{"text": "one"}\n')
    report = build(changed, tools, role=Role.JUDGE)
    assert [tool for tool, *_ in tools.calls()] == ["quantize", "build"]
    flags = tools.calls()[0][1]
    assert (flags["qformat"], flags["calib_size"], flags["calib_dataset"]) == ("fp8", "16", str(texts))
    assert "HF_HUB_OFFLINE=1" in report.steps[0].command.shell() and "HF_HOME=" not in report.steps[1].command.shell()
    assert f"judge: calibration texts in {texts}" in report.checked

    build(changed, tools, role=Role.JUDGE, resume=True)
    assert len(tools.calls()) == 2, "the same texts"
    (texts / ".cache").mkdir()
    (texts / ".cache" / "when").write_text("now")
    build(changed, tools, role=Role.JUDGE, resume=True)
    assert len(tools.calls()) == 2, "what a downloader remembers is no text"
    (texts / "train.jsonl").write_text('{"text": "another"}\n')
    build(changed, tools, role=Role.JUDGE, resume=True)
    assert [tool for tool, *_ in tools.calls()[2:]] == ["quantize", "build"]


@pytest.mark.parametrize(
    ("texts", "remedy"),
    [
        ("checkpoints/cnn_dailymail", "hf download abisee/cnn_dailymail --repo-type dataset --local-dir"),
        ("texts/ours", "put texts there, such as a file train.jsonl with a field text"),
    ],
)
def test_texts_that_are_not_there_are_waited_for_and_then_asked_for(
    spec: GpuDeployment, tools: FakeTools, texts: str, remedy: str
) -> None:
    changed = quantised(spec, texts)
    (waits,) = [line for line in build(changed, tools, dry_run=True).waiting if "calibration" in line]
    assert waits.startswith(f"judge: calibration texts: there is no folder {changed.root / texts}") and remedy in waits
    with pytest.raises(ConfigError, match=r"judge: calibration texts: there is no folder .*, and the build has no network"):
        build(changed, tools)
    assert tools.calls() == []


def test_the_plan_says_what_a_verification_weighs_and_what_is_short(spec: GpuDeployment, tools: FakeTools) -> None:
    report = build(spec, tools, dry_run=True)
    assert report.notes == ("a sampled verification of 8 draft tokens brings 0.0 MiB of logits along: 8 x 262 values in FP16",)
    assert [one.prefix for one in report.admission] == [512, 512], "as far as the limits allow"
    (target, draft) = report.warnings
    assert target.startswith("target: behind 512 tokens an iteration admits 1 calls") and draft.startswith("draft: ")


def test_tensors_beyond_what_tensorrt_takes_are_refused(tmp_path: Path) -> None:
    source = DeploymentSpec.load("qwen3-32b-1gpu").path.read_text()
    path = tmp_path / "engines" / "wide.toml"
    path.parent.mkdir()
    path.write_text(source.replace("max_num_tokens = 32768 ", "max_num_tokens = 41984 ", 1).replace("= 114688", "= 65536"))
    with pytest.raises(ConfigError, match=r"target\.max_num_tokens=41984 x 51200 values .* at most 41943 tokens"):
        build_gpu_deployment(load(path), dry_run=True)


def test_one_role_is_built_alone_and_the_others_stay(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    before = {path: path.read_text() for path in spec.built_dir.rglob("*") if path.is_file()}
    shutil.rmtree(spec.checkpoint_dir(Role.TARGET))
    changed = edited(spec, "[judge]\n", '[judge]\nhub = "Qwen/Qwen3-0.6B"\nbatch_scheduler_policy = "max_utilization"\n')
    changed = edited(changed, "[target]\n", '[target]\nhub = "Qwen/Qwen3-0.6B"\n')
    report = build(changed, tools, role=Role.JUDGE, resume=True)
    assert report.files == ("judge/1/README", "judge/config.pbtxt")
    after = {path: path.read_text() for path in spec.built_dir.rglob("*") if path.is_file()}
    assert {path.parent.name for path in before if before[path] != after[path]} == {"judge", "small"}
    assert set(manifest_of(report)["engines"]) == {"target", "draft", "judge"}


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (hopper(tensorrt_llm=None), "TensorRT-LLM 1.2.1 is not installed here"),
        (hopper(tensorrt_llm="1.1.0"), "TensorRT-LLM 1.1.0 is installed here, the pinned version is 1.2.1"),
        (hopper(1), "small wants 2 GPUs, here are 1"),
        (hopper(capability="8.0"), "is for compute capability 9.0; GPU 0 .* has 8.0"),
        (replace(hopper(), gpus=(hopper().gpus[0], replace(hopper().gpus[1], memory_mib=40_000))), "GPU 1 .* has 39.1 GiB"),
    ],
)
def test_a_machine_that_could_not_serve_the_engines_does_not_build_them(
    spec: GpuDeployment, tools: FakeTools, platform: Platform, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build(spec, tools, platform)
    assert tools.calls() == []


def test_a_repository_that_compiles_nothing_is_made_for_the_right_cards_or_where_there_are_none(tmp_path: Path) -> None:
    path, tools = write_gpu_spec(tmp_path, runtime="llmapi"), make_tools(tmp_path / "tools")
    drafts = "max_draft_len = 8\n\n[draft]"
    path.write_text(path.read_text().replace(drafts, f'[target.speculative]\nkind = "ngram"\n{drafts}'))
    spec = load(path)
    small = replace(hopper(), gpus=tuple(replace(gpu, memory_mib=49140) for gpu in hopper().gpus))
    with pytest.raises(ConfigError, match=r"small is for cards of 79\.1 GiB; GPU 0 .* has 48\.0 GiB"):
        build(spec, tools, small)
    assert build(spec, tools, hopper(0, tensorrt_llm=None)).written
    assert build(spec, tools, hopper()).written


@pytest.mark.parametrize(("role", "num_gpus"), [(Role.TARGET, 2), (Role.JUDGE, 1)])
def test_a_role_for_a_machine_of_its_own_wants_its_own_cards_alone(
    tmp_path: Path, tools: FakeTools, role: Role, num_gpus: int
) -> None:
    """Cards beyond them may be of another kind."""
    spec = load(write_gpu_spec(tmp_path))
    for each in Role:
        spec = edited(spec, f"[{each}]", f'[{each}]\nurl = "grpc://there:8001"')
    spec = edited(edited(spec, "gpu_device_ids = [1]", "gpu_device_ids = [0]"), "gpu_device_ids = [1]", "gpu_device_ids = [0]")
    assert spec.hardware.num_gpus == 2
    build(spec.only([role]), tools, hopper(num_gpus))
    other = hopper(3)
    others = (replace(gpu, compute_capability="8.0") for gpu in other.gpus[num_gpus:])
    mixed = replace(other, gpus=(*other.gpus[:num_gpus], *others))
    build(spec.only([role]), tools, mixed, output=tmp_path / "again")


def elsewhere(spec: GpuDeployment, *roles: Role) -> GpuDeployment:
    for role in roles:
        spec = edited(spec, f"[{role}]", f'[{role}]\nurl = "grpc://there:8001"')
    return spec


@pytest.mark.parametrize("role", Role)
def test_a_roles_machine_needs_no_checkpoint_but_its_own(spec: GpuDeployment, tools: FakeTools, role: Role) -> None:
    part = elsewhere(spec, *Role).only([role])
    for each in set(Role) - {role}:
        shutil.rmtree(part.checkpoint_dir(each))
    report = build(part, tools)
    assert report.written and set(report.origins) == {role}
    assert {finding.level for finding in check_files(part)} == {Level.OK}
    shutil.rmtree(part.checkpoint_dir(role))
    with pytest.raises(CheckpointError, match=f"{role}: .* has no config.json"):
        build(part, tools)


def test_the_loops_machine_needs_no_weights_of_roles_elsewhere(spec: GpuDeployment) -> None:
    spec = elsewhere(spec, Role.DRAFT, Role.JUDGE)
    for role in (Role.DRAFT, Role.JUDGE):
        for path in spec.checkpoint_dir(role).glob("*.safetensors"):
            path.unlink()
        # Of a large one, which a download without its weights brings all the same.
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (spec.checkpoint_dir(role) / WEIGHT_INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert {finding.level for finding in check_files(spec)} == {Level.OK}
    assert not any("0.00 M" in finding.found for finding in check_files(spec))
    (spec.checkpoint_dir(Role.DRAFT) / "tokenizer.json").unlink()  # a download has just begun
    waiting = [finding.found for finding in check_files(spec) if finding.level is Level.WARNING]
    assert len(waiting) == 2 and waiting[0].startswith("not checked: draft: files and hashes")


def serve_from(spec: GpuDeployment, tools: FakeTools, platform: Platform | None = None, **options: Any) -> BuildReport:
    """What a server does before it starts."""
    return build(spec, tools, platform, compile_engines=False, only_if_stale=True, **options)


def test_a_server_renders_over_engines_that_are_there_and_only_then(spec: GpuDeployment, tools: FakeTools) -> None:
    with pytest.raises(ConfigError, match=r"no engine at .*small\.engines/target: build it first"):
        serve_from(spec, tools)
    build(spec, tools)
    shutil.rmtree(spec.built_dir)
    assert serve_from(spec, tools).written
    assert not serve_from(spec, tools).written
    assert len(tools.calls()) == 6, "it compiles nothing"
    changed = edited(spec, "max_num_tokens = 1024", "max_num_tokens = 2048")
    with pytest.raises(ConfigError, match=r"target: small\.toml has changed since its engine was built"):
        serve_from(changed, tools)


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_weights_in_fp8_want_cards_with_fp8_units(tmp_path: Path, capability: str) -> None:
    path = write_gpu_spec(tmp_path / "project", runtime="llmapi")
    path.write_text(path.read_text().replace('"9.0"', f'"{capability}"').replace("max_draft_len = 8\n", ""))
    for file in (path.parents[1] / "ck" / "target").glob("*.safetensors"):
        weights = load_file(file)
        linear = {name: one.to(torch.float8_e4m3fn) for name, one in weights.items() if "_proj.weight" in name}
        save_file(weights | linear, file)
    spec = load(path)
    refused = pytest.raises(ConfigError, match=r"target: the checkpoint's weights are FP8, which needs compute capability 8\.9")
    with refused if capability == "8.0" else nullcontext():
        plan = gpu_build.plan_gpu_build(spec, spec.built_dir, None, make_tools(tmp_path / "tools").chain)
        target, draft = (plan.sources[role].weights for role in (Role.TARGET, Role.DRAFT))
        assert (target.fp8, draft.fp8) == (target.linear, 0)


@pytest.mark.parametrize("fp8", [False, True])
def test_engines_may_be_moved_with_their_spec_and_checkpoints(spec: GpuDeployment, tools: FakeTools, fp8: bool) -> None:
    """As where a checkout is mounted into an image under another name than that in which it was built."""
    spec = quantised(spec) if fp8 else spec
    (texts := spec.root / "texts" / "ours").mkdir(parents=True)
    (texts / "train.jsonl").write_text('{"text": "one"}\n')
    build(spec, tools)
    there = spec.root.with_name("moved")
    shutil.move(spec.root, there)
    moved = load(there / "engines" / spec.path.name)
    report = serve_from(moved, tools)
    assert report.written and len(tools.calls()) == 6
    assert str(there) in (report.output / "target" / "config.pbtxt").read_text()
    assert mismatches(manifest_of(report), hopper(), {}) == ()


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (hopper(tensorrt_llm="1.2.0"), "target: built with tensorrt_llm 1.2.1, here is 1.2.0"),
        (hopper(1), "target: GPU 1 is not here"),
        (hopper(capability="10.0"), "target: built for compute capability 9.0"),
    ],
)
def test_a_server_refuses_engines_of_another_machine(
    spec: GpuDeployment, tools: FakeTools, platform: Platform, said: str
) -> None:
    build(spec, tools)
    with pytest.raises(ConfigError, match=f"the engines cannot be served here: {said}"):
        serve_from(spec, tools, platform)


def test_the_serve_command_asks_this_machine(spec: GpuDeployment, tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    build(spec, tools)
    monkeypatch.setenv("PATH", "")  # no driver to ask
    with pytest.raises(ConfigError, match=r"the engines cannot be served here: .*GPU 1 is not here"):
        build_repository(spec, only_if_stale=True)


def test_other_runtime_settings_need_no_new_engine(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    changed = edited(spec, "[target]\n", "[target]\ncancellation_check_period_ms = 5\n")
    report = serve_from(changed, tools)
    assert report.written
    text = (report.output / "target" / "config.pbtxt").read_text()
    assert 'key: "cancellation_check_period_ms" value: { string_value: "5" }' in text


def test_a_dry_run_needs_nothing_and_says_what_it_waits_for(tmp_path: Path, tools: FakeTools) -> None:
    spec = load(write_gpu_spec(tmp_path / "bare", checkpoints=False))
    for role, hub in (("target", "Qwen/Qwen3-8B"), ("draft", "Qwen/Qwen3-0.6B"), ("judge", "Qwen/Qwen3-0.6B")):
        spec = edited(spec, f"[{role}]\n", f'[{role}]\nhub = "{hub}"\n')
    planned = build(spec, tools, dry_run=True)
    assert not planned.written and not spec.built_dir.parent.exists()
    assert planned.origins[Role.TARGET] == "known shape of Qwen/Qwen3-8B"
    assert any("lookahead.json: names a tokenizer that is not there" in line for line in planned.waiting)

    rendered = build(spec, tools, dry_run=True, output=tmp_path / "out")
    assert rendered.written and tools.calls() == []
    assert {path.name for path in tmp_path.joinpath("out").iterdir()} == {
        "target",
        "draft",
        "judge",
        "lookahead",
        "manifest.json",
    }
    assert not (tmp_path / "out.engines").exists()
    assert mismatches(manifest_of(rendered), hopper(), {}) == ("the repository comes from a dry run: its engines were not built",)


def test_a_dry_run_never_overwrites_a_real_repository(spec: GpuDeployment, tools: FakeTools) -> None:
    report = build(spec, tools)
    with pytest.raises(ConfigError, match="a dry run renders into another --output"):
        build(spec, tools, dry_run=True, output=report.output)
    assert mismatches(manifest_of(report), hopper(), {}) == ()


def test_what_was_built_can_be_planned_again(spec: GpuDeployment, tools: FakeTools) -> None:
    """``doctor``, ``init`` and ``build --dry-run`` write nothing where the engines are."""
    report = build(spec, tools)
    before = manifest_of(report)
    assert not build(spec, tools, dry_run=True).written
    assert manifest_of(report) == before
    assert all(finding.level is Level.OK for finding in check_files(spec))


def test_a_server_that_may_not_write_there_serves_changed_settings_all_the_same(
    spec: GpuDeployment, tools: FakeTools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines are mounted to be read only, and the loop's settings hold the addresses of all roles."""
    built = build(spec, tools)
    before = manifest_of(built)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    changed = edited(spec, "[target]\n", "[target]\ncancellation_check_period_ms = 5\n")

    report = serve_from(changed, tools)

    assert report.written and report.output != built.output and report.output.is_relative_to(tmp_path)
    text = (report.output / "target" / "config.pbtxt").read_text()
    assert 'key: "cancellation_check_period_ms" value: { string_value: "5" }' in text
    assert str(built.output.with_name("small.engines")) in text, "the engines stay where they are"
    assert manifest_of(built) == before
    assert not serve_from(spec, tools).written, "what has not changed is served from there"


def test_the_machines_of_a_role_all_read_one_repository_so_none_is_rendered_aside(
    spec: GpuDeployment, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_two = (
        ("tp_size = 2\n", 'tp_size = 4\nnum_nodes = 2\nurl = "grpc://one:8001"\n'),
        ("[draft]\n", '[draft]\nurl = "grpc://two:8001"\n'),
        ("[judge]\n", '[judge]\nurl = "grpc://two:8001"\n'),
    )
    for old, new in over_two:
        spec = edited(spec, old, new)
    built = build(spec.only([Role.TARGET]), tools)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert serve_from(spec.only([Role.TARGET]), tools).output == built.output
    changed = edited(spec, "[target]\n", "[target]\ncancellation_check_period_ms = 5\n")
    with pytest.raises(ConfigError, match=r"target: .* read by every machine .* `lookahead build --spec small --role target`"):
        serve_from(changed.only([Role.TARGET]), tools)


@pytest.mark.parametrize(("tp_size", "fits"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_ranks_get_equal_shares_of_a_model(spec: GpuDeployment, tp_size: int, fits: bool) -> None:
    """The small target has four heads."""
    sources = find_sources(spec)
    asked: Any = SimpleNamespace(engine=lambda role: SimpleNamespace(tp_size=tp_size if role is Role.TARGET else 1))
    with nullcontext() if fits else pytest.raises(ConfigError, match=f"target.tp_size={tp_size}: 4 heads"):
        gpu_build._require_shapes(asked, sources)


def test_a_checkpoint_that_is_there_is_checked_even_in_a_dry_run(spec: GpuDeployment, tools: FakeTools) -> None:
    assert len(build(spec, tools, dry_run=True).checked) == 3
    path = spec.checkpoint_dir(Role.DRAFT) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["content"] = "<other>"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="target and draft must share a vocabulary"):
        build(spec, tools, dry_run=True)


def test_a_build_needs_its_checkpoints(tmp_path: Path, tools: FakeTools) -> None:
    spec = load(write_gpu_spec(tmp_path / "bare", checkpoints=False))
    with pytest.raises(CheckpointError, match=r"target: .* no config\.json"):
        build(spec, tools, dry_run=True)
    for role in Role:
        spec = edited(spec, f"[{role}]\n", f'[{role}]\nhub = "Qwen/Qwen3-0.6B"\n')
    with pytest.raises(CheckpointError, match=r"target: .*ck/target is not a folder"):
        build(spec, tools)


def test_a_role_on_the_llm_api_is_rendered_and_not_compiled(
    spec: GpuDeployment, tools: FakeTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(render.TEMPLATES, templates)
    shutil.rmtree(templates / "llmapi", ignore_errors=True)
    shutil.copytree(templates / "embedded", templates / "llmapi")
    monkeypatch.setattr(render, "TEMPLATES", templates)
    changed = edited(spec, "[judge]\n", '[judge]\nruntime = "llmapi"\n')
    report = build(changed, tools)
    assert ran(tools) == EVERY_STEP[:4]
    text = (report.output / "judge" / "config.pbtxt").read_text()
    assert f'key: "gpt_model_path" value: {{ string_value: "{spec.checkpoint_dir(Role.JUDGE)}" }}' in text
    assert 'backend: "python"' in text and 'key: "tp_size"' in text
    assert set(manifest_of(report)["engines"]) == {"target", "draft"}


def test_nothing_of_an_interrupted_build_goes_on(tmp_path: Path, tools: FakeTools) -> None:
    """A step is ended with its whole process group when the build is."""
    tools.tell("hang-convert")
    dirs = EngineDirs(tmp_path / "target")
    script = tools.chain.examples / "models/core/qwen/convert_checkpoint.py"
    command = Command((tools.chain.python, str(script), "--output_dir", str(dirs.checkpoint), "--tp_size", "1"))
    step = Step(Role.TARGET, "convert", command, dirs.checkpoint, ("config.json",))

    def interrupt() -> None:
        while not (tools.control / "pid").exists() or not (tools.control / "pid").read_text():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    # A shell starts what runs in its background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_steps((step,), dirs, {}, Console(file=io.StringIO()))
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    until(lambda: not Path("/proc", (tools.control / "pid").read_text().strip()).exists())  # killed, and reaped by then


def test_a_build_under_nohup_goes_on_when_its_terminal_is_closed(spec: GpuDeployment, tmp_path: Path) -> None:
    dirs = EngineDirs.of(spec.built_dir, Role.TARGET)
    command = Command(("sh", "-c", f"kill -HUP {os.getpid()}; touch {dirs.checkpoint}/config.json"))
    step = Step(Role.TARGET, "convert", command, dirs.checkpoint, ("config.json",))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run_steps((step,), dirs, {}, Console(file=io.StringIO()))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_belongs_to_no_job_and_keeps_the_settings(spec: GpuDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM begins an MPI job of its own at its import, which the variables of another one would end."""
    for name in ("SLURM_JOB_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_btl"):
        monkeypatch.setenv(name, "7")
    dirs = EngineDirs.of(spec.built_dir, Role.TARGET)
    command = Command(("sh", "-c", f"env > {dirs.checkpoint}/config.json"))
    run_steps((Step(Role.TARGET, "convert", command, dirs.checkpoint, ("config.json",)),), dirs, {}, Console(file=io.StringIO()))
    seen = {line.partition("=")[0] for line in (dirs.checkpoint / "config.json").read_text().splitlines()}
    assert {name for name in seen if name.startswith(("SLURM_", "PMIX_", "OMPI_"))} == {"OMPI_MCA_btl"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_or_a_closed_terminal_ends_the_command_too(spec: GpuDeployment, tools: FakeTools, number: int) -> None:
    dirs = EngineDirs.of(spec.built_dir, Role.TARGET)
    tools.tell("hang-convert")
    convert = build(spec, tools, dry_run=True).steps[0]

    def interrupt() -> None:
        while not (tools.control / "pid").exists() or not (tools.control / "pid").read_text():
            pass
        os.kill(os.getpid(), number)

    started_with = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored, and then nothing is to end
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            run_steps((convert,), dirs, {}, Console(file=io.StringIO()))
        thread.join()
        assert (ended.value.code, signal.getsignal(number)) == (128 + number, signal.SIG_DFL)
    finally:
        signal.signal(number, started_with)
    until(lambda: not Path("/proc", (tools.control / "pid").read_text().strip()).exists())  # killed, and reaped by then


def test_a_command_that_outlives_its_build_keeps_others_out(spec: GpuDeployment, tmp_path: Path) -> None:
    """Even where nobody could end it."""
    dirs = EngineDirs.of(spec.built_dir, Role.TARGET)
    command = Command(("sh", "-c", f"touch {dirs.checkpoint}/config.json; sleep 60 & echo $! > {tmp_path}/pid"))
    run_steps((Step(Role.TARGET, "convert", command, dirs.checkpoint, ("config.json",)),), dirs, {}, Console(file=io.StringIO()))
    try:
        with pytest.raises(BuildError, match="another build is at work"):
            run_steps((), dirs, {}, Console(file=io.StringIO()))
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_engines_of_other_weights_are_not_served(spec: GpuDeployment, tools: FakeTools) -> None:
    """A fine-tuned model that was exported again into the same folder."""
    build(spec, tools)
    assert not serve_from(spec, tools).written
    weights = next((spec.root / "ck" / "draft").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    os.utime(weights, ns=(1, 1))
    assert not serve_from(spec, tools).written, "the same weights, copied"
    template = spec.root / "ck" / "target" / "tokenizer_config.json"
    template.write_text(template.read_text() + "\n")
    serve_from(spec, tools)  # an engine holds no tokenizer
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"draft: {weights.name} in .* is not what its engine was built from"):
        serve_from(spec, tools)


def test_weights_that_must_be_read_are_told_of_once(
    spec: GpuDeployment, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(spec, tools)
    monkeypatch.setattr(gpu_build, "SAID_BYTES", 0)
    os.utime(next((spec.root / "ck" / "draft").glob("*.safetensors")), ns=(1, 1))
    first, second = io.StringIO(), io.StringIO()
    serve_from(spec, tools, console=Console(file=first))
    assert "draft: reading 0 GB of weights" in first.getvalue()
    serve_from(spec, tools, console=Console(file=second))
    assert "reading" not in second.getvalue()


def test_engines_of_weights_in_other_files_are_not_served(spec: GpuDeployment, tools: FakeTools) -> None:
    build(spec, tools)
    weights = spec.root / "ck" / "draft" / "model.safetensors"
    with safe_open(weights, "numpy") as tensors:
        places = dict.fromkeys(tensors.keys(), "model-00001-of-00001.safetensors")
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with pytest.raises(ConfigError, match=r"draft: model.* is not what its engine was built from"):
        serve_from(spec, tools)


def test_engines_that_were_compiled_by_more_processes_are_the_same(spec: GpuDeployment, tools: FakeTools) -> None:
    report = build(spec, tools)
    by_one, by_two = (f'"--workers",\n        "{number}"' for number in (1, 2))
    manifests = {path: path.read_text() for path in report.output.with_name("small.engines").rglob("manifest.json")}
    assert any(by_one in text for text in manifests.values())
    for path, text in manifests.items():
        path.write_text(text.replace(by_one, by_two))
    serve_from(spec, tools)


def test_cards_are_those_that_this_process_sees(spec: GpuDeployment, tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    build(spec, tools)
    assert {cards for _, _, cards, _ in tools.calls()} == {"3,GPU-abc", "GPU-abc"}


def test_a_platform_has_the_cards_that_a_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Gpu(0, "A100", "8.0", 1), Gpu(1, "H100", "9.0", 1)
    monkeypatch.setattr("lr_backend.build.manifest.probe_gpus", lambda: (old, new))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert probe_platform().gpus == (replace(new, index=0),)


def test_a_folder_that_cannot_be_made_is_one_sentence(spec: GpuDeployment, tools: FakeTools) -> None:
    spec.built_dir.parent.mkdir(parents=True, exist_ok=True)
    spec.built_dir.with_name("small.engines").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be made"):
        build(spec, tools)
    assert tools.calls() == []


def test_two_builds_never_work_in_one_folder(spec: GpuDeployment, tools: FakeTools) -> None:
    folder = spec.built_dir.with_name("small.engines") / "target"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"another build is at work in .*small\.engines/target"):
            build(spec, tools)
    assert tools.calls() == []
    assert build(spec, tools).written


def test_the_command_line_shows_memory_commands_and_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_build, "USES_TEXTS", replace(cli_build.USES_TEXTS, num_steps=2))  # nothing is said of the uses
    done = CliRunner().invoke(app, ["build", "--spec", "qwen3-32b", "--dry-run", "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "weights" in done.output and "GPU 1 judge" in done.output
    assert "calls that one iteration admits" in done.output and "requests of 9 branches" in done.output
    assert "brings 2.9 MiB of logits along: 10 x 151,936 values in FP16" in done.output
    assert "as written: TP 4, beside the target" in done.output and "otherwise: TP 2, apart" in done.output
    assert "trtllm-build --checkpoint_dir" in done.output
    assert "--speculative_decoding_mode draft_tokens_external --max_draft_len 10" in done.output
    assert "waits target: files and hashes" in done.output
    assert (tmp_path / "out" / "target" / "config.pbtxt").is_file()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_runs_on_another_machine_is_not_compared(tmp_path: Path, role: str) -> None:
    source = DeploymentSpec.load("qwen3-32b-apart").path.read_text()
    path = tmp_path / "engines" / "far.toml"
    path.parent.mkdir()
    path.write_text(source.replace(f"[{role}]\n", f'[{role}]\nurl = "grpc://other:8001"\n'))
    done = CliRunner().invoke(app, ["build", "--spec", str(path), "--dry-run"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f"are not compared: qwen3-32b-apart: {role} runs on another machine" in done.output
    assert "calls that one iteration admits" in done.output, "of the other"


def test_the_command_line_fails_with_the_end_of_the_log(
    tmp_path: Path, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load(write_gpu_spec(tmp_path / "project"))
    tools.fail("convert")
    monkeypatch.setenv("PATH", f"{Path(tools.chain.trtllm_build).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(
        "lr_backend.cli.build.build_gpu_deployment",
        lambda *given, **named: build_gpu_deployment(*given, **named, platform=hopper),
    )
    failed = CliRunner().invoke(app, ["build", "--spec", str(spec.path), "--examples", str(tools.chain.examples)])
    assert failed.exit_code == 1
    assert failed.output.index("GPU 1 judge") < failed.output.index("error: "), "the plan is shown before anything is run"
    assert "error: target: convert ended with status 3" in failed.output
    assert "CUDA out of memory" in failed.output
