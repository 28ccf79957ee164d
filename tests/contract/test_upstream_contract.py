"""What is rendered and run for TensorRT-LLM 1.2.1 is what it takes: every spec of ``engines/`` against the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from lr_backend import contract
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.gpu_spec import WHOLE
from lr_backend.build.report import BuildReport
from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment, TrtllmEngineSpec
from lr_backend.build.trtllm_commands import CONVERTERS, EngineDirs, Toolchain, engine_steps
from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.nvidia import TENSORRT_LLM
from tests.contract.upstream import (
    LOGITS_FLAGS,
    TABLE,
    command_violations,
    config_violations,
    logits_dtype,
    parameters,
    parse,
    read_flags,
)

SPECS = sorted(
    path.stem for path in (PACKAGE_ROOT / "engines").glob("*.toml") if DeploymentSpec.load(path).runtime == "tensorrtllm"
)
"""With compiled engines."""
CASES = [(name, role) for name in SPECS for role in Role]
IDS = [f"{name}-{role}" for name, role in CASES]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BuildReport]:
    """Each spec, rendered by a dry run."""
    root = tmp_path_factory.mktemp("rendered")
    found = {}
    for name in SPECS:
        spec = DeploymentSpec.load(name)
        assert isinstance(spec, GpuDeployment)
        found[name] = build_gpu_deployment(spec, root / name, dry_run=True)
    return found


def config_of(report: BuildReport, role: Role) -> model_config_pb2.ModelConfig:
    return parse((report.output / role.value / "config.pbtxt").read_text(encoding="utf-8"))


def compile_flags(report: BuildReport, role: Role) -> dict[str, str | None]:
    (step,) = [step for step in report.steps if step.role is role and step.name == "compile"]
    return read_flags(step.command.argv)


def test_all_deployments_are_held() -> None:
    assert SPECS == [
        "qwen3-32b",
        "qwen3-32b-1gpu",
        "qwen3-32b-2gpu",
        "qwen3-32b-apart",
        "qwen3-32b-fp8",
        "qwen3-8b-24gb",
        "r1-distill-32b",
    ]
    assert TABLE["version"] == TENSORRT_LLM


@pytest.mark.parametrize(("name", "role"), CASES, ids=IDS)
def test_a_config_is_what_the_backend_takes(reports: dict[str, BuildReport], name: str, role: Role) -> None:
    assert config_violations(config_of(reports[name], role), role.value) == []


@pytest.mark.parametrize(("name", "role"), CASES, ids=IDS)
def test_a_config_says_what_the_loop_relies_on(reports: dict[str, BuildReport], name: str, role: Role) -> None:
    config = config_of(reports[name], role)
    given, flags = parameters(config), compile_flags(reports[name], role)
    assert given["enable_kv_cache_reuse"] == given["enable_chunked_context"] == given["exclude_input_in_output"] == "true"
    assert int(given["cancellation_check_period_ms"]) <= 10
    assert given["gpt_model_type"] == "inflight_fused_batching"
    share = float(given["kv_cache_free_gpu_mem_fraction"])
    assert share < 1.0, "upstream refuses all of it"
    assert ("max_tokens_in_paged_kv_cache" in given) == (share == WHOLE), "the smaller of both counts"
    assert flags["logits_dtype"] == LOGITS_FLAGS[logits_dtype(config)]
    assert flags["workers"] == "1", "ranks compiled at once would take the machine's memory at once"
    assert given["gpt_model_path"] == flags["output_dir"]
    assert not config.HasField("dynamic_batching")


@pytest.mark.parametrize(("name", "role"), CASES, ids=IDS)
def test_engines_lie_beside_the_repository_and_each_model_has_a_version(
    reports: dict[str, BuildReport], name: str, role: Role
) -> None:
    output = reports[name].output
    assert (output / role.value / "1").is_dir()
    assert output not in Path(parameters(config_of(reports[name], role))["gpt_model_path"]).parents


@pytest.mark.parametrize("name", SPECS)
def test_no_placeholder_is_left_in_any_file(reports: dict[str, BuildReport], name: str) -> None:
    output = reports[name].output
    for path in (path for path in output.rglob("*") if path.is_file() and path.name != "manifest.json"):
        text = path.read_text(encoding="utf-8")
        assert "${" not in text and "{{" not in text and "{%" not in text, path


@pytest.mark.parametrize("name", SPECS)
def test_command_lines_are_what_upstreams_tools_take(reports: dict[str, BuildReport], name: str) -> None:
    steps = reports[name].steps
    assert [step.role for step in steps] == [role for role in Role for _ in range(2)]
    assert [found for step in steps for found in command_violations(step.command.argv)] == []


@pytest.mark.parametrize("name", SPECS)
def test_only_the_target_takes_drafts_and_its_buffers_are_bounded(reports: dict[str, BuildReport], name: str) -> None:
    target = compile_flags(reports[name], Role.TARGET)
    assert target["speculative_decoding_mode"] == "draft_tokens_external"
    assert target["use_paged_context_fmha"] == "enable"
    slots = int(target["max_batch_size"] or 0) * (int(target["max_draft_len"] or 0) + 1)
    assert 0 < slots <= int(target["max_num_tokens"] or 0)
    for role in (Role.DRAFT, Role.JUDGE):
        flags = compile_flags(reports[name], role)
        assert not {"speculative_decoding_mode", "max_draft_len", "gather_context_logits"} & set(flags)
        assert flags["use_paged_context_fmha"] == "enable"


@pytest.mark.parametrize("name", SPECS)
def test_the_loops_settings_are_those_of_the_engines(reports: dict[str, BuildReport], name: str) -> None:
    config = LoopConfig.load(reports[name].output / "lookahead" / "1" / "lookahead.json")
    flags = compile_flags(reports[name], Role.TARGET)
    assert config.draft_logits == "one_hot"
    assert config.vocab_size in (151936, 152064)
    assert (str(config.limits.max_draft_len), str(config.tokens_per_block)) == (flags["max_draft_len"], flags["tokens_per_block"])
    longest = config.limits.max_prompt_tokens + config.limits.max_tokens + config.limits.max_draft_len
    assert longest <= int(flags["max_seq_len"] or 0)
    assert config.tokenizer_dir.is_absolute() and config.judge_tokenizer_dir.is_absolute()


@pytest.mark.parametrize("architecture", sorted(CONVERTERS))
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("drafts", [0, 7])
def test_every_kind_of_engine_has_commands_that_upstream_takes(
    architecture: str, quantization: str, tp_size: int, drafts: int
) -> None:
    engine = TrtllmEngineSpec.model_validate(
        {
            "checkpoint": "ck",
            "quantization": quantization,
            "kv_cache_dtype": "fp8" if quantization == "fp8" else "auto",
            "calib_dataset": "/data/calibration",
            "tp_size": tp_size,
            "gpu_device_ids": range(tp_size),
            "max_batch_size": 4,
            "max_num_tokens": 2048,
            "max_seq_len": 1024,
            "max_draft_len": drafts,
            "multiple_profiles": True,
            "max_tokens_in_paged_kv_cache": 4096,
        }
    )
    steps = engine_steps(Role.TARGET, engine, Path("/ck"), architecture, EngineDirs(Path("/out")), Toolchain())
    assert [command_violations(step.command.argv) for step in steps] == [[], []]
    convert, build = (read_flags(step.command.argv) for step in steps)
    assert convert["output_dir"] == build["checkpoint_dir"]
    assert convert["tp_size"] == str(tp_size)
    assert build["use_fp8_context_fmha"] == ("enable" if quantization == "fp8" else "disable")
    assert steps[1].products == ("config.json", *(f"rank{rank}.engine" for rank in range(tp_size)))


def test_the_projects_own_table_is_upstreams() -> None:
    assert {spec.name for spec in contract.ENGINE_INPUTS} == set(TABLE["inputs"])
    assert {spec.name for spec in contract.ENGINE_OUTPUTS} == set(TABLE["outputs"])


GOOD = ("trtllm-build", "--checkpoint_dir", "a", "--max_draft_len", "4")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((*GOOD, "--paged_attention", "enable"), "knows no --paged_attention"),
        ((*GOOD, "--logits_dtype", "bfloat16"), "--logits_dtype bfloat16 is not"),
        ((*GOOD, "--max_batch_size", "many"), "--max_batch_size many is not int"),
        ((*GOOD, "--use_paged_context_fmha"), "--use_paged_context_fmha None is not"),
        ((*GOOD, "--gather_context_logits"), "exclude one another"),
        ((*GOOD, "--multiple_profiles", "enable", "--opt_num_tokens", "8"), "exclude one another"),
        (("trtllm-build", "--max_draft_len", "4"), "--checkpoint_dir is missing"),
        (("python3", "/app/examples/models/core/qwen/convert_checkpoint.py", "--dtype", "bfloat16"), "--model_dir is missing"),
        (("python3", "/app/examples/convert.py"), "none of upstream's tools"),
    ],
)
def test_the_check_of_commands_finds_mistakes(argv: tuple[str, ...], said: str) -> None:
    assert command_violations(GOOD) == []
    assert any(said in found for found in command_violations(argv))


def spoil(path: str, value: object) -> Callable[[model_config_pb2.ModelConfig], None]:
    def change(config: model_config_pb2.ModelConfig) -> None:
        name, _, field = path.partition(".")
        tensor = next(tensor for tensor in [*config.input, *config.output] if tensor.name == name)
        setattr(tensor, field, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil("input_ids.name", "inputs_ids"), "input input_ids is missing"),
        (spoil("draft_input_ids.allow_ragged_batch", False), "input draft_input_ids is"),
        (spoil("request_output_len.optional", True), "input request_output_len is"),
        (spoil("seed.data_type", model_config_pb2.TYPE_INT64), "input seed is"),
        (spoil("sequence_length.data_type", model_config_pb2.TYPE_INT64), "output sequence_length is"),
        (lambda config: config.input[3].ClearField("reshape"), "input input_lengths is"),
        (lambda config: config.parameters.pop("tokenizer_dir"), "tokenizer_dir is missing"),
        (lambda config: config.parameters["cross_kv_cache_fraction"].MergeFrom(text("0.5")), "must stay unset"),
        (lambda config: config.parameters["enable_kv_cache_reuse"].MergeFrom(text("yes")), "is not bool"),
        (lambda config: config.parameters["gpu_device_ids"].MergeFrom(text("${gpu_device_ids}")), "placeholder"),
        (lambda config: config.parameters["speed"].MergeFrom(text("11")), "knows no parameter speed"),
        (lambda config: setattr(config.model_transaction_policy, "decoupled", True), "decoupled"),
        (lambda config: setattr(config, "max_batch_size", 0), "no batch dimension"),
        (lambda config: setattr(config, "backend", "python"), "backend 'python'"),
    ],
)
def test_the_check_of_configs_finds_mistakes(
    reports: dict[str, BuildReport], change: Callable[[model_config_pb2.ModelConfig], object], said: str
) -> None:
    config = config_of(reports["qwen3-32b"], Role.TARGET)
    change(config)
    assert any(said in found for found in config_violations(config, "target"))


def text(value: str) -> model_config_pb2.ModelParameter:
    return model_config_pb2.ModelParameter(string_value=value)


def test_a_queue_limit_brings_the_batcher_that_carries_it(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "qwen3-32b.toml"
    path.parent.mkdir()
    source = DeploymentSpec.load("qwen3-32b").path.read_text(encoding="utf-8")
    path.write_text(source.replace("[draft]\n", "[draft]\nmax_queue_size = 99\n"), encoding="utf-8")
    spec = DeploymentSpec.load(path)
    assert isinstance(spec, GpuDeployment)
    report = build_gpu_deployment(spec, tmp_path / "out", dry_run=True)
    draft = config_of(report, Role.DRAFT)
    assert draft.dynamic_batching.default_queue_policy.max_queue_size == 99
    assert config_violations(draft, "draft") == []
    assert not config_of(report, Role.TARGET).HasField("dynamic_batching")
