"""The decoder in plain torch, written as the model families define it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec, TensorFiles, check_length, read_spec, tensor_shapes
from lr_backend.embedded.rope import rope_table


class Attention(Protocol):
    """Stores the new keys and values of one layer and attends over all that are stored."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [T, heads, head_dim], ``key`` and ``value`` [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        ...


class DecoderModel:
    """Qwen3, Qwen2 or Llama. The sequences of an iteration lie one after another: T rows in all."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], *, max_seq_len: int) -> None:
        """``weights``: by their names in a checkpoint (:func:`~lr_backend.embedded.checkpoint.tensor_shapes`)."""
        self.spec = spec
        self.weights = weights
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        self._head = embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
        self._cosines, self._sines = (part.to(self.device) for part in rope_table(spec.rope, spec.head_dim, max_seq_len + 1))

    @classmethod
    def load(cls, checkpoint_dir: Path, *, dtype: torch.dtype, device: str, max_seq_len: int) -> Self:
        """Read a checkpoint tensor by tensor, so that the peak is the model plus its largest tensor.

        Raises:
            CheckpointError: the folder cannot be served; names what is wrong.
        """
        spec = read_spec(checkpoint_dir)
        check_length(spec, max_seq_len, checkpoint_dir)
        files = TensorFiles(checkpoint_dir)
        shapes = tensor_shapes(spec)
        weights = {name: files.read(name, *shape).to(device=device, dtype=dtype) for name, shape in shapes.items()}
        files.require_all_read(*(("lm_head.weight",) if spec.tie_word_embeddings else ()))
        return cls(spec, weights, max_seq_len=max_seq_len)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor) -> Tensor:
        """Logits, float32 [R, vocabulary], of the rows ``logit_rows``.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], of each token in its own sequence.
            logit_rows: int64 [R].
        """
        hidden = self.weights["model.embed_tokens.weight"][token_ids]
        rotation = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        for layer in range(self.spec.num_layers):
            prefix = f"model.layers.{layer}."
            hidden = hidden + self._attended(layer, self._normed(hidden, f"{prefix}input_layernorm"), rotation, attention)
            hidden = hidden + self._mlp(f"{prefix}mlp.", self._normed(hidden, f"{prefix}post_attention_layernorm"))
        return F.linear(self._normed(hidden[logit_rows], "model.norm"), self._head).float()

    def _attended(self, layer: int, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn."
        query, key, value = (
            self._product(rows, f"{prefix}{name}_proj").view(len(rows), -1, self.spec.head_dim) for name in ("q", "k", "v")
        )
        if self.spec.qk_norm:
            query, key = self._normed(query, f"{prefix}q_norm"), self._normed(key, f"{prefix}k_norm")
        heads = attention(layer, rotated(query, *rotation), rotated(key, *rotation), value)
        return self._product(heads.flatten(1), f"{prefix}o_proj")

    def _mlp(self, prefix: str, rows: Tensor) -> Tensor:
        gate = F.silu(self._product(rows, f"{prefix}gate_proj"))
        return self._product(gate * self._product(rows, f"{prefix}up_proj"), f"{prefix}down_proj")

    def _product(self, rows: Tensor, name: str) -> Tensor:
        return F.linear(rows, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension, computed in float32."""
        return rms_normed(rows, self.weights[f"{name}.weight"], self.spec.rms_norm_eps)


def rms_normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32."""
    exact = rows.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(rows.dtype) * weight


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of ``heads`` [T, heads, head_dim] by its position's angle."""
    first, second = heads.float().chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(heads.dtype)
