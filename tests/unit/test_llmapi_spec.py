"""``[target.speculative]``: a target on the LLM API that drafts by itself, from the spec to the engine and the loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lr_backend.build.emulated_spec import emulated
from lr_backend.build.gpu_build import build_gpu_deployment, plan_gpu_build
from lr_backend.build.memory import EngineMemory, estimate, kv_bytes_per_token, verification_bytes
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.build.trtllm_commands import NGC_TOOLS
from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.errors import CheckpointError, ConfigError
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.request import Mode
from tests.support.fake_trtllm import write_gpu_spec
from tests.support.tiny_models import Shape, make_checkpoint

DRAFTS = "max_draft_len = 8\n\n[draft]"
LIMITS = "[lookahead.limits]\n"
EAGLE = 'kind = "eagle3"\ncheckpoint = "checkpoints/head"'


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    path = write_gpu_spec(tmp_path, checkpoints=False)
    path.write_text(path.read_text().replace('runtime = "tensorrtllm"', 'runtime = "llmapi"', 1))
    return path


def load(path: Path, section: str, *edits: tuple[str, str]) -> GpuDeployment:
    text = path.read_text()
    for old, new in ((DRAFTS, f"\n[target.speculative]\n{section}\nmax_draft_len = 8\n\n[draft]"), *edits):
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    return GpuDeployment.load(path)


def settings(spec: GpuDeployment, role: Role) -> LlmApiConfig:
    """What the engine reads of what is rendered."""
    return LlmApiConfig.from_parameters(spec.engine_parameters(role, Path("/model")))


def test_each_kind_reaches_the_engine(spec_path: Path) -> None:
    text = spec_path.read_text()
    target = settings(load(spec_path, 'kind = "ngram"\nmax_matching_ngram_size = 3'), Role.TARGET)
    assert (target.speculative, target.max_draft_len, target.max_matching_ngram_size) == ("ngram", 8, 3)
    assert target.speculative_model_dir is None
    spec_path.write_text(text)
    spec = load(spec_path, 'kind = "draft_target"')
    assert settings(spec, Role.TARGET).speculative_model_dir == spec.checkpoint_dir(Role.DRAFT)
    spec_path.write_text(text)
    spec = load(spec_path, EAGLE)
    assert settings(spec, Role.TARGET).speculative_model_dir == spec.root / "checkpoints" / "head" == spec.speculative_dir
    assert not settings(spec, Role.DRAFT).drafts


def test_the_loop_is_told_that_there_is_no_target_alone(spec_path: Path) -> None:
    spec = load(spec_path, 'kind = "ngram"')
    config = spec.loop_config()
    assert config.engine_drafts and config.engine_always_drafts and config.limits.max_draft_len == 8
    assert config.defaults["proposer"] == "engine"
    assert [mode.value for mode in Mode if config.lacks_mode(mode, greedy=True) is not None] == ["ar", "lr"]
    assert {role: [tensor.name for tensor in spec.engine(role).inputs].count("num_draft_tokens") for role in Role} == {
        Role.TARGET: 1,
        Role.DRAFT: 0,
        Role.JUDGE: 0,
    }


def test_without_the_section_nothing_of_it_holds(spec_path: Path) -> None:
    spec_path.write_text(spec_path.read_text().replace(DRAFTS, "\n[draft]", 1))
    spec = GpuDeployment.load(spec_path)
    config = spec.loop_config()
    assert config.limits.max_draft_len == 0
    assert not (config.engine_drafts or config.engine_always_drafts or settings(spec, Role.TARGET).drafts)
    assert "speculative" not in spec.engine_parameters(Role.TARGET, Path("/model"))


@pytest.mark.parametrize(
    ("section", "edits", "message"),
    [
        ('kind = "eagle3"', (), "needs the checkpoint of a head"),
        ('kind = "ngram"\ncheckpoint = "x"', (), "needs no checkpoint"),
        ('kind = "medusa"', (), "ngram"),
        ('kind = "ngram"', (("[target]\n", "[target]\ncoupled_noise = true\n"),), "speculative excludes coupled_noise"),
        ('kind = "ngram"', (("[target]\n", '[target]\nsampler = "TRTLLMSampler"\n'),), "sampler TRTLLMSampler"),
        ('kind = "ngram"', ((LIMITS, '[lookahead.defaults]\nmode = "ar"\n' + LIMITS),), "mode=ar"),
        (
            'kind = "ngram"',
            ((LIMITS, '[lookahead.defaults]\nproposer = "ngram"\n' + LIMITS),),
            "proposer",
        ),
        (
            'kind = "ngram"',
            ((LIMITS, "[lookahead]\nengine_always_drafts = false\n" + LIMITS),),
            "leave",
        ),
        ('kind = "ngram"', (("[judge]\n", '[judge]\nspeculative = {kind = "ngram", max_draft_len = 2}\n'),), "only the target"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(
    spec_path: Path, section: str, edits: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(spec_path, section, *edits)


def test_a_compiled_engine_has_no_such_section(spec_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        load(spec_path, 'kind = "ngram"', ('runtime = "llmapi"', 'runtime = "tensorrtllm"'))
    assert DeploymentSpec.load("demo").loop_config().engine_always_drafts is False


@pytest.fixture
def models_there(spec_path: Path) -> Path:
    for seed, role in enumerate(Role):
        make_checkpoint(spec_path.parents[1] / "ck" / role, seed, Shape(heads=4, kv_heads=2))
    return spec_path


def target_memory(spec: GpuDeployment) -> EngineMemory:
    return next(engine for engine in estimate(spec, find_sources(spec))[0].engines if engine.role is Role.TARGET)


def plan_lines(spec: GpuDeployment, tmp_path: Path, *, need_checkpoints: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what is noted, what is waited for) of a plan."""
    report = plan_gpu_build(spec, tmp_path / "out", None, NGC_TOOLS, need_checkpoints=need_checkpoints).report(written=False)
    return report.notes, report.waiting


def test_what_the_engine_drafts_with_is_in_its_sums(models_there: Path) -> None:
    text = models_there.read_text()
    memory = {}
    for kind, section in (("ngram", 'kind = "ngram"'), ("draft_target", 'kind = "draft_target"'), ("eagle3", EAGLE)):
        models_there.write_text(text)
        spec = load(models_there, section)
        memory[kind] = target_memory(spec)
        assert memory[kind].draft_logits == 0 == verification_bytes(spec.target, find_sources(spec)[Role.TARGET])
    assert memory["ngram"].speculation == 0, "n-grams are looked up in the request's own text"
    assert memory["ngram"].kv_tokens == memory["draft_target"].kv_tokens == memory["eagle3"].kv_tokens
    models_there.write_text(text)
    spec = load(models_there, 'kind = "draft_target"')
    draft = find_sources(spec)[Role.DRAFT]
    split = spec.draft.model_copy(update={"tp_size": 2, "gpu_device_ids": (0, 1)})
    assert memory["draft_target"].kv_cache - memory["ngram"].kv_cache == 4096 * kv_bytes_per_token(split, draft)
    counts = draft.weights
    assert memory["draft_target"].speculation == counts.linear + counts.head + 2 * (counts.embedding + counts.replicated)
    shape = find_sources(spec)[Role.TARGET].shape
    assert memory["eagle3"].kv_cache - memory["ngram"].kv_cache == memory["ngram"].kv_cache // shape.num_layers, "one layer more"
    assert memory["eagle3"].speculation > 0


def test_the_plan_names_what_drafts_and_waits_for_a_head_that_is_not_there(models_there: Path, tmp_path: Path) -> None:
    text = models_there.read_text()
    spec = load(models_there, EAGLE)
    (note,), waiting = plan_lines(spec, tmp_path)
    assert note.startswith("the target's engine drafts by itself (a layer of the target's sizes, as the head is not there): ")
    folder = spec.root / "checkpoints" / "head"
    assert waiting == (f"target.speculative: the eagle3 checkpoint at {folder}",)
    with pytest.raises(CheckpointError, match=r"target\.speculative: .*head does not hold config\.json and weights of eagle3"):
        plan_lines(spec, tmp_path, need_checkpoints=True)

    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(CheckpointError, match=r"vocabulary of 7, the target one of \d+: it was trained for another target"):
        plan_lines(spec, tmp_path)
    (folder / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"target\.speculative: .*cannot be read"):
        plan_lines(spec, tmp_path)
    (folder / "config.json").write_text("{}")
    save_file({"fc.weight": np.zeros((16, 32), np.float16)}, folder / "model.safetensors")
    (note,), waiting = plan_lines(spec, tmp_path, need_checkpoints=True)
    assert f"(files of {folder})" in note and waiting == ()
    assert target_memory(spec).speculation == 512 * 2 // 2, "split over two cards, two bytes each"

    models_there.write_text(text)
    (note,), waiting = plan_lines(load(models_there, 'kind = "ngram"'), tmp_path)
    assert "no model, and nothing of a GPU's memory" in note and waiting == ()


def test_a_draft_model_of_its_own_must_read_the_targets_tokens(models_there: Path, tmp_path: Path) -> None:
    text = models_there.read_text()
    own = 'kind = "draft_target"\ncheckpoint = "ck/own"\nhub = "Qwen/Qwen3-0.6B"'
    spec = load(models_there, own)
    (note,), waiting = plan_lines(spec, tmp_path)
    assert "known shape of Qwen/Qwen3-0.6B" in note and waiting == (
        f"target.speculative: the draft_target checkpoint at {spec.root / 'ck' / 'own'}",
    )
    models_there.write_text(text)
    with pytest.raises(CheckpointError, match=r"target\.speculative: .*no config\.json, and no hub name is not a known model"):
        plan_lines(load(models_there, 'kind = "draft_target"\ncheckpoint = "ck/own"'), tmp_path)


def test_a_machine_of_the_target_alone_needs_the_draft_model_where_the_target_drafts_with_it(models_there: Path) -> None:
    apart = [(f"[{role}]\n", f'[{role}]\nurl = "grpc://there:8001"\n') for role in Role]
    part = load(models_there, 'kind = "draft_target"', *apart).only([Role.TARGET])
    shutil.rmtree(part.checkpoint_dir(Role.JUDGE))
    found = find_sources(part)
    assert set(found) == {Role.TARGET} and found[Role.TARGET].drafter is not None
    shutil.rmtree(part.checkpoint_dir(Role.DRAFT))
    with pytest.raises(CheckpointError, match=r"target\.speculative: .*has no config\.json"):
        find_sources(part)


def test_weights_that_the_target_drafts_with_are_needed_where_the_draft_is_elsewhere(models_there: Path, tmp_path: Path) -> None:
    spec = load(models_there, 'kind = "draft_target"', ("[draft]\n", '[draft]\nurl = "grpc://there:8001"\n'))
    assert plan_lines(spec, tmp_path)[1] == ()
    (spec.checkpoint_dir(Role.DRAFT) / "model.safetensors").unlink()
    assert plan_lines(spec, tmp_path)[1] == (
        f"target.speculative: the draft_target checkpoint at {spec.checkpoint_dir(Role.DRAFT)}",
    )
    with pytest.raises(CheckpointError, match=r"target\.speculative: .* does not hold config\.json and weights"):
        plan_lines(spec, tmp_path, need_checkpoints=True)


def test_a_loops_machine_asks_for_nothing_that_a_target_elsewhere_drafts_with(models_there: Path) -> None:
    own = 'kind = "draft_target"\ncheckpoint = "ck/own"'
    spec = load(models_there, own, ("[target]\n", '[target]\nurl = "grpc://there:8001"\n'))
    assert find_sources(spec)[Role.TARGET].drafter is None


def test_the_shipped_spec_is_emulated_with_its_drafts() -> None:
    spec = emulated("qwen3-32b-llmapi", "h200_sxm")
    assert spec.drafts_itself and spec.engine_pace(Role.TARGET).draft is not None
    assert spec.loop_config().defaults["proposer"] == "engine"


def test_the_shipped_spec_drafts_by_itself_and_is_rendered(tmp_path: Path) -> None:
    spec = DeploymentSpec.load("qwen3-32b-llmapi")
    assert isinstance(spec, GpuDeployment) and spec.speculation is not None and spec.speculation.kind == "draft_target"
    report = build_gpu_deployment(spec, tmp_path / "out", dry_run=True)
    assert report.written and not (report.steps or report.warnings or report.admission)
    (note,) = report.notes
    assert note.startswith("the target's engine drafts by itself (") and "are in its sums" in note
    rendered = (report.output / "target" / "config.pbtxt").read_text(encoding="utf-8")
    assert 'backend: "python"' in rendered and "speculative_model_dir" in rendered and "draft_target" in rendered
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    assert config.engine_always_drafts and config.limits.max_draft_len == spec.target.num_drafts
