"""Who owns which KV block: allocation, prefix reuse, reference counts, eviction. Plain Python; no tensor is touched here.

A block is in one of three states: *free*, *held* by one or more sequences, or *cached*: nobody holds it but its content is
known and may be taken again, until it is the least recently used and a block is needed.

Content is named by a chain: key(block) = hash(key(block before), its token ids), 128 bits of it. So equal keys mean equal
prefixes. Full blocks are registered as soon as they are computed, not when their request ends. A block of which only the first
tokens match is copied up to there.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lr_backend.steps.tokens import num_equal

ROOT_KEY = b""
"""The chain before the first block."""

CopyPrefix = Callable[[int, int, int], None]
"""(source block, target block, number of tokens)."""
Allocated = Callable[[Sequence[int]], None]
"""(blocks that get a new owner)."""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a block's content, given the name of all before it."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def prefix_keys(tokens: Sequence[int], tokens_per_block: int) -> list[bytes]:
    """Keys of the full blocks of a token sequence, in order."""
    stored = array("q", tokens)
    keys: list[bytes] = []
    parent, size = ROOT_KEY, tokens_per_block * BLOCKS_A_STRETCH
    for start in range(0, len(tokens) - tokens_per_block + 1, size):
        found = _keys_of_stretch(parent, stored[start : start + size].tobytes(), tokens_per_block)
        keys += found
        parent = found[-1]
    return keys


BLOCKS_A_STRETCH = 32
"""Keys are remembered for stretches of so many blocks, since each call sends its whole prefix again."""


@lru_cache(1 << 11)
def _keys_of_stretch(parent: bytes, tokens: bytes, tokens_per_block: int) -> tuple[bytes, ...]:
    """Keys of the full blocks of a stretch of ``tokens``, 8 bytes each."""
    keys: list[bytes] = []
    size = 8 * tokens_per_block
    for start in range(0, len(tokens) - size + 1, size):
        parent = hashlib.blake2b(parent + tokens[start : start + size], digest_size=16).digest()
        keys.append(parent)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class Content:
    """What a registered block holds: the chain before it and its token ids (fewer than a block's when partly filled)."""

    parent: bytes
    tokens: tuple[int, ...]


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence in order, and the chain keys of those of them that are full and computed.

    Attributes:
        source: the block that one of them was copied from in part, and what was copied.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    source: tuple[int, Content] | None = None

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.keys.clear()
        self.source = None


class KvCache:
    """Blocks ``0`` to ``num_blocks - 1``; the engine's thread owns it."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuse: bool,
        copy_prefix: CopyPrefix = lambda source, target, num_tokens: None,
        allocated: Allocated = lambda blocks: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.reuse = reuse
        self._copy_prefix = copy_prefix
        self._allocated = allocated
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        # What continues each chain, sorted by tokens, so that those with a common beginning are neighbours: nearly every request
        # continues some chains, each in its own way.
        self._continuations: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def has(self, key: bytes) -> bool:
        """Whether a full block of this content can be taken."""
        return key in self._by_key

    def num_blocks_needed(self, keys: Sequence[bytes], limit: int, num_tokens: int) -> int:
        """How many of the available blocks a new sequence of ``num_tokens`` would take, given its cached prefix.

        A cached block that nobody holds counts: taking it leaves one less available.
        """
        total = -(-num_tokens // self.tokens_per_block)
        if not self.reuse:
            return total
        num_shared = 0
        for key in keys[: limit // self.tokens_per_block]:
            block = self._by_key.get(key)
            if block is None:
                break
            num_shared += self._references[block] > 0
        return total - num_shared

    def take_prefix(self, table: BlockTable, tokens: Sequence[int], keys: Sequence[bytes], limit: int) -> int:
        """Give an empty table the longest cached prefix of ``tokens``; returns how many tokens it covers, at most ``limit``.

        ``keys`` are those of the full blocks of ``tokens``. A partly matching block is copied if a block can be had for it.
        """
        assert not table.blocks and not table.keys, table
        if not self.reuse:
            return 0
        size = self.tokens_per_block
        for key in keys[: limit // size]:
            block = self._by_key.get(key)
            if block is None:
                break
            self._hold(block)
            table.blocks.append(block)
            table.keys.append(key)
        covered = len(table.blocks) * size
        return covered + self._take_partial(table, tokens[covered : min(limit, covered + size)])

    def _take_partial(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Copy the block whose first tokens match most of ``tokens`` behind the table's chain; returns how many match."""
        beginning, parent = tuple(tokens), table.keys[-1] if table.keys else ROOT_KEY
        known = self._continuations.get(parent, [])
        place = bisect_left(known, (beginning,))
        matches = [(num_equal(one, beginning), block) for one, block in known[max(0, place - 1) : place + 1]]
        matched, best = max(matches, default=(0, -1))
        if not matched:
            return 0
        self._hold(best)
        taken = self.num_available > 0
        if taken:
            table.blocks += self._allocate(1)
            self._copy_prefix(best, table.blocks[-1], matched)
            table.source = best, Content(parent, beginning[:matched])
        self._drop(best)
        return matched if taken else 0

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all; False, with nothing changed, when there are not enough blocks."""
        missing = -(-num_tokens // self.tokens_per_block) - len(table.blocks)
        if missing > self.num_available:
            return False
        if missing > 0:
            table.blocks += self._allocate(missing)
        return True

    def remember(self, tokens: Sequence[int]) -> None:
        """Know a text as if it had been computed and released; nothing happens where there are not enough blocks for it."""
        table = BlockTable()
        keys = prefix_keys(tokens, self.tokens_per_block)
        if self.num_blocks_needed(keys, len(tokens), len(tokens)) <= self.num_available:
            self.take_prefix(table, tokens, keys, len(tokens))
            self.extend(table, len(tokens))
            self.release(table, tokens, len(tokens))

    def register(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Make the table's full blocks among the first ``num_computed`` tokens usable by others."""
        size = self.tokens_per_block
        for index in range(len(table.keys), num_computed // size):
            parent = table.keys[-1] if table.keys else ROOT_KEY
            content = Content(parent, tuple(tokens[index * size : (index + 1) * size]))
            key = block_key(parent, content.tokens)
            table.keys.append(key)
            if self.reuse and key not in self._by_key:
                self._by_key[key] = table.blocks[index]
                self._publish(table.blocks[index], content)

    def share_partial(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Let others copy the table's partly filled block as far as it is computed now; the owner may go on filling it."""
        full = len(table.keys)
        rest = tuple(tokens[full * self.tokens_per_block : num_computed])
        if not self.reuse or not rest:
            return
        block, parent = table.blocks[full], table.keys[-1] if table.keys else ROOT_KEY
        if block in self._contents:
            self._forget(block)
        known = self._continuations.get(parent, [])
        place = bisect_left(known, (rest,))
        if place == len(known) or known[place][0][: len(rest)] != rest:
            self._publish(block, Content(parent, rest))

    def release(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Give a sequence's blocks back; what was computed of it stays cached, its partly filled block too.

        The end of the sequence becomes evictable before its beginning.
        """
        self.register(table, tokens, num_computed)
        self.share_partial(table, tokens, num_computed)
        for block in reversed(table.blocks):
            self._drop(block)
        table.clear()

    def discard(self, table: BlockTable, *, whole: bool = False) -> list[int]:
        """Give a sequence's blocks back after a failed iteration; returns those that became free, whose rows may hold anything.

        Full blocks registered before stay: they were computed by iterations that went well. Not so with ``whole``: a prompt's
        earlier chunks yield no logits that would tell. Whoever shares these blocks keeps them; nobody else gets them. The same
        goes for the block that one of them was copied from.
        """
        if whole and (source := self._source_of(table)) is not None:
            self._hold(source)
            table.blocks.append(source)
        for block in table.blocks[0 if whole else len(table.keys) :]:
            if block in self._contents:
                self._forget(block)
        freed = [block for block in table.blocks if self._references[block] == 1 and block not in self._contents]
        for block in reversed(table.blocks):
            self._drop(block)
        table.clear()
        return freed

    def _source_of(self, table: BlockTable) -> int | None:
        """The block that one of the table's was copied from, if it still holds that."""
        if table.source is None:
            return None
        block, copied = table.source
        now = self._contents.get(block)
        is_same = now is not None and now.parent == copied.parent and now.tokens[: len(copied.tokens)] == copied.tokens
        return block if is_same and block not in table.blocks else None

    def _publish(self, block: int, content: Content) -> None:
        if block in self._contents:
            self._forget(block)
        self._contents[block] = content
        insort(self._continuations.setdefault(content.parent, []), (content.tokens, block))

    def _allocate(self, count: int) -> list[int]:
        """Take blocks: free ones first, then the least recently used cached ones. The caller has checked the number."""
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        self._allocated(blocks)
        return blocks

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        known = self._continuations[content.parent]
        del known[bisect_left(known, (content.tokens, block))]
        if not known:
            del self._continuations[content.parent]
        if len(content.tokens) == self.tokens_per_block:
            del self._by_key[block_key(content.parent, content.tokens)]

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            del self._cached[block]
        self._references[block] += 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, block
        if self._references[block]:
            return
        if block in self._contents:
            self._cached[block] = None
        else:
            self._free.append(block)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Check that the accounting agrees with the tables of all live sequences.

        Raises:
            AssertionError: naming what does not add up.
        """
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), ("block twice in a table", table.blocks)
            assert len(table.keys) <= len(table.blocks), ("more keys than blocks", table)
            for block in table.blocks:
                holders[block] += 1
        assert holders == self._references, ("references", holders, self._references)
        free, cached = list(self._free), set(self._cached)
        held = {block for block, count in enumerate(holders) if count}
        assert len(set(free)) == len(free), ("block free twice", free)
        assert sorted([*free, *cached, *held]) == list(range(self.num_blocks)), ("states", free, cached, held)
        assert cached <= self._contents.keys(), ("cached without content", cached - self._contents.keys())
        assert not self._contents.keys() & set(free), ("free with content", free)
        by_key: dict[bytes, int] = {}
        continuations: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        for block, content in self._contents.items():
            continuations.setdefault(content.parent, []).append((content.tokens, block))
            assert 0 < len(content.tokens) <= self.tokens_per_block, content
            if len(content.tokens) == self.tokens_per_block:
                by_key[block_key(content.parent, content.tokens)] = block
        assert by_key == self._by_key, ("hash index", by_key, self._by_key)
        assert {parent: sorted(known) for parent, known in continuations.items()} == self._continuations, "continuations"
