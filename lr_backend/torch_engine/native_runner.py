"""Iterations by the decoder in C: attention walks the blocks themselves, so that there is nothing to gather or to group."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from lr_backend.torch_engine.attention import Span
from lr_backend.torch_engine.checkpoint import ModelSpec
from lr_backend.torch_engine.native_model import NativeModel, NativePool
from lr_backend.torch_engine.runner import Output
from lr_backend.torch_engine.scheduler import Chunk


class NativeRunner:
    """The :class:`~lr_backend.torch_engine.runner.Runner` of a CPU."""

    def __init__(self, model: NativeModel, *, num_blocks: int, tokens_per_block: int) -> None:
        self._model = model
        self._pool = NativePool(model.spec, num_blocks=num_blocks, tokens_per_block=tokens_per_block)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        tokens: list[int] = []
        rows: list[int] = []
        spans, outputs = [], []
        size = self._pool.tokens_per_block
        for chunk in chunks:
            tokens += chunk.sequence.pending(chunk.count)
            spans.append(Span(chunk.start, chunk.count, chunk.sequence.table.blocks[: -(-chunk.end // size)]))
            if chunk.num_logits:
                outputs.append(Output(chunk, len(rows)))
                rows += range(len(tokens) - chunk.num_logits, len(tokens))
        return self._model.forward(self._pool, tokens, spans, rows), outputs

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        self._pool.copy_prefix(source, target, num_tokens)

    def clear(self, blocks: Items[int]) -> None:
        self._pool.clear(blocks)

    def reset(self) -> None:
        self._pool.reset()
