"""Random checkpoints and models of any supported shape, for benchmarks and tests: no training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lr_backend.embedded.checkpoint import ModelSpec, read_spec, tensor_shapes
from lr_backend.embedded.reference.model import DecoderModel

MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
"""What transformers calls the architectures."""


def write_random_checkpoint(folder: Path, *, gain: float = 1.0, seed: int = 0, **shape: Any) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the folder.

    Args:
        gain: factor on the weights; larger ones make outputs depend more sharply on the input.
        shape: as in :func:`write_random_config`.
    """
    write_random_config(folder, **shape)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(size, gain, generator) for name, size in tensor_shapes(read_spec(folder)).items()}
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


# Long: a parameter for each key of ``config.json`` that tests vary.
def write_random_config(
    folder: Path,
    *,
    architecture: str = "Qwen3ForCausalLM",
    hidden_size: int = 320,
    num_layers: int = 6,
    num_heads: int = 5,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    intermediate_size: int = 896,
    vocab_size: int = 1024,
    max_position_embeddings: int = 4096,
    tie_word_embeddings: bool = True,
    **extra: Any,
) -> Path:
    """Write ``config.json`` alone, for an engine that draws its weights; returns the folder.

    There is an argument for each entry that describes a shape.

    Args:
        extra: further entries of ``config.json`` (rope settings, say).
    """
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_word_embeddings,
        **extra,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def random_model(spec: ModelSpec, *, dtype: torch.dtype, device: str, max_seq_len: int, seed: int = 0) -> DecoderModel:
    """A model made where it computes, without files; it costs what a checkpoint of ``spec`` does."""
    return DecoderModel(spec, random_weights(spec, dtype=dtype, device=device, seed=seed), max_seq_len=max_seq_len)


def random_weights(spec: ModelSpec, *, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Its weights by their names in a checkpoint."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)
        if len(shape) > 1
        else torch.ones(shape, dtype=dtype, device=device)
        for name, shape in tensor_shapes(spec).items()
    }


def _random(shape: tuple[int, ...], gain: float, generator: torch.Generator) -> torch.Tensor:
    """Norm weights about one, matrices so that rows keep their length, times ``gain``."""
    if len(shape) == 1:
        return 0.5 + torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator) * (gain / math.sqrt(shape[1]))
