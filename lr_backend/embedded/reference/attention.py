"""Attention of one iteration, by kind of chunk: decodes over the window, short chunks padded together, long ones alone.

Query heads that share a key head become further query rows of it, so that grouped-query attention needs no repeated keys. In the
same way decodes that share the first blocks of their prefix, as the branches of one answer do, read these only once.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lr_backend.embedded.reference.decode_window import DecodeRow, DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.transfer import to_device

MIN_SHARED_TOKENS = 64
"""A shared prefix shorter than this costs more to attend over apart than it saves."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``start + count`` of one sequence, whose ``blocks`` cover them."""

    start: int
    count: int
    blocks: Items[int]

    @property
    def end(self) -> int:
        return self.start + self.count


class Group(Protocol):
    """Chunks that attend together; their rows lie side by side."""

    num_rows: int

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """[rows, heads * head_dim] of the group's rows; the pool has their keys and values already."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in the window, ``first`` to ``first + count``; all begin with the same ``shared`` tokens (0: nothing shared)."""

    first: int
    count: int
    shared: int


def runs_of(rows: Items[DecodeRow], tokens_per_block: int) -> list[Run]:
    """Part arranged rows into runs that share a prefix worth sharing, and runs of the others between them."""
    runs: list[Run] = []
    first = 0
    while first < len(rows):
        common = rows[first].length // tokens_per_block
        stop = first + 1
        while stop < len(rows):
            narrowed = _num_equal(rows[first].blocks, rows[stop].blocks, min(common, rows[stop].length // tokens_per_block))
            worth = narrowed * tokens_per_block >= MIN_SHARED_TOKENS
            if not worth or (stop > first + 1 and 2 * narrowed < common):
                break
            common, stop = narrowed, stop + 1
        if stop > first + 1:
            runs.append(Run(first, stop - first, common * tokens_per_block))
        elif runs and not runs[-1].shared:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1, 0)
        else:
            runs.append(Run(first, 1, 0))
        first = stop
    return runs


def _num_equal(left: Items[int], right: Items[int], limit: int) -> int:
    """How many leading blocks, up to ``limit``, are the same."""
    return next((at for at in range(limit) if left[at] != right[at]), limit)


class DecodeGroup:
    """One new token each, in the order of the window."""

    def __init__(self, store: KvStore, window: DecodeWindow, rows: Items[DecodeRow]) -> None:
        self.num_rows = len(rows)
        self._window = window
        self._store = store
        self._positions = window.positions(rows)
        can_share = store.device.type == "cpu" and store.rows.dtype == torch.float32
        runs = runs_of(rows, store.tokens_per_block) if can_share else [Run(0, len(rows), 0)]
        self._parts = [(run, *self._tail(rows[run.first : run.first + run.count], run.shared)) for run in runs]

    def _tail(self, rows: Items[DecodeRow], start: int) -> tuple[int, Tensor | None]:
        """Where the longest row ends, and what the others may not see after ``start``: [rows, 1, 1, longest - start]."""
        longest = max(row.length for row in rows) + 1
        if all(row.length + 1 == longest for row in rows):
            return longest, None
        device = self._store.device
        lengths = to_device([[row.length] for row in rows], device)
        blocked = torch.arange(start, longest, device=device) > lengths
        return longest, additive_mask(blocked, self._store.rows.dtype)[:, None, None]

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self._window.append(layer, self._positions, key_value)
        attended = [self._attend_run(layer, query, *part) for part in self._parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_run(self, layer: int, query: Tensor, run: Run, longest: int, mask: Tensor | None) -> Tensor:
        places = slice(run.first, run.first + run.count)
        heads = query[places].view(run.count, self._store.num_kv_heads, -1, self._store.head_dim)
        keys, values = self._window.view(layer, places, slice(run.shared, longest))
        if not run.shared:
            return F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask).reshape(run.count, -1)
        own, own_mass = _attend_with_mass(heads, keys, values, mask)
        keys, values = self._window.view(layer, slice(run.first, run.first + 1), slice(0, run.shared))
        shape = heads.shape
        folded = heads.transpose(0, 1).reshape(1, shape[1], -1, shape[3])
        shared, shared_mass = _attend_with_mass(folded, keys, values, None)
        shared = shared.view(shape[1], shape[0], -1, shape[3]).transpose(0, 1)
        shared_mass = shared_mass.view(shape[1], shape[0], -1).transpose(0, 1)
        return torch.lerp(own, shared, torch.sigmoid(shared_mass - own_mass).unsqueeze(-1)).reshape(run.count, -1)


def _attend_with_mass(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention [B, heads, rows, head_dim] and, of its scores, the log of the sum of their exponentials [B, heads, rows].

    Two parts of a context combine by these masses to attention over the whole.
    """
    attended, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, attn_mask=mask)
    return attended, mass


class ShortGroup:
    """Chunks of a few tokens (verifications, ends of prompts), padded to one length."""

    def __init__(self, store: KvStore, spans: Items[Span]) -> None:
        self._store = store
        self._batch = len(spans)
        self._longest = max(span.count for span in spans)
        self.num_rows = sum(span.count for span in spans)
        size = store.tokens_per_block
        num_blocks = max(-(-span.end // size) for span in spans)
        padded: list[int] = []
        for span in spans:
            used = list(span.blocks[: -(-span.end // size)])
            padded += used + [store.padding_block] * (num_blocks - len(used))
        self._blocks = to_device(padded, store.device)
        self._pad, self._unpad = self._padding(spans)
        self._row_mask = self._causal(spans, num_blocks * size)
        self._masks: dict[int, Tensor] = {}

    def _padding(self, spans: Items[Span]) -> tuple[Tensor | None, Tensor | None]:
        """Row indices to pad queries by (a short chunk repeats its last row) and to take the padding out again."""
        if all(span.count == self._longest for span in spans):
            return None, None
        pad: list[int] = []
        unpad: list[int] = []
        first = 0
        for place, span in enumerate(spans):
            pad += [first + min(row, span.count - 1) for row in range(self._longest)]
            unpad += range(place * self._longest, place * self._longest + span.count)
            first += span.count
        device = self._store.device
        return to_device(pad, device), to_device(unpad, device)

    def _causal(self, spans: Items[Span], length: int) -> Tensor:
        """Additive mask [batch, 1, 1, rows, length]."""
        device = self._store.device
        starts = to_device([span.start for span in spans], device)
        last = starts[:, None] + torch.arange(self._longest, device=device)
        blocked = torch.arange(length, device=device) > last[:, :, None]
        return additive_mask(blocked, self._store.rows.dtype)[:, None, None]

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        if self._pad is not None:
            query = query.index_select(0, self._pad)
        keys, values = self._store.gather(layer, self._blocks, self._batch)
        heads = query.view(self._batch, self._longest, self._store.num_kv_heads, -1, self._store.head_dim)
        groups = heads.shape[3]
        folded = heads.permute(0, 2, 3, 1, 4).flatten(2, 3)
        if groups not in self._masks:
            self._masks[groups] = self._row_mask.expand(-1, -1, groups, -1, -1).flatten(2, 3)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self._masks[groups])
        shape = (self._batch, self._store.num_kv_heads, groups, self._longest, self._store.head_dim)
        rows = attended.view(shape).permute(0, 3, 1, 2, 4).reshape(self._batch * self._longest, -1)
        return rows if self._unpad is None else rows.index_select(0, self._unpad)


class LongGroup:
    """One chunk of a long prompt; key heads are the batch, so that their query heads share keys and mask."""

    def __init__(self, store: KvStore, span: Span) -> None:
        self._store = store
        self._span = span
        self.num_rows = span.count
        used = span.blocks[: -(-span.end // store.tokens_per_block)]
        self._blocks = to_device(list(used), store.device)
        self._mask: Tensor | None = None
        if span.start:
            last = torch.arange(span.start, span.end, device=store.device)
            self._mask = additive_mask(torch.arange(span.end, device=store.device) > last[:, None], store.rows.dtype)

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        keys, values = self._store.gather(layer, self._blocks, 1)
        heads = query.view(self.num_rows, self._store.num_kv_heads, -1, self._store.head_dim).permute(1, 2, 0, 3)
        shape = (-1, heads.shape[1], -1, -1)
        keys, values = (part[0, :, None, : self._span.end].expand(shape) for part in (keys, values))
        attended = F.scaled_dot_product_attention(heads, keys, values, attn_mask=self._mask, is_causal=self._mask is None)
        return attended.permute(2, 0, 1, 3).reshape(self.num_rows, -1)


class IterationAttention:
    """The :class:`~lr_backend.embedded.reference.model.Attention` of one iteration."""

    def __init__(self, store: KvStore, groups: Items[Group], slots: Tensor) -> None:
        """``slots`` int64 [T]: where each row's keys and values go; rows lie in the order of ``groups``."""
        self._store = store
        self._groups = groups
        self._slots = slots

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self._store.write(layer, self._slots, key_value)
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, query, key_value)
        outputs, first = [], 0
        for group in self._groups:
            rows = slice(first, first + group.num_rows)
            outputs.append(group.attend(layer, query[rows], key_value[rows]))
            first = rows.stop
        return torch.cat(outputs)


def additive_mask(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, and minus infinity where ``blocked``."""
    return torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, float("-inf"))
