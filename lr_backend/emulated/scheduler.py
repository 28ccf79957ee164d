"""Who runs in the next iteration of a TensorRT-LLM engine: the embedded engine's scheduler with upstream's rules of admission."""

from __future__ import annotations

from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.scheduler import Scheduler
from lr_backend.embedded.sequence import Sequence
from lr_backend.hardware.rules import UpstreamRules


class UpstreamScheduler(Scheduler):
    """Not emulated: draft tokens that are dropped where an iteration is full, and the wait of a request whose first new block is
    being computed by another is the embedded engine's, which is much the same."""

    def __init__(self, cache: KvCache, rules: UpstreamRules, *, max_batch_size: int, max_num_tokens: int) -> None:
        super().__init__(cache, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
        self._rules = rules

    def _room(self, sequence: Sequence, budget: int) -> int:
        """Its whole prompt; where that is not left, a whole number of blocks of what is."""
        if not self._rules.charges_whole_prefix:
            return super()._room(sequence, budget)
        whole, size = len(sequence.tokens) + len(sequence.drafts), self.cache.tokens_per_block
        return whole if whole <= budget else budget // size * size

    def _charged(self, room: int, count: int) -> int:
        return room if self._rules.charges_whole_prefix else super()._charged(room, count)

    def _fits(self, sequence: Sequence) -> bool:
        if not self._rules.reserves_kv_in_full:
            return super()._fits(sequence)
        return self._num_blocks(sequence) <= self.cache.num_available - sum(
            self._num_blocks(one) - len(one.table.blocks) for one in self.running
        )

    def _num_blocks(self, sequence: Sequence) -> int:
        """That it may come to hold."""
        longest = sequence.num_prompt_tokens + max(sequence.max_new_tokens, len(sequence.drafts) + 1)
        return -(-longest // self.cache.tokens_per_block)
