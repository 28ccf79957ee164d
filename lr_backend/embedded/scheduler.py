"""Who runs in the next iteration, with how many tokens.

Decodes go first, then prompts under way, then new requests, each in order of arrival. A decode that finds no free block takes
those of the latest arrival, which then starts over. Its computed blocks stay cached, so it finds most of its work done.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Self

from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.sequence import Sequence
from lr_backend.embedded.stats import Counters, EngineStats

MIN_SHARED_TOKENS = 24
"""A request waits for another that is just computing its prefix if that saves at least so many tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of a sequence; the last ``num_logits`` of them yield outputs."""

    sequence: Sequence
    start: int
    count: int
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def without_last(self) -> Self:
        """The chunk without its last token, if that yields one new token and nothing else."""
        yields_one = self.num_logits == 1 and self.count > 1 and not self.sequence.is_verification
        return replace(self, count=self.count - 1, num_logits=0) if yields_one else self


class Scheduler:
    """Waiting and running sequences; the engine's thread owns it."""

    def __init__(self, cache: KvCache, *, max_batch_size: int, max_num_tokens: int) -> None:
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def stats(self, counters: Counters, num_outside: int = 0) -> EngineStats:
        """Counters and gauges now; ``num_outside``: sequences that wait and are not added yet."""
        return EngineStats(
            **asdict(counters),
            num_tokens_reused=self.num_reused_tokens,
            num_preemptions=self.num_preemptions,
            num_waiting=num_outside + len(self.waiting),
            num_running=len(self.running),
            num_blocks_used=self.cache.num_held,
            num_blocks_cached=self.cache.num_cached,
            num_blocks_free=self.cache.num_free,
        )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, busy: Collection[Sequence] = ()) -> list[Chunk]:
        """The chunks of the next iteration; empty only when idle, or when all that runs is ``busy``: being computed elsewhere."""
        chunks: list[Chunk] = []
        budget = self._max_num_tokens
        for sequence in sorted(self.running, key=lambda one: (one.num_pending > 1, one.order)):
            if sequence not in self.running or sequence in busy or not budget:
                continue
            count, num_logits = _chunk_size(sequence, budget)
            if count and self._make_room(sequence, sequence.num_computed + count, busy):
                chunks.append(Chunk(sequence, sequence.num_computed, count, num_logits))
                budget -= count
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        budget = self._max_num_tokens - sum(chunk.count for chunk in chunks)
        admitted = self._admit(budget) if budget and self.waiting else []
        for chunk in chunks:  # of what nobody else needs
            self._make_room_for_drafts(chunk.sequence)
        return chunks + admitted

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; what it computed stays cached."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence.table, sequence.tokens, min(sequence.num_computed, len(sequence.tokens)))
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def remove_failed(self, sequence: Sequence, *, whole: bool = False) -> list[int]:
        """Take a sequence of a failed iteration out; returns the freed blocks, whose rows may hold anything.

        ``whole``: nothing of it may be found in the cache from now on.
        """
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        return self.cache.discard(sequence.table, whole=whole)

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting sequences in order, while the iteration has tokens, the batch has places and the pool has blocks.

        One whose prefix is being computed right now is passed over. One that lacks blocks holds back those after it.
        """
        chunks: list[Chunk] = []
        being_computed = {key for one in self.running for key in one.keys[len(one.table.keys) :]}
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_batch_size or not budget:
                break
            room = self._room(sequence, budget)
            if not room or self._should_wait_for_prefix(sequence, being_computed):
                continue
            if not self._start(sequence):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda one: one.order)
            being_computed.update(sequence.keys[len(sequence.table.keys) :])
            count, num_logits = _chunk_size(sequence, room)
            if count:
                chunks.append(Chunk(sequence, sequence.num_computed, count, num_logits))
                budget -= self._charged(room, count)
        return chunks

    def _room(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a sequence may compute in the iteration that it joins; 0: it cannot join."""
        return budget

    def _charged(self, room: int, count: int) -> int:
        """What a sequence takes of the iteration that it joins."""
        return count

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are blocks for what is known of it, and one more for each running sequence, so that none is preempted
        at once."""
        limit, total = len(sequence.tokens) - 1, len(sequence.tokens) + len(sequence.drafts)
        return self.cache.num_blocks_needed(sequence.keys, limit, total) + len(self.running) <= self.cache.num_available

    def _should_wait_for_prefix(self, sequence: Sequence, being_computed: set[bytes]) -> bool:
        if not being_computed or not self.cache.reuse:
            return False
        missing = [key for key in sequence.keys if not self.cache.has(key)]
        num_shared = 0
        for key in missing:
            if key not in being_computed:
                break
            num_shared += 1
        return num_shared * self.cache.tokens_per_block >= MIN_SHARED_TOKENS

    def _start(self, sequence: Sequence) -> bool:
        """Give a sequence its cached prefix and blocks for the rest; False, with nothing changed, when they do not suffice."""
        if not self._fits(sequence):
            return False
        limit, total = len(sequence.tokens) - 1, len(sequence.tokens) + len(sequence.drafts)
        table = sequence.table
        sequence.num_computed = self.cache.take_prefix(table, sequence.tokens, sequence.keys, limit)
        enough = self.cache.extend(table, total)
        assert enough, (table, self.cache.num_available)
        sequence.num_allocated_blocks += len(table.blocks) - len(table.keys)
        if not sequence.first_scheduled_ns:
            sequence.num_reused = sequence.num_computed
            self.num_reused_tokens += sequence.num_computed
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, busy: Collection[Sequence]) -> bool:
        """Blocks for a running sequence's next tokens, taken from the latest arrivals if need be.

        False if the sequence is itself the latest: then it is preempted. A victim that already has a chunk is dropped by the
        caller, which keeps only running sequences.
        """
        held = len(sequence.table.blocks)
        while not self.cache.extend(sequence.table, num_tokens):
            victim = next(one for one in reversed(self.running) if one not in busy)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.num_allocated_blocks += len(sequence.table.blocks) - held
        return True

    def _make_room_for_drafts(self, sequence: Sequence) -> None:
        """Blocks for draft tokens of the engine, taken from nobody: without them it drafts less."""
        held = len(sequence.table.blocks)
        if sequence.num_draft_tokens:
            self.cache.extend(sequence.table, len(sequence.tokens) + sequence.num_draft_tokens)
        sequence.num_allocated_blocks += len(sequence.table.blocks) - held

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.table, sequence.tokens, min(sequence.num_computed, len(sequence.tokens)))
        sequence.restart()
        self.num_preemptions += 1
        place = sum(1 for one in self.waiting if one.order < sequence.order)
        self.waiting.insert(place, sequence)


def _chunk_size(sequence: Sequence, budget: int) -> tuple[int, int]:
    """Tokens and logit rows of a sequence's next chunk; (0, 0) when nothing of use fits the budget.

    The last token before the drafts and all drafts stay together: one chunk yields all their logits.
    """
    num_logits = len(sequence.drafts) + 1
    if sequence.num_pending <= budget:
        return sequence.num_pending, num_logits
    count = min(budget, sequence.num_pending - num_logits)
    return (count, 0) if count > 0 else (0, 0)
