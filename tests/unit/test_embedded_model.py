"""The decoder against transformers: logits of every family and rope variant, greedy generation; and checkpoints it refuses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from lr_backend.embedded.checkpoint import TensorFiles, read_spec
from lr_backend.embedded.native.model import NativeModel
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.errors import CheckpointError
from tests.support.embedded_engines import KERNELS, ask, prompt, request, tiny_checkpoint, tiny_engine
from tests.support.reference_models import logits_of, logits_of_reference, reference_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 untied": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 one kv head": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1}),
    "qwen3 no gqa": ("qwen3", {"head_dim": 8, "num_key_value_heads": 4}),
    "qwen3 yarn": ("qwen3", {"rope": "yarn"}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn, own factor": ("qwen2", {"rope": "yarn, own factor"}),
    "llama": ("llama", {}),
    "llama3 rope": ("llama", {"rope": "llama3"}),
    "llama linear rope": ("llama", {"rope": "linear"}),
}


def reference(name: str) -> Any:
    family, changes = VARIANTS[name]
    return reference_model(family, **changes)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel.load(folder, dtype=dtype, device="cpu", max_seq_len=256)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = reference(name)
    model.save_pretrained(tmp_path)
    tokens = prompt(120)
    expected = logits_of_reference(model, tokens)

    # A prompt, decodes, a short chunk, a long chunk over a prefix.
    ours = logits_of(load(tmp_path), tokens, [50, 1, 1, 20, 48])

    assert expected.std() > 0.5
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["qwen3 tied", "qwen2", "llama3 rope"])
def test_greedy_generation_equals_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    model = reference(name)
    model.save_pretrained(tmp_path)
    engine = tiny_engine(tmp_path, kernels=kernels)
    prompts = [prompt(length, length) for length in (1, 5, 33, 90)]

    answers = ask(engine, *(request(one, 24) for one in prompts))
    engine.close()

    for one, answer in zip(prompts, answers, strict=True):
        expected = model.generate(
            torch.tensor([one]), attention_mask=torch.ones(1, len(one)), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert list(answer.token_ids) == expected[0, len(one) :].tolist()


def test_sharded_checkpoints_equal_whole_ones(tmp_path: Path) -> None:
    model = reference("qwen3 untied")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2

    whole, sharded = (logits_of(load(tmp_path / name), prompt(20), [20]) for name in ("whole", "sharded"))

    assert torch.equal(whole, sharded)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1.0)
    exact = logits_of(load(tmp_path), prompt(40), [30, 1, 9])
    rounded = logits_of(load(tmp_path, torch.bfloat16), prompt(40), [30, 1, 9])

    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).min() > 0.99


def test_older_spelling_of_rope_settings(tmp_path: Path) -> None:
    model = reference("llama3 rope")
    model.save_pretrained(tmp_path)
    expected = logits_of(load(tmp_path), prompt(30), [30])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert torch.equal(logits_of(load(tmp_path), prompt(30), [30]), expected)


# What is refused is refused by both in the same words.


class Open(Protocol):
    """Reads a checkpoint and makes the model that computes it."""

    def __call__(self, folder: Path, max_seq_len: int = 256) -> object: ...


@pytest.fixture(params=KERNELS)
def opened(request: pytest.FixtureRequest) -> Open:
    def by_torch(folder: Path, max_seq_len: int = 256) -> object:
        return DecoderModel.load(folder, dtype=torch.float32, device="cpu", max_seq_len=max_seq_len)

    def natively(folder: Path, max_seq_len: int = 256) -> object:
        return NativeModel.load(folder, max_seq_len=max_seq_len)

    return by_torch if request.param == "reference" else natively


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("good"), head_dim=16, tie_word_embeddings=True)


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


def test_a_context_longer_than_the_models_is_refused(checkpoint: Path, opened: Open) -> None:
    opened(checkpoint, 512)
    with pytest.raises(CheckpointError, match="512 positions, max_seq_len is 513"):
        opened(checkpoint, 513)


LLAMA_3_2 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Its factor says how waves are stretched; more positions than those of ``config.json`` it was not trained for."""


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (LLAMA_3_2, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}, 2048),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_what_stretches_a_context(scaling: dict[str, Any], longest: int, checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    assert read_spec(checkpoint).max_positions == longest


REFUSED_CONFIGS = {
    "architecture GPT2LMHeadModel": {"architectures": ["GPT2LMHeadModel"]},
    "architecture None": {"architectures": []},
    "sliding window": {"use_sliding_window": True},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "hidden_act": {"hidden_act": "gelu"},
    "attention_bias": {"attention_bias": True},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "rope_type 'longrope'": {"rope_scaling": {"rope_type": "longrope"}},
    "factor": {"rope_scaling": {"rope_type": "yarn"}},
    "config.json: rope_theta=0": {"rope_theta": 0},
    "config.json: factor=0.0": {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
    "config.json: factor=inf": {"rope_scaling": {"rope_type": "yarn", "factor": math.inf}},
    "config.json: beta_fast=-1": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}},
    "config.json: high_freq_factor=1": {"rope_scaling": LLAMA_3_2 | {"high_freq_factor": 1.0}},
    "num_hidden_layers=None": {"num_hidden_layers": None},
    "vocab_size=True": {"vocab_size": True},
    "do not fit": {"num_key_value_heads": 3},
    "config.json says": {"intermediate_size": 50},
    "model.layers.2": {"num_hidden_layers": 3},
    "of no use": {"num_hidden_layers": 1},
    "lm_head.weight is missing": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("names", REFUSED_CONFIGS)
def test_config_that_cannot_be_served_is_refused_by_name(names: str, checkpoint: Path, opened: Open) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REFUSED_CONFIGS[names]))

    with pytest.raises(CheckpointError, match=names):
        opened(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights_are_refused(keep: int, checkpoint: Path, opened: Open) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt or truncated"):
        opened(checkpoint)


def test_corrupt_header_is_refused(checkpoint: Path, opened: Open) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = bytes(32)
    path.write_bytes(data)

    with pytest.raises(CheckpointError, match="corrupt"):
        opened(checkpoint)


def test_values_that_are_not_finite_are_refused(checkpoint: Path, opened: Open) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")

    with pytest.raises(CheckpointError, match="not finite"):
        opened(checkpoint)


def test_a_file_that_is_replaced_changes_nothing_that_is_served(tmp_path: Path) -> None:
    """In place, as ``cp`` does it."""
    file = tiny_checkpoint(tmp_path) / "model.safetensors"
    tensor = TensorFiles(tmp_path).read("model.norm.weight", 32)
    before = tensor.clone()
    with file.open("r+b") as other:
        other.write(bytes(file.stat().st_size))
    assert torch.equal(tensor, before)


def test_missing_files_are_refused(checkpoint: Path, opened: Open) -> None:
    first = (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        opened(checkpoint)
    index = {"weight_map": {"model.norm.weight": first.name, "lm_head.weight": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing \(1 of 2 weight files are\)"):
        opened(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        opened(checkpoint)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        opened(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened(checkpoint)
    (checkpoint / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        opened(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        opened(checkpoint)
