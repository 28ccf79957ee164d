"""The memory behind the KV cache: one tensor [layers, blocks * tokens_per_block, 2 * kv_heads * head_dim].

A row holds the keys of all heads, then the values. Writing new tokens is one index copy a layer, gathering a sequence is one
index select of whole blocks. Two blocks are never handed out: the padding block, all zeros, pads gathers; the scratch block takes
what must be written somewhere and is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvStore:
    """Rows of keys and values by slot (block * tokens_per_block + offset)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.width = 2 * num_kv_heads * head_dim
        self.padding_block = num_blocks
        self.scratch_block = num_blocks + 1
        shape = (num_layers, (num_blocks + 2) * tokens_per_block, self.width)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.device = device
        self._layer_rows = list(self.rows.unbind(0))
        self._blocks = self.rows.view(num_layers, num_blocks + 2, tokens_per_block * self.width)
        self._layer_blocks = list(self._blocks.unbind(0))

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Store rows [T, width] at int64 ``slots`` [T]."""
        self._layer_rows[layer].index_copy_(0, slots, key_value)

    def gather(self, layer: int, blocks: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of int64 ``blocks`` [batch * n], each [batch, kv_heads, n * tokens_per_block, head_dim]."""
        rows = self._layer_blocks[layer].index_select(0, blocks)
        return self.split_heads(rows.view(batch, -1, self.width))

    def gather_all_layers(self, blocks: Tensor) -> Tensor:
        """Rows [layers, n * tokens_per_block, width] of int64 ``blocks`` [n]."""
        return self._blocks.index_select(1, blocks).view(self.rows.shape[0], -1, self.width)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first rows of one block to another, in all layers."""
        size = self.tokens_per_block
        taken = self.rows[:, source * size : source * size + num_tokens]
        self.rows[:, target * size : target * size + num_tokens] = taken

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: a masked row may be stale, but never not-a-number."""
        self._blocks[:, list(blocks)] = 0

    def split_heads(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views of rows [..., S, width] as keys and values [..., kv_heads, S, head_dim]."""
        heads = rows.view(*rows.shape[:-1], 2, self.num_kv_heads, self.head_dim)
        keys, values = heads.unbind(-3)
        return keys.transpose(-3, -2), values.transpose(-3, -2)
