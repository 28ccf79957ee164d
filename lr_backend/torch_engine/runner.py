"""One forward pass of the chunks of an iteration: from token lists to logits."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from lr_backend.torch_engine.attention import DecodeGroup, Group, IterationAttention, LongGroup, ShortGroup, Span
from lr_backend.torch_engine.decode_window import DecodeRow, DecodeWindow
from lr_backend.torch_engine.kv_store import KvStore
from lr_backend.torch_engine.model import DecoderModel
from lr_backend.torch_engine.scheduler import Chunk

MAX_SHORT_TOKENS = 32
"""Chunks up to this length are padded together; longer ones attend alone."""


@dataclass(frozen=True, slots=True)
class Output:
    """The logits of one chunk: rows ``first`` to ``first + chunk.num_logits`` of the iteration's logits."""

    chunk: Chunk
    first: int


class Runner:
    """Model, KV memory and decode window; the engine's thread owns it."""

    def __init__(self, model: DecoderModel, *, num_blocks: int, tokens_per_block: int) -> None:
        spec = model.spec
        self.model = model
        self.store = KvStore(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self.window = DecodeWindow(self.store, max_tokens=num_blocks * tokens_per_block)

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        """Logits, float32 [R, vocabulary], and which rows are whose; keys and values of all tokens are stored."""
        groups, ordered = self._group(chunks)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        outputs: list[Output] = []
        size = self.store.tokens_per_block
        for chunk in ordered:
            blocks = chunk.sequence.table.blocks
            token_ids += chunk.sequence.pending(chunk.count)
            positions += range(chunk.start, chunk.end)
            slots += [blocks[at // size] * size + at % size for at in range(chunk.start, chunk.end)]
            if chunk.num_logits:
                outputs.append(Output(chunk, len(logit_rows)))
                logit_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))
        device = self.store.device
        attention = IterationAttention(self.store, groups, torch.tensor(slots, device=device))
        rows = torch.tensor(logit_rows, dtype=torch.int64, device=device) if len(logit_rows) < len(token_ids) else None
        ids, places = torch.tensor(token_ids, device=device), torch.tensor(positions, device=device)
        return self.model.forward(ids, places, attention, rows), outputs

    def _group(self, chunks: Items[Chunk]) -> tuple[list[Group], list[Chunk]]:
        """Chunks by how they attend, and in the order of their rows."""
        decodes = [chunk for chunk in chunks if chunk.count == 1]
        shorts = [chunk for chunk in chunks if 1 < chunk.count <= MAX_SHORT_TOKENS]
        groups: list[Group] = []
        if decodes:
            rows = [DecodeRow(one.sequence.order, one.start, one.sequence.table.blocks) for one in decodes]
            order = self.window.arrange(rows)
            if order is None:
                shorts, decodes = decodes + shorts, []
            else:
                decodes = [decodes[index] for index in order]
                groups.append(DecodeGroup(self.store, self.window, [rows[index] for index in order]))
        if shorts:
            groups.append(ShortGroup(self.store, [_span(chunk) for chunk in shorts]))
        longs = [chunk for chunk in chunks if chunk.count > MAX_SHORT_TOKENS]
        groups += [LongGroup(self.store, _span(chunk)) for chunk in longs]
        return groups, decodes + shorts + longs


def _span(chunk: Chunk) -> Span:
    return Span(chunk.start, chunk.count, chunk.sequence.table.blocks)
