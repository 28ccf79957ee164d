"""Keys and values of the sequences that decode now, kept side by side, so that a decode iteration gathers nothing.

The pool stays the truth: every row is written there too. The window is a copy by batch row; a sequence that stays costs one
appended row an iteration, one that joins costs one gather. Rows are kept dense: the last rows move into holes.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from lr_backend.torch_engine.kv_store import KvStore

LENGTH_STEP = 256
"""Rows of a window are long enough for this many tokens more than the longest sequence, so that growing is rare."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decoding sequence: ``length`` tokens are in the pool, and the next is computed in this iteration."""

    key: int
    length: int
    blocks: Items[int]


class DecodeWindow:
    """A [batch, length] window over the pool; the engine's thread owns it."""

    def __init__(self, store: KvStore, max_tokens: int) -> None:
        """``max_tokens``: most batch * length; a batch over it is not held (:meth:`arrange` says so)."""
        self._store = store
        self._max_tokens = max_tokens
        self._batch = 0
        self._length = 0
        self._held: list[tuple[int, int] | None] = []
        self._rows = store.rows.new_empty(0)
        self._flat: list[Tensor] = []

    def forget(self) -> None:
        """Drop all content and its memory: after a failed iteration nothing in here is known to be right."""
        self._batch, self._length, self._held = 0, 0, []

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

    def positions(self, rows: Items[DecodeRow]) -> list[int]:
        """Flat index of each arranged row's new token."""
        return [place * self._length + row.length for place, row in enumerate(rows)]

    def append(self, layer: int, positions: Tensor, key_value: Tensor) -> None:
        self._flat[layer].index_copy_(0, positions, key_value)

    def view(self, layer: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_heads, length, head_dim], without a copy (and each in one call, which counts here)."""
        store, rows = self._store, self._flat[layer]
        size = (batch, store.num_kv_heads, length, store.head_dim)
        stride = (self._length * store.width, store.head_dim, store.width, 1)
        first = rows.storage_offset()
        return rows.as_strided(size, stride, first), rows.as_strided(size, stride, first + store.width // 2)

    def _fit(self, rows: Items[DecodeRow]) -> bool:
        """Grow for these rows if need be; False when that would pass the limit."""
        longest = max(row.length for row in rows) + 1
        if len(rows) <= self._batch and longest <= self._length:
            return True
        batch = max(self._batch, 1 << (len(rows) - 1).bit_length())
        length = self._length if longest <= self._length else _round_up(longest, LENGTH_STEP) + LENGTH_STEP
        length = _round_up(length, self._store.tokens_per_block)
        if batch * length > self._max_tokens:
            batch, length = len(rows), _round_up(longest, self._store.tokens_per_block)
        if batch * length > self._max_tokens:
            return False
        num_layers = self._store.rows.shape[0]
        self._batch, self._length, self._held = batch, length, []
        self._rows = self._store.rows.new_zeros(num_layers, batch, length, self._store.width)
        self._flat = list(self._rows.view(num_layers, batch * length, self._store.width).unbind(0))
        return True

    def _load(self, place: int, row: DecodeRow) -> None:
        size = self._store.tokens_per_block
        blocks = torch.tensor(row.blocks[: -(-row.length // size)], dtype=torch.int64, device=self._store.device)
        if len(blocks):
            self._rows[:, place, : len(blocks) * size] = self._store.gather_all_layers(blocks)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
