"""Iterations by the decoder in C. Its attention walks the KV blocks themselves, so there is nothing to gather or to group."""

from __future__ import annotations

from collections.abc import Sequence as Items
from ctypes import c_int32

from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.native.drafter import Drafter
from lr_backend.embedded.native.model import NativeModel, NativePool
from lr_backend.embedded.native.run import RunAhead
from lr_backend.embedded.runner import Output, flattened, span_of
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens


class NativeRunner:
    """The :class:`~lr_backend.embedded.runner.Runner` of a CPU."""

    def __init__(
        self, model: NativeModel, *, num_blocks: int, tokens_per_block: int, num_ids: int, drafter: Drafter | None = None
    ) -> None:
        """Runs ``model``.

        Args:
            num_ids: token ids that there are, of the logits' width at most.
            drafter: for requests that want the engine to draft; its blocks have the pool's numbers.
        """
        self._model, self._num_ids = model, num_ids
        self._drafter = drafter
        self._interrupt = c_int32(0)
        self._pool = NativePool(model.spec, num_blocks=num_blocks, tokens_per_block=tokens_per_block)
        self._run_ahead = RunAhead(model, self._pool, num_ids, drafter)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def is_concurrent(self) -> bool:
        return True

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        tokens, _, outputs = flattened(chunks)
        num_logits = [chunk.num_logits for chunk in chunks]
        logits = self._model.forward(self._pool, tokens, [span_of(chunk) for chunk in chunks], num_logits)
        if self._drafter:
            for chunk in chunks:
                if chunk.count > 1 and chunk.sequence.request.num_draft_tokens:
                    self._drafter.read(chunk.sequence, chunk.end)
        return logits[:, : self._num_ids], outputs

    def run_ahead(self, chunks: Items[Chunk], max_passes: int | None = None) -> tuple[list[NewTokens], int] | None:
        if not all(chunk.num_logits == 0 or _yields_a_token(chunk) for chunk in chunks):
            return None
        if prompts := [chunk.without_last() for chunk in chunks if chunk.count > chunk.num_logits]:
            self.run(prompts)
        decoding = [chunk for chunk in chunks if chunk.num_logits]
        if not decoding:
            return [], 1
        sequences = [chunk.sequence for chunk in decoding]
        size = self._pool.tokens_per_block
        rooms = [
            min(len(one.table.blocks) * size - len(one.tokens) + 1, one.max_new_tokens - one.num_generated) for one in sequences
        ]
        # An unfinished prompt needs its next chunk after one pass.
        most = min(max_passes or max(rooms), max(rooms)) if len(decoding) == len(chunks) else 1
        return self._run_ahead(sequences, rooms, most, self._interrupt)

    def interrupt(self, wanted: bool) -> None:
        self._interrupt.value = wanted

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        self._model.copy_prefix(self._pool, source, target, num_tokens)
        if self._drafter:
            self._drafter.copy_prefix(source, target, num_tokens)

    def allocated(self, blocks: Items[int]) -> None:
        if self._drafter:
            self._drafter.allocated(blocks)

    def clear(self, blocks: Items[int]) -> None:
        self._pool.clear(blocks)
        if self._drafter:
            self._drafter.clear(blocks)

    def reset(self) -> None:
        self._pool.reset()
        if self._drafter:
            self._drafter.reset()


def _yields_a_token(chunk: Chunk) -> bool:
    """Whether it ends in one plain draw: no end token is ruled out, and there are no drafts to verify."""
    sequence, request = chunk.sequence, chunk.sequence.request
    may_end = request.end_id is None or sequence.num_generated >= request.min_tokens
    return chunk.num_logits == 1 and not sequence.is_verification and may_end
