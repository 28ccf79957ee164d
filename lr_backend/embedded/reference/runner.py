"""Iterations by torch: one forward pass over chunks grouped by how they attend, from token lists to logits."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.reference.attention import DecodeGroup, Group, IterationAttention, LongGroup, ShortGroup
from lr_backend.embedded.reference.decode_graphs import DecodeGraphs, GraphSettings
from lr_backend.embedded.reference.decode_window import DecodeRow, DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.transfer import integers_to_device
from lr_backend.embedded.runner import Output, flattened, span_of
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens

MAX_SHORT_TOKENS = 32
"""Chunks up to this length are padded together; longer ones attend alone."""


class TorchRunner:
    """The :class:`~lr_backend.embedded.runner.Runner` of any device: model, KV memory and decode window."""

    def __init__(
        self, model: DecoderModel, *, num_blocks: int, tokens_per_block: int, graphs: GraphSettings | None = None
    ) -> None:
        """``graphs``: how iterations that only decode are recorded; None: they never are."""
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
        self.graphs = DecodeGraphs(model, self.store, self.window, graphs) if graphs else None

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def is_concurrent(self) -> bool:
        return False

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        decodes, rows, others = self._arrange(chunks)
        if self.graphs is not None and not others:
            replayed = self.graphs.run(rows, [chunk.sequence.pending(1)[0] for chunk in decodes])
            if replayed is not None:
                return replayed, [Output(chunk, row) for row, chunk in enumerate(decodes) if chunk.num_logits]
        groups, ordered = self._group(decodes, rows, others)
        token_ids, logit_rows, outputs = flattened(ordered)
        positions: list[int] = []
        slots: list[int] = []
        size = self.store.tokens_per_block
        for chunk in ordered:
            blocks = chunk.sequence.table.blocks
            positions += range(chunk.start, chunk.end)
            slots += [blocks[at // size] * size + at % size for at in range(chunk.start, chunk.end)]
        lists = [token_ids, positions, slots] + ([logit_rows] if len(logit_rows) < len(token_ids) else [])
        ids, places, stored, *selected = integers_to_device(lists, self.store.device)
        attention = IterationAttention(self.store, groups, stored)
        return self.model.forward(ids, places, attention, selected[0] if selected else None), outputs

    def run_ahead(self, chunks: Items[Chunk], max_passes: int | None = None) -> tuple[list[NewTokens], int] | None:
        return None

    def interrupt(self, wanted: bool) -> None:
        pass

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        self.store.copy_prefix(source, target, num_tokens)

    def allocated(self, blocks: Items[int]) -> None:
        pass

    def clear(self, blocks: Items[int]) -> None:
        self.window.forget()
        self.store.clear(blocks)

    def reset(self) -> None:
        self.window.forget()
        self.store.rows.zero_()

    def _arrange(self, chunks: Items[Chunk]) -> tuple[list[Chunk], list[DecodeRow], list[Chunk]]:
        """Decodes in the order that the window has them in, their rows, and all chunks that attend otherwise."""
        decodes = [chunk for chunk in chunks if chunk.count == 1]
        if not decodes:
            return [], [], list(chunks)
        rows = [DecodeRow(one.sequence.order, one.start, one.sequence.table.blocks) for one in decodes]
        order = self.window.arrange(rows)
        if order is None:
            return [], [], list(chunks)
        others = [chunk for chunk in chunks if chunk.count > 1]
        return [decodes[index] for index in order], [rows[index] for index in order], others

    def _group(self, decodes: list[Chunk], rows: list[DecodeRow], others: list[Chunk]) -> tuple[list[Group], list[Chunk]]:
        """Chunks by how they attend, and in the order of their rows."""
        groups: list[Group] = []
        if decodes:
            groups.append(DecodeGroup(self.store, self.window, rows))
        shorts = [chunk for chunk in others if chunk.count <= MAX_SHORT_TOKENS]
        if shorts:
            groups.append(ShortGroup(self.store, [span_of(chunk) for chunk in shorts]))
        longs = [chunk for chunk in others if chunk.count > MAX_SHORT_TOKENS]
        groups += [LongGroup(self.store, span_of(chunk)) for chunk in longs]
        return groups, decodes + shorts + longs
