"""Reading a Hugging Face checkpoint: the shape of the model, and its tensors one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lr_backend.engine.checkpoint import architecture_of, json_object, num_positions, positive_int, read_vocabulary, weight_files
from lr_backend.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What ``config.json`` says of a decoder. ``rope`` holds ``rope_type``, ``rope_theta`` and the type's own numbers."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    rope: Mapping[str, Any]

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "Qwen2ForCausalLM"


def read_spec(checkpoint_dir: Path) -> ModelSpec:
    """The model of a checkpoint.

    Raises:
        CheckpointError: no or broken ``config.json``, or something in it that this engine does not compute.
    """
    path = checkpoint_dir / "config.json"
    config = json_object(path)
    architecture = architecture_of(config, path)
    _refuse_unsupported(config, path)
    spec = _spec(config, architecture, path)
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise CheckpointError(f"{path}: {spec.num_heads} heads over {spec.num_kv_heads} of size {spec.head_dim} do not fit")
    return spec


def num_token_ids(checkpoint_dir: Path, spec: ModelSpec) -> int:
    """How many ids there are to be drawn: the tokenizer's, which the width of the logits may exceed; without one, that width.

    Tokens that ``tokenizer_config.json`` adds count too, as transformers has them: the end of the answer may be one.

    Raises:
        CheckpointError: a file of the tokenizer is malformed.
    """
    if not (checkpoint_dir / "tokenizer.json").is_file():
        return spec.vocab_size
    path = checkpoint_dir / "tokenizer_config.json"
    added = json_object(path).get("added_tokens_decoder") if path.is_file() else None
    try:
        highest = max([*read_vocabulary(checkpoint_dir).values(), *map(int, added or ())], default=spec.vocab_size)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is malformed: {error!r}") from error
    return min(highest + 1, spec.vocab_size)


def check_length(spec: ModelSpec, max_seq_len: int, checkpoint_dir: Path) -> None:
    """Raises: CheckpointError: the model has fewer positions than a sequence may have."""
    if max_seq_len > spec.max_positions:
        raise CheckpointError(f"{checkpoint_dir}: the model has {spec.max_positions} positions, max_seq_len is {max_seq_len}")


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    refused = {
        "sliding window attention (use_sliding_window, layer_types)": bool(sliding),
        "quantization_config": bool(config.get("quantization_config")),
        "hidden_act other than silu": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name, present in refused.items():
        if present:
            raise CheckpointError(f"{path}: {name} is not supported by the embedded engine")


def _spec(config: Mapping[str, Any], architecture: str, path: Path) -> ModelSpec:
    num_heads = positive_int(config, "num_attention_heads", path)
    hidden_size = positive_int(config, "hidden_size", path)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=positive_int(config, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", path, num_heads),
        head_dim=positive_int(config, "head_dim", path, hidden_size // num_heads),
        intermediate_size=positive_int(config, "intermediate_size", path),
        vocab_size=positive_int(config, "vocab_size", path),
        rms_norm_eps=_real(config, "rms_norm_eps", path),
        max_positions=num_positions(config, path),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config, path),
    )


def _real(values: Mapping[str, Any], name: str, path: Path) -> float:
    value = values.get(name)
    if not isinstance(value, int | float):
        raise CheckpointError(f"{path}: {name}={value!r} must be a number")
    return float(value)


def _above(least: float, values: Mapping[str, Any], name: str, path: Path) -> float:
    value = _real(values, name, path)
    if not (least < value < math.inf):
        raise CheckpointError(f"{path}: {name}={value!r} must be a finite number above {least:g}")
    return value


def _rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Rope settings of both spellings: ``rope_parameters`` (transformers 5) or ``rope_scaling`` with ``rope_theta``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ROPE_TYPES:
        raise CheckpointError(f"{path}: rope_type {rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}")
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("original_max_position_embeddings", positive_int(config, "max_position_embeddings", path))
    _above(1.0, rope, "rope_theta", path)
    own = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor"), "yarn": ("factor",)}
    optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    given = [name for name in optional if rope["rope_type"] == "yarn" and rope.get(name)]
    for name in ("original_max_position_embeddings", *own.get(rope["rope_type"], ()), *given):
        _above(0.0, rope, name, path)
    if rope["rope_type"] == "llama3":
        _above(float(rope["low_freq_factor"]), rope, "high_freq_factor", path)
    return rope


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


class TensorFiles:
    """The tensors of a checkpoint by name, whichever files hold them; each is read when asked for."""

    def __init__(self, checkpoint_dir: Path) -> None:
        """Raises: CheckpointError: a file is missing, truncated or no safetensors file."""
        self._files: dict[str, Any] = {}
        self._unread: set[str] = set()
        for path in weight_files(checkpoint_dir):
            try:
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{path} is corrupt or truncated: {error}") from error
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._files |= dict.fromkeys(names, file)
        self._unread = set(self._files)

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor, in the type it is stored in, and in memory of its own: the file may be replaced while it is served.

        Raises:
            CheckpointError: absent, another shape, not finite.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing")
        try:
            tensor: torch.Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name} holds values that are not finite numbers")
        self._unread.discard(name)
        return tensor

    def require_all_read(self, *optional: str) -> None:
        """Raises: CheckpointError: the files hold weights that the model did not take, so it is not the model we built."""
        unknown = {name for name in self._unread - set(optional) if not name.endswith("rotary_emb.inv_freq")}
        if unknown:
            raise CheckpointError(f"tensors of no use to this architecture: {', '.join(sorted(unknown)[:4])}")
