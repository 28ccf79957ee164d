"""The draft model that an engine holds beside its own, and which of the blocks' tokens it has keys and values of.

Its pool has blocks of the same numbers as the engine's: a sequence has one table, and a prefix that is reused is reused in both.
It reads prompts along with the engine; what it has not seen of a sequence all the same, it computes when it next drafts for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from lr_backend.embedded.native.model import NativeModel, NativePool
from lr_backend.embedded.reference.attention import Span
from lr_backend.embedded.sequence import Sequence

MAX_ROWS = 256
"""Tokens that it reads at a time: memory to compute in grows with them."""


class Drafter:
    """Two threads may use it at a time, with different sequences.

    Attributes:
        min_chance: it stops where all drafts of a pass so far are less likely than this to stand, by its own word.
    """

    def __init__(self, model: NativeModel, *, num_blocks: int, tokens_per_block: int, min_chance: float) -> None:
        self.model = model
        self.min_chance = min_chance
        self.pool = NativePool(model.spec, num_blocks=num_blocks, tokens_per_block=tokens_per_block)
        self._seen = [0] * num_blocks

    def read(self, sequence: Sequence, num_tokens: int) -> None:
        """Have it see the first ``num_tokens`` tokens of a sequence, which has blocks for them."""
        blocks = sequence.table.blocks
        seen = self.num_seen(blocks, num_tokens)
        for start in range(seen, num_tokens, MAX_ROWS):
            tokens = sequence.tokens[start : min(num_tokens, start + MAX_ROWS)]
            self.model.forward(self.pool, tokens, [Span(start, len(tokens), blocks)], [0])
            self.has_seen(blocks, start, start + len(tokens))

    def num_seen(self, blocks: Items[int], num_tokens: int) -> int:
        """How many of a sequence's first ``num_tokens`` tokens it has keys and values of: all before the first that it lacks."""
        size, seen = self.pool.tokens_per_block, 0
        for block in blocks:
            seen += self._seen[block]
            if self._seen[block] < size:
                break
        return min(seen, num_tokens)

    def has_seen(self, blocks: Items[int], before: int, num_tokens: int) -> None:
        """Now it has keys and values of a sequence's first ``num_tokens`` tokens and none behind; of ``before`` it had them."""
        size = self.pool.tokens_per_block
        for index in range(min(before, num_tokens) // size, len(blocks)):
            self._seen[blocks[index]] = max(0, min(size, num_tokens - index * size))

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks begin anew."""
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
