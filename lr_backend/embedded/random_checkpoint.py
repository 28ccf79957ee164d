"""Random checkpoints and models of any supported shape, for benchmarks and tests: no training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lr_backend.embedded.checkpoint import ModelSpec, read_spec
from lr_backend.embedded.reference.model import DecoderModel, Layer, layer_shapes
from lr_backend.embedded.reference.product import DenseProduct
from lr_backend.embedded.reference.rope import rope_table

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
    """A model made where it computes, without files: what it costs is that of a checkpoint of ``spec``, its biases left out."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, 1.0 / math.sqrt(rows), generator=generator)

    heads = spec.num_heads + spec.num_kv_heads
    norm = torch.full((heads, spec.head_dim), math.sqrt(spec.head_dim), device=device) if spec.qk_norm else None
    layers = []
    for _ in range(spec.num_layers):
        qkv, output, gate_up, down = (DenseProduct(matrix(columns, rows)) for rows, columns in layer_shapes(spec))
        layers.append(Layer(qkv=qkv, qk_norm=norm, output=output, gate_up=gate_up, down=down))
    embedding = matrix(spec.vocab_size, spec.hidden_size)
    head = DenseProduct(embedding.t() if spec.tie_word_embeddings else matrix(spec.hidden_size, spec.vocab_size))
    ones = torch.ones(spec.hidden_size, dtype=dtype, device=device)
    rotations = rope_table(spec.rope, spec.head_dim, max_seq_len + 1).to(device)
    return DecoderModel(spec, layers, embedding, ones, head, rotations)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name."""
    hidden, kv_width, q_width = spec.hidden_size, spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "mlp.gate_proj.weight": (spec.intermediate_size, hidden),
        "mlp.up_proj.weight": (spec.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, spec.intermediate_size),
    }
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    if spec.qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_width,),
            "self_attn.k_proj.bias": (kv_width,),
            "self_attn.v_proj.bias": (kv_width,),
        }
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _random(shape: tuple[int, ...], gain: float, generator: torch.Generator) -> torch.Tensor:
    """Norm weights about one, matrices so that rows keep their length, times ``gain``."""
    if len(shape) == 1:
        return 0.5 + torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator) * (gain / math.sqrt(shape[1]))
