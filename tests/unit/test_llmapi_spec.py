"""``[target.speculative]``: a target on the LLM API that drafts by itself, from the spec to the engine and the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.request import Mode
from tests.support.fake_trtllm import write_gpu_spec

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
    spec_path.write_text(spec_path.read_text().replace(DRAFTS, "\n[draft]", 1).replace("max_draft_len = 8", "max_draft_len = 0"))
    spec = GpuDeployment.load(spec_path)
    config = spec.loop_config()
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
