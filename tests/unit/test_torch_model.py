"""The decoder against transformers: logits of every family and rope variant, greedy generation; and checkpoints it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lr_backend.errors import CheckpointError
from lr_backend.torch_engine.model import DecoderModel
from lr_backend.torch_engine.scheduler import Chunk
from lr_backend.torch_engine.sequence import Sequence
from lr_backend.torch_engine.torch_runner import TorchRunner
from tests.support.torch_engines import VOCAB, ask, prompt, request, tiny_checkpoint, tiny_engine

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 untied": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 one kv head": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1}),
    "qwen3 no gqa": ("qwen3", {"head_dim": 8, "num_key_value_heads": 4}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn, own factor": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.3,
                "truncate": False,
                "beta_fast": 16,
            }
        },
    ),
    "llama": ("llama", {}),
    "llama3 rope": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 5e5}}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
}


def reference(name: str) -> Any:
    """A random transformers model whose norm weights and biases are not trivial."""
    family, changes = VARIANTS[name]
    config_class, model_class = FAMILIES[family]
    changes = dict(changes)
    if "rope_parameters" in changes:
        changes["rope_parameters"] = {"rope_theta": 1e4, **changes["rope_parameters"]}
    torch.manual_seed(3)
    model = model_class(config_class(**SHAPE | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.4, 1.6)
            else:
                parameter.mul_(8.0)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel.load(folder, dtype=dtype, device="cpu", max_seq_len=256)


def logits_of(model: DecoderModel, tokens: tuple[int, ...], counts: list[int]) -> torch.Tensor:
    """Logits of all positions, computed in chunks of these sizes."""
    runner = TorchRunner(model, num_blocks=40, tokens_per_block=4)
    sequence = Sequence(0, request(tokens), lambda result: None, (), 1, 4)
    sequence.table.blocks = list(range(39, 0, -1))
    parts = []
    for count in counts:
        logits, _ = runner.run([Chunk(sequence, sequence.num_computed, count, count)])
        sequence.num_computed += count
        parts.append(logits)
    return torch.cat(parts)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = reference(name)
    model.save_pretrained(tmp_path)
    tokens = prompt(120)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]

    # A long chunk, decodes, a short chunk, a long chunk over a prefix: every kind of attention.
    ours = logits_of(load(tmp_path), tokens, [50, 1, 1, 20, 48])

    assert expected.std() > 0.5
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen2", "llama3 rope"])
def test_greedy_generation_equals_transformers(name: str, tmp_path: Path) -> None:
    model = reference(name)
    model.save_pretrained(tmp_path)
    engine = tiny_engine(tmp_path)
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


def test_a_context_longer_than_the_models_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="512 positions, max_seq_len is 513"):
        DecoderModel.load(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=513)


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


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("good"), tie_word_embeddings=True)


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


REFUSED_CONFIGS = {
    "architecture GPT2LMHeadModel": {"architectures": ["GPT2LMHeadModel"]},
    "architecture none": {"architectures": []},
    "sliding window": {"use_sliding_window": True},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "hidden_act": {"hidden_act": "gelu"},
    "attention_bias": {"attention_bias": True},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "rope_type 'longrope'": {"rope_scaling": {"rope_type": "longrope"}},
    "factor": {"rope_scaling": {"rope_type": "yarn"}},
    "num_hidden_layers": {"num_hidden_layers": None},
    "do not fit": {"num_key_value_heads": 3},
    "config.json says": {"intermediate_size": 50},
    "model.layers.2": {"num_hidden_layers": 3},
    "of no use": {"num_hidden_layers": 1},
    "lm_head.weight is missing": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("names", REFUSED_CONFIGS)
def test_config_that_cannot_be_served_is_refused_by_name(names: str, checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REFUSED_CONFIGS[names]))

    with pytest.raises(CheckpointError, match=names):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights_are_refused(keep: int, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt or truncated"):
        load(checkpoint)


def test_corrupt_header_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = bytes(32)
    path.write_bytes(data)

    with pytest.raises(CheckpointError, match="corrupt"):
        load(checkpoint)


def test_values_that_are_not_finite_are_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")

    with pytest.raises(CheckpointError, match="not finite"):
        load(checkpoint)


def test_missing_files_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(checkpoint)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(checkpoint)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        load(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(checkpoint)
