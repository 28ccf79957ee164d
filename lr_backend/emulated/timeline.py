"""The iterations of an engine with in-flight batching: who takes part in each, how long it takes, and what comes of it.

Prompts and decodes share an iteration, requests join and leave between two. Scheduler, KV blocks and the rules by which calls
end are the embedded engine's; tokens are taken from feeds. No clock and no thread: whoever drives it lets the time pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lr_backend.contract import IntArray
from lr_backend.embedded.advance import advance, stamp
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens, Sequence
from lr_backend.embedded.stats import Counters, EngineStats
from lr_backend.emulated.feed import Feed
from lr_backend.emulated.scheduler import UpstreamScheduler
from lr_backend.errors import LookaheadError
from lr_backend.hardware.cost import CostModel, Iteration, Join
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import Demand


@dataclass(frozen=True, slots=True)
class Sizes:
    """What bounds the iterations of an engine. Sizes are in tokens, but for ``max_batch_size``: sequences."""

    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    enable_kv_cache_reuse: bool = True

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(**{name: getattr(config, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that has left: with what it wrote, or because its text could not be computed.

    Attributes:
        cancelled: before its text was at its end.
    """

    sequence: Sequence
    failure: LookaheadError | None = None
    cancelled: bool = False


class Timeline:
    """One engine's iterations. Not for several threads at a time.

    Attributes:
        counters: totals since the start.
    """

    def __init__(self, sizes: Sizes, costs: CostModel, rules: UpstreamRules = OWN_RULES, *, one_hot: bool = False) -> None:
        """``one_hot``: sampled draft tokens of a call are charged for logits of their own."""
        self._costs, self._rules, self._one_hot = costs, rules, one_hot
        cache = KvCache(sizes.num_blocks, sizes.tokens_per_block, reuse=sizes.enable_kv_cache_reuse)
        self._scheduler = UpstreamScheduler(
            cache, rules, max_batch_size=sizes.max_batch_size, max_num_tokens=sizes.max_num_tokens
        )
        self._feeds: dict[Sequence, Feed] = {}
        self._doomed: set[Sequence] = set()
        self._chunks: list[Chunk] = []
        self._iteration = Iteration()
        self.counters = Counters()

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those that wait or run."""
        return (*self._scheduler.waiting, *self._scheduler.running)

    def remember(self, tokens: IntArray) -> None:
        """Have a text in the KV cache, without having taken time for it."""
        self._scheduler.cache.remember(tokens.tolist())

    def admit(self, sequence: Sequence, feed: Feed) -> None:
        """It joins one of the next iterations."""
        self._feeds[sequence] = feed
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> bool:
        """Between two iterations it leaves with what it has.

        False where it has left already, and where by upstream's rules it stays until it has run: then :meth:`end` returns it.
        """
        if sequence not in self._feeds:
            return False
        if self._rules.cancels_what_has_run and not sequence.first_scheduled_ns:
            self._doomed.add(sequence)
            return False
        self.counters.num_cancelled += 1
        self.counters.num_requests += 1
        self._leave(sequence)
        return True

    def begin(self, now_ns: int) -> None:
        """The next iteration starts; what the engine drafts by itself in it is not known yet."""
        self._chunks = self._scheduler.schedule()
        stamp(self._chunks, now_ns)
        self._iteration = described(self._chunks, one_hot=self._one_hot)

    @property
    def num_alike(self) -> int:
        """How many iterations from this one on may be ended as one, if nobody comes or is cancelled: at least one.

        All of them only decode, with texts and blocks at hand, and nobody leaves before the last.
        """
        it = self._iteration
        if it.joins or not it.num_decodes or any(chunk.sequence.num_draft_tokens > 0 for chunk in self._chunks):
            return 1
        sequences = [chunk.sequence for chunk in self._chunks]
        rooms = (min(self._room(one), one.max_new_tokens - one.num_generated) for one in sequences)
        return max(1, min(min(rooms), min(self._feeds[one].num_ready for one in sequences)))

    def seconds_each(self, num_alike: int) -> list[float]:
        """What each of so many iterations takes."""
        if num_alike == 1:
            return [self.seconds]
        it = self._iteration
        steps = (Iteration((), it.num_decodes, it.kv_tokens + index * it.num_decodes) for index in range(num_alike))
        return [self._costs.seconds(one) for one in steps]

    @property
    def awaited(self) -> list[Feed]:
        """Feeds of which the iteration needs a pass."""
        return [self._feeds[chunk.sequence] for chunk in self._chunks if chunk.num_logits]

    @property
    def iteration(self) -> Iteration:
        """The iteration with what the engine itself has drafted in it, as far as that is known."""
        known = [feed.peek() for feed in self.awaited if feed.num_ready]
        num_proposed = [one.num_proposed for one in known]
        if not any(num_proposed):
            return self._iteration
        it = self._iteration
        return Iteration(it.joins, it.num_decodes, it.kv_tokens, sum(num_proposed), max(num_proposed))

    @property
    def seconds(self) -> float:
        """What the iteration takes, as far as its passes are known."""
        return self._costs.seconds(self.iteration)

    @property
    def demand(self) -> Demand:
        """What it asks of its cards."""
        return self._costs.demand(self.iteration)

    def end(self, now_ns: int, num_alike: int = 1) -> list[Ended]:
        """So many iterations are over, and all :attr:`awaited` feeds are ready; returns who has left."""
        gained, ended = [], []
        for chunk in self._chunks:
            sequence = chunk.sequence
            if not chunk.num_logits:
                continue
            try:
                gained.append(_gained(sequence, self._feeds[sequence], num_alike, self._room(sequence)))
            except LookaheadError as error:
                ended.append(Ended(sequence, error))
        self.counters.num_iterations += num_alike
        self.counters.num_batch_rows += (num_alike - 1) * len(self._chunks)
        ended += [Ended(sequence) for sequence in advance(self._scheduler, self.counters, self._chunks, gained, now_ns)]
        if self._doomed:
            had = {one.sequence for one in ended}
            leaving = [chunk.sequence for chunk in self._chunks if chunk.sequence in self._doomed - had]
            self.counters.num_cancelled += len(leaving)
            ended += [Ended(sequence, cancelled=True) for sequence in leaving]
        for one in ended:
            self.counters.num_failed += one.failure is not None
            self.counters.num_requests += one.failure is None
            self._leave(one.sequence)
        self._chunks = []
        return ended

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        return self._scheduler.stats(self.counters)

    def check_integrity(self) -> None:
        """Raises: AssertionError: naming what does not add up among the blocks."""
        self._scheduler.cache.check_integrity(one.table for one in self._scheduler.running)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that it may gain before it needs another block: its last token's keys and values are not stored yet."""
        return len(sequence.table.blocks) * self._scheduler.cache.tokens_per_block - len(sequence.tokens) + 1

    def _leave(self, sequence: Sequence) -> None:
        self._feeds.pop(sequence, None)
        self._doomed.discard(sequence)
        self._scheduler.remove(sequence)


def described(chunks: list[Chunk], *, one_hot: bool = False) -> Iteration:
    """What an iteration of these chunks computes."""
    joins: list[Join] = []
    num_decodes = kv_tokens = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.count == 1 and sequence.num_generated and not sequence.drafts:
            num_decodes += 1
            kv_tokens += chunk.end
        else:
            num_drafts = chunk.num_logits - 1 if chunk.num_logits else 0
            joins.append(Join(chunk.count, chunk.start, num_drafts, one_hot and not sequence.request.sampling.greedy))
    return Iteration(tuple(joins), num_decodes, kv_tokens)


def _gained(sequence: Sequence, feed: Feed, num_passes: int, room: int) -> NewTokens:
    """The next passes of a sequence. Of what the engine has drafted there is no more than its blocks have room for.

    Raises:
        LookaheadError: it could not be computed.
    """
    if num_passes > 1:  # of one token each
        passes = [feed.take() for _ in range(num_passes)]
        token_ids = [token for one in passes for token in one.token_ids]
        return NewTokens(sequence, token_ids, [score for one in passes for score in one.log_probs])
    # A script knows the drafts that were sent; near the end of the context fewer are verified.
    found = feed.take_up_to(min(room, len(sequence.drafts) + 1) if sequence.drafts else room)
    return NewTokens(
        sequence,
        list(found.token_ids),
        list(found.log_probs),
        num_accepted=len(found.token_ids) - 1,
        num_proposed=found.num_proposed,
    )
