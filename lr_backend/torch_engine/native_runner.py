"""Iterations by the decoder in C: attention walks the blocks themselves, so that there is nothing to gather or to group."""

from __future__ import annotations

from collections.abc import Sequence as Items
from ctypes import c_int32

from torch import Tensor

from lr_backend.torch_engine.checkpoint import ModelSpec
from lr_backend.torch_engine.native_model import NativeModel, NativePool
from lr_backend.torch_engine.runner import Output, flattened, span_of
from lr_backend.torch_engine.scheduler import Chunk
from lr_backend.torch_engine.sequence import NewTokens


class NativeRunner:
    """The :class:`~lr_backend.torch_engine.runner.Runner` of a CPU."""

    def __init__(self, model: NativeModel, *, num_blocks: int, tokens_per_block: int) -> None:
        self._model = model
        self._interrupt = c_int32(0)
        self._pool = NativePool(model.spec, num_blocks=num_blocks, tokens_per_block=tokens_per_block)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def is_concurrent(self) -> bool:
        return True

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        tokens, rows, outputs = flattened(chunks)
        return self._model.forward(self._pool, tokens, [span_of(chunk) for chunk in chunks], rows), outputs

    def run_ahead(self, chunks: Items[Chunk]) -> list[NewTokens] | None:
        if not all(_is_plain_decode(chunk) for chunk in chunks):
            return None
        sequences = [chunk.sequence for chunk in chunks]
        size = self._pool.tokens_per_block
        num_steps = min(len(one.table.blocks) * size - one.num_computed for one in sequences)
        num_steps = min(num_steps, *(one.max_new_tokens - one.num_generated for one in sequences))
        steps, log_probs = self._model.run_ahead(self._pool, sequences, num_steps, self._interrupt)
        return [
            NewTokens(one, tokens, values if one.request.return_log_probs else [], num_stored=len(tokens) - 1)
            for one, tokens, values in zip(sequences, steps, log_probs, strict=True)
        ]

    def interrupt(self, wanted: bool) -> None:
        self._interrupt.value = wanted

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        self._pool.copy_prefix(source, target, num_tokens)

    def clear(self, blocks: Items[int]) -> None:
        self._pool.clear(blocks)

    def reset(self) -> None:
        self._pool.reset()


def _is_plain_decode(chunk: Chunk) -> bool:
    """One token that yields one, with nothing ruled out and nothing to verify."""
    sequence, request = chunk.sequence, chunk.sequence.request
    may_end = request.end_id is None or sequence.num_generated >= request.min_tokens
    return chunk.count == chunk.num_logits == 1 and not sequence.is_verification and may_end
