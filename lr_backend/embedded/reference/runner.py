"""Iterations by torch: from the chunks of an iteration to logits, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.reference.attention import ChunkAttention
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.runner import Output, flattened, span_of
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens


class ReferenceRunner:
    """The :class:`~lr_backend.embedded.runner.Runner` of any device: a model and its KV memory."""

    def __init__(self, model: DecoderModel, *, num_blocks: int, tokens_per_block: int, num_ids: int | None = None) -> None:
        """``num_ids``: token ids that there are; None: as many as the logits are wide."""
        self.model, self._num_ids = model, num_ids
        memory = {"num_blocks": num_blocks, "tokens_per_block": tokens_per_block}
        self._store = KvStore(model.spec, **memory, dtype=model.dtype, device=model.device)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def is_concurrent(self) -> bool:
        return False

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        token_ids, logit_rows, outputs = flattened(chunks)
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        attention = ChunkAttention(self._store, [span_of(chunk) for chunk in chunks])
        ids, places, rows = (
            torch.tensor(numbers, dtype=torch.int64, device=self.model.device) for numbers in (token_ids, positions, logit_rows)
        )
        return self.model.forward(ids, places, attention, rows)[:, : self._num_ids], outputs

    def run_ahead(self, chunks: Items[Chunk], max_passes: int | None = None) -> tuple[list[NewTokens], int] | None:
        return None

    def interrupt(self, wanted: bool) -> None:
        pass

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        self._store.copy_prefix(source, target, num_tokens)

    def allocated(self, blocks: Items[int]) -> None:
        pass

    def clear(self, blocks: Items[int]) -> None:
        # Attention reads only what was written since a block was allocated.
        pass

    def reset(self) -> None:
        pass
