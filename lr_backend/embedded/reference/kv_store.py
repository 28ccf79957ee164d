"""The memory behind the KV cache: keys and values of every token, by layer and slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec


class KvStore:
    """One tensor [layers, 2, slots, kv_heads, head_dim]; a token's slot is block * tokens_per_block + offset."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, tokens_per_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.device = device
        num_slots = num_blocks * tokens_per_block
        self._rows = torch.zeros(spec.num_layers, 2, num_slots, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots of the tokens ``start`` to ``stop`` of a sequence that holds ``blocks``: int64 [stop - start]."""
        size = self.tokens_per_block
        return torch.tensor([blocks[at // size] * size + at % size for at in range(start, stop)], device=self.device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` [T, kv_heads, head_dim] at ``slots`` [T]."""
        self._rows[layer, 0, slots] = key
        self._rows[layer, 1, slots] = value

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, kv_heads, head_dim] at ``slots`` [S]."""
        return self._rows[layer, 0, slots], self._rows[layer, 1, slots]

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first rows of one block to another, in all layers."""
        size = self.tokens_per_block
        taken = self._rows[:, :, source * size : source * size + num_tokens]
        self._rows[:, :, target * size : target * size + num_tokens] = taken
