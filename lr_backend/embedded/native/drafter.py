"""The draft model that an engine holds beside its own, and of which tokens it has keys and values.

Its pool has blocks of the same numbers as the engine's. So a sequence has one table, and a prefix that is reused is reused in
both. The draft model reads prompts along with the engine. What it has missed of a sequence, it computes before it next drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from lr_backend.embedded.native.model import NativeModel, NativePool
from lr_backend.embedded.runner import Span
from lr_backend.embedded.sequence import Sequence

MAX_ROWS = 256
"""Tokens that it reads at a time; the memory that computing takes grows with them."""


class Drafter:
    """Two threads may use it at a time, with different sequences.

    Attributes:
        min_chance: drafting for a pass stops where the draft model gives all drafts so far less probability than this.
    """

    def __init__(self, model: NativeModel, *, num_blocks: int, tokens_per_block: int, min_chance: float) -> None:
        self.model = model
        self.min_chance = min_chance
        self.pool = NativePool(model.spec, num_blocks=num_blocks, tokens_per_block=tokens_per_block)
        self._seen = [0] * num_blocks

    def read(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute keys and values of the first ``num_tokens`` tokens of a sequence, which has blocks for them."""
        blocks = sequence.table.blocks
        seen = self.num_seen(blocks, num_tokens)
        for start in range(seen, num_tokens, MAX_ROWS):
            tokens = sequence.tokens[start : min(num_tokens, start + MAX_ROWS)]
            self.model.forward(self.pool, tokens, [Span(start, len(tokens), blocks)], [0])
            self.has_seen(blocks, start, start + len(tokens))

    def num_seen(self, blocks: Items[int], num_tokens: int) -> int:
        """How many of a sequence's first ``num_tokens`` tokens have keys and values: all before the first that lacks them."""
        size, seen = self.pool.tokens_per_block, 0
        for block in blocks:
            seen += self._seen[block]
            if self._seen[block] < size:
                break
        return min(seen, num_tokens)

    def has_seen(self, blocks: Items[int], before: int, num_tokens: int) -> None:
        """Note that a sequence's first ``num_tokens`` tokens have keys and values now; the first ``before`` had them already."""
        size = self.pool.tokens_per_block
        for index in range(min(before, num_tokens) // size, len(blocks)):
            self._seen[blocks[index]] = max(0, min(size, num_tokens - index * size))

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks get a new owner."""
        for block in blocks:
            self._seen[block] = 0

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens' keys and values of one block to another, as far as there are any."""
        self._seen[target] = seen = min(num_tokens, self._seen[source])
        if seen:
            self.model.copy_prefix(self.pool, source, target, seen)

    def clear(self, blocks: Items[int]) -> None:
        """Forget what a failed iteration may have left."""
        self.allocated(blocks)
        self.pool.clear(blocks)

    def reset(self) -> None:
        self.allocated(range(len(self._seen)))
        self.pool.reset()
