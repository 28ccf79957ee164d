"""Keys and values of the sequences that decode now, kept side by side, so that a decode iteration gathers nothing.

The pool stays the truth: every row is written there too. The window is a copy by batch row, each head's keys side by side; a
sequence that stays costs one appended token an iteration, one that joins costs one gather. Rows are kept dense: the last rows
move into holes.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.transfer import to_device

LENGTH_STEP = 256
"""Rows of a window are long enough for this many tokens more than the longest sequence, so that growing is rare."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decoding sequence: ``length`` tokens are in the pool, and the next is computed in this iteration."""

    key: int
    length: int
    blocks: Items[int]


class DecodeWindow:
    """A [layers, keys and values, batch, kv_heads, length, head_dim] window over the pool; the engine's thread owns it."""

    def __init__(self, store: KvStore, max_tokens: int) -> None:
        """``max_tokens``: most batch * length; a batch over it is not held (:meth:`arrange` says so).

        ``generation`` counts how often the window got new memory; views and positions are of one generation.
        """
        self._store = store
        self._max_tokens = max_tokens
        self.batch = 0
        self.length = 0
        self.generation = 0
        self._held: list[tuple[int, int] | None] = []
        self._rows = store.rows.new_empty(0)
        self._flat: list[Tensor] = []
        self._heads = torch.empty(0, dtype=torch.int64)

    def forget(self) -> None:
        """Drop all content and its memory: after a failed iteration nothing in here is known to be right."""
        self.batch, self.length, self._held = 0, 0, []

    def arrange(self, rows: Items[DecodeRow]) -> list[int] | None:
        """Bring exactly these sequences into the window; returns the indices of ``rows`` in window order.

        None when they do not fit: the caller then gathers as for any short chunk.
        """
        if not self._fit(rows):
            self.forget()
            return None
        index_of = {(row.key, row.length): index for index, row in enumerate(rows)}
        order: list[int | None] = [index_of.pop(held, None) if held is not None else None for held in self._held[: len(rows)]]
        order += [None] * (len(rows) - len(order))
        newcomers = iter(index_of.values())
        for place, index in enumerate(order):
            if index is None:
                order[place] = newcomer = next(newcomers)
                self._load(place, rows[newcomer])
        arranged = [index for index in order if index is not None]
        self._held = [(rows[index].key, rows[index].length + 1) for index in arranged]
        return arranged

    def positions(self, rows: Items[DecodeRow]) -> Tensor:
        """Where each arranged row's new keys and values go, head by head: int64 [rows * 2 * kv_heads]."""
        heads = self._store.num_kv_heads
        starts = [place * heads * self.length + row.length for place, row in enumerate(rows)]
        return (to_device(starts, self._store.device)[:, None] + self._heads).flatten()

    def positions_at(self, lengths: Tensor) -> Tensor:
        """The same for the first rows, from the tokens that each holds: int64 [rows]."""
        starts = torch.arange(len(lengths), device=lengths.device) * (self._store.num_kv_heads * self.length) + lengths
        return (starts[:, None] + self._heads).flatten()

    def append(self, layer: int, positions: Tensor, key_value: Tensor) -> None:
        self._flat[layer].index_copy_(0, positions, key_value.reshape(len(positions), -1))

    def view(self, layer: int, places: slice, tokens: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [places, kv_heads, tokens, head_dim], without a copy (and each in one call, which counts here)."""
        store, rows = self._store, self._flat[layer]
        size = (places.stop - places.start, store.num_kv_heads, tokens.stop - tokens.start, store.head_dim)
        head = self.length * store.head_dim
        stride = (store.num_kv_heads * head, head, store.head_dim, 1)
        first = rows.storage_offset() + places.start * stride[0] + tokens.start * store.head_dim
        return rows.as_strided(size, stride, first), rows.as_strided(size, stride, first + self.batch * stride[0])

    def _fit(self, rows: Items[DecodeRow]) -> bool:
        """Grow for these rows if need be; False when that would pass the limit."""
        longest = max(row.length for row in rows) + 1
        if len(rows) <= self.batch and longest <= self.length:
            return True
        batch = max(self.batch, 1 << (len(rows) - 1).bit_length())
        length = self.length if longest <= self.length else _round_up(longest, LENGTH_STEP) + LENGTH_STEP
        length = _round_up(length, self._store.tokens_per_block)
        store = self._store
        if batch * length > self._max_tokens:
            batch = len(rows)
            length = min(length, self._max_tokens // batch // store.tokens_per_block * store.tokens_per_block)
        if longest > length:
            return False
        num_layers, heads, head_dim = store.rows.shape[0], store.num_kv_heads, store.head_dim
        self.batch, self.length, self._held = batch, length, []
        self.generation += 1
        self._rows, self._flat = store.rows.new_empty(0), []  # before the new memory is taken
        self._rows = store.rows.new_zeros(num_layers, 2, batch, heads, length, head_dim)
        self._flat = list(self._rows.view(num_layers, -1, head_dim).unbind(0))
        keys = torch.arange(heads, device=store.device) * length
        self._heads = torch.cat([keys, keys + batch * heads * length])
        return True

    def _load(self, place: int, row: DecodeRow) -> None:
        size = self._store.tokens_per_block
        blocks = to_device(row.blocks[: -(-row.length // size)], self._store.device, torch.int64)
        if len(blocks):
            keys, values = self._store.split_heads(self._store.gather_all_layers(blocks))
            self._rows[:, 0, place, :, : len(blocks) * size] = keys
            self._rows[:, 1, place, :, : len(blocks) * size] = values


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
