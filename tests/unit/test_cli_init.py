"""``lookahead init`` over tiny random checkpoints of every family: what it writes is built, and what cannot work is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lr_backend.build import new_spec
from lr_backend.build.admission import admissions, branches_that_join, shortfalls
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.memory import estimate
from lr_backend.build.repository import build_repository
from lr_backend.build.shapes import find_sources, shape_from_config
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment
from lr_backend.cli import init as command
from lr_backend.cli.app import app
from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.nvidia import Gpu
from tests.support import tiny_models
from tests.support.own_checkpoints import FAMILIES, make_pair

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with memory and a decoder, and a folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_host", lambda: command.Host(free_bytes=16 * GIB, num_cores=4, decoder=True))
    monkeypatch.setattr(command, "probe_gpus", lambda: ())


def run(target: Path, draft: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["init", "--target", str(target), "--draft", str(draft), *more], env={"COLUMNS": "250"})


def made(target: Path, draft: Path, *more: str) -> DeploymentSpec:
    result = run(target, draft, *more)
    assert result.exit_code == 0, result.output
    (path,) = Path("engines").glob("*.toml")
    return DeploymentSpec.load(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_of_every_family_is_built(tmp_path: Path, family: str) -> None:
    target, draft = make_pair(tmp_path / "checkpoints", family)
    spec = made(target, draft, "--name", "own")
    assert isinstance(spec, EmbeddedDeployment)
    assert spec.target.checkpoint == Path("checkpoints/target"), "inside the project, hence relative"
    assert spec.checkpoint_dir(Role.JUDGE) == target, "the target judges where no judge is named"
    assert (spec.target.max_seq_len, spec.draft.max_seq_len) == (2048, 2048), "the checkpoints' positions"
    assert spec.target.weight_dtype == "same" and spec.target.holds_draft_model

    report = build_repository(spec)
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    assert (config.think_open, config.think_close) == ("<think>", "</think>")
    assert config.defaults["temperature"] == 0.7 and config.defaults["top_k"] == 20 and config.defaults["mode"] == "auto"
    assert config.limits.max_prompt_tokens + config.limits.max_tokens == 2048


def test_a_folder_behind_a_link_stays_relative(tmp_path: Path) -> None:
    """The checkpoints', the checkout's, or both: in a container only what the project's folder holds is there."""
    real, disk = tmp_path / "real", tmp_path / "disk"
    make_pair(disk, "qwen3")
    real.mkdir()
    (real / "checkpoints").symlink_to(disk)
    (real / "models").mkdir()
    (disk / "draft").rename(real / "models" / "draft")
    link = tmp_path / "link"
    link.symlink_to(real)
    for root, target, draft in (
        (real, "real/checkpoints/target", "real/models/draft"),
        (link, "link/checkpoints/target", "link/models/draft"),
        (link, "real/checkpoints/target", "real/models/draft"),
        (real, "real/checkpoints/target", "link/models/draft"),
        (real, "real/checkpoints/target", "link/../real/models/draft"),
    ):
        path = root / "engines" / "own.toml"
        result = run(Path(target), Path(draft), "--output", str(path), "--force")
        assert result.exit_code == 0, result.output
        spec = DeploymentSpec.load(path)
        assert isinstance(spec, EmbeddedDeployment)
        assert (spec.target.checkpoint, spec.draft.checkpoint) == (Path("checkpoints/target"), Path("models/draft")), (
            root,
            draft,
        )
        assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_a_folder_elsewhere_is_named_by_the_link_that_was_given(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "disk", "qwen3")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    result = run(tmp_path / "link" / "target", draft, "--output", str(tmp_path / "project" / "engines" / "own.toml"))
    assert result.exit_code == 0, result.output
    spec = DeploymentSpec.load(tmp_path / "project" / "engines" / "own.toml")
    assert isinstance(spec, EmbeddedDeployment)
    assert (spec.target.checkpoint, spec.draft.checkpoint) == (tmp_path / "link" / "target", draft)
    assert spec.checkpoint_dir(Role.TARGET) == target


def test_a_tokenizer_without_markers_is_looked_ahead_in_over_the_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "THINK_TOKENS", ())
    spec = made(*make_pair(tmp_path / "checkpoints", "qwen2"))
    config = spec.loop_config()
    assert (config.think_open, config.think_close) == (None, None)
    assert "marks reasoning" in spec.path.read_text(encoding="utf-8")


def test_a_checkpoint_that_asks_for_no_sampling_is_greedy(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, "llama")
    path = target / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "top_k": 20}), encoding="utf-8")
    defaults = made(target, draft).loop_config().defaults
    assert (defaults["temperature"], defaults["top_k"]) == (1.0, 20), "as transformers would"
    shutil.rmtree("engines")
    path.unlink()
    assert made(target, draft).loop_config().defaults["temperature"] == 0.0


def test_without_the_decoder_nobody_drafts_in_the_targets_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_host", lambda: command.Host(free_bytes=16 * GIB, num_cores=4, decoder=False))
    spec = made(*make_pair(tmp_path, "qwen3"))
    assert isinstance(spec, EmbeddedDeployment)
    assert not spec.target.holds_draft_model and "proposer" not in spec.lookahead["defaults"]


def test_it_says_what_to_run_next_and_replaces_nothing(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, "qwen3")
    result = run(target, draft, "--name", "own")
    assert "lookahead serve --spec engines/own.toml" in result.output.splitlines()[-1]
    assert "a smaller instruct model judges faster" in result.output
    again = run(target, draft, "--name", "own")
    assert again.exit_code == 2 and "is there already" in again.output and "--force" in again.output
    assert run(target, draft, "--name", "own", "--force").exit_code == 0
    assert [path.name for path in Path("engines").iterdir()] == ["own.toml"], "nothing is left beside it"


def test_a_longer_sequence_than_the_models_have_is_refused(tmp_path: Path) -> None:
    result = run(*make_pair(tmp_path, "qwen3"), "--max-seq-len", "4096")
    assert result.exit_code == 1 and "made for 2048 positions" in result.output
    assert not list(Path("engines").glob("*")) if Path("engines").exists() else True
    pair = make_pair(tmp_path / "stretched", "qwen3")
    for path in (folder / "config.json" for folder in pair):
        rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}), encoding="utf-8")
    assert made(*pair, "--max-seq-len", "4096").target.max_seq_len == 4096


def test_too_little_memory_is_named_with_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_host", lambda: command.Host(free_bytes=GIB, num_cores=1, decoder=True))
    result = run(*make_pair(tmp_path, "qwen3"))
    assert result.exit_code == 1
    assert "GiB of memory here" in result.output and "1.0 GiB are free" in result.output and "--max-seq-len" in result.output


def test_another_vocabulary_is_refused_by_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = make_pair(tmp_path / "one", "qwen3")
    monkeypatch.setattr(tiny_models, "THINK_TOKENS", ("<a>", "<b>"))
    _, draft = make_pair(tmp_path / "other", "qwen3")
    result = run(target, draft)
    assert result.exit_code == 1
    assert "target and draft must share a vocabulary" in result.output and "the target's own family" in result.output


def test_what_is_missing_or_unknown_is_named_with_its_option(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "models", "qwen3")
    result = run(target, tmp_path / "none")
    assert result.exit_code == 1 and "--draft" in result.output and "hf download" in result.output
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "architectures": ["MixtralForCausalLM"]}))
    result = run(target, draft)
    assert result.exit_code == 1
    assert "--draft: " in result.output and "MixtralForCausalLM" in result.output and "Qwen2.5 and Llama" in result.output


@pytest.mark.parametrize("folder", ["target", "Other-1B"])
def test_a_known_model_has_its_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Kernel tables go by it. Another folder's model has the shape alone, and may be anybody's."""
    target, draft = make_pair(tmp_path, "qwen3")
    path = target / "config.json"
    shape = shape_from_config(json.loads(path.read_text(encoding="utf-8")), path)
    monkeypatch.setattr(new_spec, "known_models", lambda: {"Somebody/target": shape, "Somebody/draft": shape})
    spec = made(target.rename(tmp_path / folder), draft, "--runtime", "tensorrtllm", "--system", "h100_sxm", "--gpus", "4")
    assert isinstance(spec, GpuDeployment)
    assert spec.target.hub == ("Somebody/target" if folder == "target" else "")
    assert spec.draft.hub == "", "another shape than the known model's"


def test_compiled_engines_are_laid_over_eight_cards_at_most(tmp_path: Path) -> None:
    """TensorRT-LLM can address no others."""
    result = run(*make_pair(tmp_path, "qwen3"), "--runtime", "tensorrtllm", "--system", "h100_sxm", "--gpus", "16")
    assert result.exit_code == 0, result.output
    assert "of 16 cards, 6, 7, 8, 9" in result.output


@pytest.mark.parametrize(("num_gpus", "idle"), [(4, ""), (5, "4"), (6, ""), (8, "6,7")])
def test_cards_that_stay_idle_are_named(tmp_path: Path, num_gpus: int, idle: str) -> None:
    result = run(*make_pair(tmp_path, "qwen3"), "--runtime", "tensorrtllm", "--system", "h100_sxm", "--gpus", str(num_gpus))
    assert result.exit_code == 0, result.output
    said = [line for line in result.output.splitlines() if line.startswith("idle")]
    assert len(said) == bool(idle)
    assert all(f"of {num_gpus} cards, {idle.replace(',', ', ')}: a second server" in line for line in said)
    assert all(f"CUDA_VISIBLE_DEVICES={idle})" in line for line in said)


@pytest.mark.parametrize(
    ("num_gpus", "gpus"),
    [
        (1, {"target": (0,), "draft": (0,), "judge": (0,)}),
        (2, {"target": (0,), "draft": (1,), "judge": (1,)}),
        (3, {"target": (0,), "draft": (1,), "judge": (2,)}),
        (4, {"target": (0, 1), "draft": (2,), "judge": (3,)}),
    ],
)
@pytest.mark.parametrize("runtime", ["tensorrtllm", "llmapi"])
def test_engines_are_laid_over_the_cards(tmp_path: Path, runtime: str, num_gpus: int, gpus: dict[str, tuple[int, ...]]) -> None:
    pair = make_pair(tmp_path, "qwen3")
    said = run(*pair, "--runtime", runtime, "--system", "h100_sxm", "--gpus", str(num_gpus))
    assert said.exit_code == 0, said.output
    spec = DeploymentSpec.load(*Path("engines").glob("*.toml"))
    assert isinstance(spec, GpuDeployment)
    assert {role.value: spec.engine(role).gpu_device_ids for role in Role} == gpus
    shared = num_gpus < 3
    assert (spec.engine(Role.DRAFT).max_tokens_in_paged_kv_cache is not None) == shared
    assert said.output.rstrip().endswith(" --start-mps") == shared
    assert spec.target.num_drafts == (8 if runtime == "tensorrtllm" else 0)
    assert spec.server.exit_timeout_s >= spec.loop_config().limits.max_tokens / 70, "the longest answer, at 70 tokens/s"


def test_short_sequences_leave_each_role_its_own_card(tmp_path: Path) -> None:
    """One of 512 tokens fits an iteration that is too small for all rows of its draft tokens."""
    spec = made(
        *make_pair(tmp_path, "qwen3"),
        *("--runtime", "tensorrtllm", "--system", "h100_sxm", "--gpus", "4", "--max-seq-len", "512"),
    )
    assert isinstance(spec, GpuDeployment)
    assert {role.value: spec.engine(role).gpu_device_ids for role in Role} == {"target": (0, 1), "draft": (2,), "judge": (3,)}
    assert spec.target.max_num_tokens >= spec.target.max_batch_size * (spec.target.num_drafts + 1)


def test_sequences_must_hold_the_first_question(tmp_path: Path) -> None:
    result = run(*make_pair(tmp_path, "qwen3"), "--max-seq-len", "128")
    assert result.exit_code == 1 and "sequences of 128 tokens are too short: 256 at least" in result.output


def test_an_iteration_admits_a_call_behind_the_longest_prefix(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen3")
    for folder in pair:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 40_960}))
    spec = made(*pair, "--runtime", "tensorrtllm", "--system", "h100_sxm", "--max-seq-len", "20000")
    assert isinstance(spec, GpuDeployment)
    together = 9 * (4096 + 8)
    assert (spec.target.max_num_tokens, spec.draft.max_num_tokens, spec.judge.max_num_tokens) == (together, together, 8192)
    found = admissions(spec, estimate(spec, find_sources(spec)))
    assert branches_that_join(found) == 9 and shortfalls(spec, found) == ()


def test_where_memory_is_short_fewer_branches_join_and_the_longest_prefix_still_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path, "qwen3")
    for folder in pair:
        path = folder / "config.json"
        wide = {"max_position_embeddings": 40_960, "intermediate_size": 20_000}
        path.write_text(json.dumps(json.loads(path.read_text()) | wide))
    joined = {}
    for mib in (11_000, 12_500, 20_000):
        monkeypatch.setattr(command, "probe_gpus", lambda mib=mib: (Gpu(0, "NVIDIA L4", "8.9", mib),))
        result = run(*pair, "--runtime", "tensorrtllm", "--max-seq-len", "20000", "--name", f"card-{mib}")
        assert result.exit_code == 0, result.output
        spec = DeploymentSpec.load(Path("engines") / f"card-{mib}.toml")
        assert isinstance(spec, GpuDeployment)
        joined[mib] = branches_that_join(admissions(spec, estimate(spec, find_sources(spec))))
        assert spec.target.max_num_tokens >= 20_000
    assert 1 <= joined[11_000] < joined[12_500] < joined[20_000] == 9


def test_the_cards_here_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path, "qwen3")
    result = run(*pair, "--runtime", "llmapi")
    assert result.exit_code == 1 and "no GPU here" in result.output and "--system" in result.output
    monkeypatch.setattr(command, "probe_gpus", lambda: tuple(Gpu(number, "NVIDIA L4", "8.9", 23034) for number in range(2)))
    spec = made(*pair, "--runtime", "llmapi")
    assert isinstance(spec, GpuDeployment)
    assert (spec.hardware.gpu, spec.hardware.num_gpus, spec.hardware.compute_capability) == ("NVIDIA L4", 2, "8.9")
    result = run(*pair, "--runtime", "llmapi", "--gpus", "3", "--name", "more")
    assert result.exit_code == 1 and "there are 2 here" in result.output
