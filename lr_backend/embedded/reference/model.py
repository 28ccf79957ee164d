"""The decoder: all sequences of an iteration flattened to rows [T, hidden], attention handed to the plan.

Written so that a small model on a CPU spends its time in matrix products: query, key and value are one product, and so are
gate and up; norm weights are folded into the product that follows; q and k are normed and rotated together and in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec, TensorFiles, check_length, read_spec
from lr_backend.embedded.reference.product import (
    LARGEST_HALF,
    PACKERS,
    DenseProduct,
    Product,
    available_packers,
    fastest_kind,
    is_available,
)
from lr_backend.embedded.reference.rope import interleave_pairs, rope_table
from lr_backend.errors import ConfigError

MAX_TIED_HEAD_COPY_BYTES = 64 << 20
"""A tied output head is copied to the faster layout up to this size."""


class Attention(Protocol):
    """Writes the new keys and values of one layer to the cache and attends over it."""

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """``query`` [T, heads * head_dim], ``key_value`` [T, 2 * kv_heads * head_dim] -> [T, heads * head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; norms are folded into ``qkv`` and ``gate_up``."""

    qkv: Product
    qk_norm: Tensor | None
    output: Product
    gate_up: Product
    down: Product


class DecoderModel:
    """Qwen3, Qwen2 or Llama. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, spec: ModelSpec, layers: list[Layer], embedding: Tensor, norm: Tensor, head: Product, rotations: Tensor
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.embedding = embedding
        self.norm = norm
        self.head = head
        self.rotations = rotations
        self.dtype = embedding.dtype
        self.device = embedding.device
        # A cast to the same type changes nothing, but costs a call, and these are made dozens of times a token.
        self._is_exact = self.dtype is torch.float32
        self._hidden_eps = torch.tensor(math.sqrt(spec.hidden_size * spec.rms_norm_eps), device=self.device)
        self._head_eps = torch.tensor(math.sqrt(spec.head_dim * spec.rms_norm_eps), device=self.device)

    @classmethod
    def load(
        cls,
        checkpoint_dir: Path,
        *,
        dtype: torch.dtype,
        device: str,
        max_seq_len: int,
        weight_dtype: str = "same",
        num_threads: int | None = None,
    ) -> Self:
        """Read a checkpoint tensor by tensor, so that the peak is the model plus its largest tensor.

        Args:
            weight_dtype: ``same`` as ``dtype``, ``float16`` or ``int8`` (see :mod:`~lr_backend.embedded.reference.product`), or
                ``auto``: the fastest of them, timed with ``num_threads``.

        Raises:
            CheckpointError: anything in the folder that keeps it from being served, by name.
            ConfigError: packed weights where torch has no kernel for them.
        """
        if weight_dtype in ("float16", "int8") and not is_available(weight_dtype):
            raise ConfigError(f"weight_dtype={weight_dtype!r}: this torch has no such kernel for this CPU")
        spec = read_spec(checkpoint_dir)
        check_length(spec, max_seq_len, checkpoint_dir)
        kind = weight_dtype
        if kind == "auto":
            packable = (device, dtype) == ("cpu", torch.float32)
            kind = fastest_kind(available_packers(), layer_shapes(spec), spec.num_layers, num_threads) if packable else "same"
        loader = _Loader(spec, TensorFiles(checkpoint_dir), dtype, device, kind)
        layers = [loader.layer(index) for index in range(spec.num_layers)]
        embedding, norm, head = loader.ends()
        loader.files.require_all_read(*(("lm_head.weight",) if spec.tie_word_embeddings else ()))
        rotations = rope_table(spec.rope, spec.head_dim, max_seq_len + 1).to(device)
        return cls(spec, layers, embedding, norm, head, rotations)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor | None) -> Tensor:
        """Logits, float32 [R, vocabulary], of the rows asked for (all T when None).

        Args:
            token_ids: int64 [T].
            positions: int64 [T], of each token in its own sequence.
        """
        hidden = self.embedding.index_select(0, token_ids)
        rotations = self.rotations.index_select(0, positions).unsqueeze(1)
        widths = [self.spec.num_heads * self.spec.head_dim, 2 * self.spec.num_kv_heads * self.spec.head_dim]
        for index, layer in enumerate(self.layers):
            normed = self._normed(hidden)
            qkv = layer.qkv(normed)
            self._rotate(qkv, layer.qk_norm, rotations)
            query, key_value = torch.split(qkv, widths, 1)
            layer.output.add_to(hidden, attention(index, query, key_value))
            gate, up = layer.gate_up(self._normed(hidden)).chunk(2, 1)
            layer.down.add_to(hidden, F.silu(gate).mul_(up))
        rows = hidden if logit_rows is None else hidden.index_select(0, logit_rows)
        return self.head(self._normed(rows).mul_(self.norm)).float()

    def _normed(self, hidden: Tensor) -> Tensor:
        """RMS norm without weight and without the factor sqrt(hidden_size), both folded into the product that follows."""
        rows = hidden if self._is_exact else hidden.float()
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        normed = rows / torch.hypot(length, self._hidden_eps)
        return normed if self._is_exact else normed.to(self.dtype)

    def _rotate(self, qkv: Tensor, norm: Tensor | None, rotations: Tensor) -> None:
        """Norm (Qwen3) and rotate q and k of ``qkv`` in place."""
        spec = self.spec
        num_heads = spec.num_heads + spec.num_kv_heads
        stored = qkv[:, : num_heads * spec.head_dim].view(-1, num_heads, spec.head_dim)
        heads = stored if self._is_exact else stored.float()
        if norm is not None:
            length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
            heads.div_(torch.hypot(length, self._head_eps)).mul_(norm)
        torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2)).mul_(rotations)
        if not self._is_exact:
            stored.copy_(heads)


def layer_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(out, in) of the products of one layer, in the order of :class:`Layer`."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    return [(width + 2 * spec.num_kv_heads * spec.head_dim, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)]


class _Loader:
    """Turns stored tensors into the layout above."""

    def __init__(self, spec: ModelSpec, files: TensorFiles, dtype: torch.dtype, device: str, kind: str) -> None:
        self.spec = spec
        self.files = files
        self._dtype = dtype
        self._device = device
        self._kind = kind

    def layer(self, index: int) -> Layer:
        spec, prefix = self.spec, f"model.layers.{index}."
        hidden, attention = spec.hidden_size, f"{prefix}self_attn."
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        input_norm = self._scale(f"{prefix}input_layernorm.weight", hidden)
        mlp_norm = self._scale(f"{prefix}post_attention_layernorm.weight", hidden)
        mlp = dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size)
        return Layer(
            qkv=self._product(
                self._fused(attention, widths, input_norm), self._bias(attention, widths) if spec.qkv_bias else None
            ),
            qk_norm=self._qk_norm(attention) if spec.qk_norm else None,
            output=self._product(self.files.read(f"{attention}o_proj.weight", hidden, q_width)),
            gate_up=self._product(self._fused(f"{prefix}mlp.", mlp, mlp_norm)),
            down=self._product(self.files.read(f"{prefix}mlp.down_proj.weight", hidden, spec.intermediate_size)),
        )

    def ends(self) -> tuple[Tensor, Tensor, Product]:
        """Embedding [vocabulary, hidden], final norm [hidden], head."""
        spec = self.spec
        shape = (spec.vocab_size, spec.hidden_size)
        embedding = self._placed(self.files.read("model.embed_tokens.weight", *shape)).contiguous()
        norm = self._placed(self._scale("model.norm.weight", spec.hidden_size))
        # Tokens are chosen by the head's logits: it is not rounded to int8.
        kind = "float16" if self._kind == "int8" else self._kind
        if not spec.tie_word_embeddings:
            return embedding, norm, self._product(self.files.read("lm_head.weight", *shape), kind=kind)
        small = embedding.numel() * embedding.element_size() <= MAX_TIED_HEAD_COPY_BYTES
        return embedding, norm, self._product(embedding, kind=kind) if self._packs or small else DenseProduct(embedding.t())

    @property
    def _packs(self) -> bool:
        return self._kind != "same"

    def _product(self, weight: Tensor, bias: Tensor | None = None, kind: str | None = None) -> Product:
        """The product with ``weight`` [out, in]. Weights out of float16's range stay as they are."""
        kind = kind or self._kind
        if kind == "same" or (kind == "float16" and weight.abs().max() > LARGEST_HALF):
            return DenseProduct.pack(self._placed(weight), bias)
        return PACKERS[kind](weight.float(), bias)

    def _fused(self, prefix: str, widths: dict[str, int], norm: Tensor) -> Tensor:
        """Several matrices below each other, the norm before them folded in: [out, hidden]."""
        hidden = self.spec.hidden_size
        fused = torch.empty(sum(widths.values()), hidden, dtype=torch.float32 if self._packs else self._dtype)
        start = 0
        for name, width in widths.items():
            weight = self._ordered(name, self.files.read(f"{prefix}{name}.weight", width, hidden).float())
            fused[start : start + width] = weight * norm
            start += width
        return fused

    def _bias(self, prefix: str, widths: dict[str, int]) -> Tensor:
        biases = [self._ordered(name, self.files.read(f"{prefix}{name}.bias", width)) for name, width in widths.items()]
        return self._placed(torch.cat(biases))

    def _ordered(self, name: str, weight: Tensor) -> Tensor:
        return interleave_pairs(weight, self.spec.head_dim) if name in ("q_proj", "k_proj") else weight

    def _qk_norm(self, prefix: str) -> Tensor:
        """Norm weights by head, queries then keys: float32 [heads + kv_heads, head_dim]."""
        spec, rows = self.spec, []
        for name, count in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            scale = interleave_pairs(self._scale(f"{prefix}{name}.weight", spec.head_dim), spec.head_dim)
            rows.append(scale.expand(count, -1))
        return torch.cat(rows).to(self._device)

    def _scale(self, name: str, width: int) -> Tensor:
        """A norm's weight times the sqrt(width) that our norm leaves out, float32."""
        return self.files.read(name, width).float() * math.sqrt(width)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)
