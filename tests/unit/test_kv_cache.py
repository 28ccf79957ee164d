"""The KV books: reuse, copies, eviction, and the same sums after whatever was done in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.embedded.kv_cache import BlockTable, KvCache, block_key, prefix_keys

SIZE = 4


class Books:
    """A cache together with what its blocks would hold: tokens instead of keys and values."""

    def __init__(self, num_blocks: int = 8, *, reuse: bool = True) -> None:
        self.cache = KvCache(num_blocks, SIZE, reuse=reuse, copy_prefix=self.copy)
        self.rows: dict[int, list[int | None]] = {block: [None] * SIZE for block in range(num_blocks)}
        self.num_copies = 0

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.num_copies += 1
        self.rows[target][:num_tokens] = self.rows[source][:num_tokens]

    def start(self, tokens: list[int]) -> tuple[BlockTable, int] | None:
        """Take the prefix and room for the rest, as the scheduler does; None when there is none."""
        keys, table = prefix_keys(tokens, SIZE), BlockTable()
        if self.cache.num_blocks_needed(keys, len(tokens) - 1, len(tokens)) > self.cache.num_available:
            return None
        covered = self.cache.take_prefix(table, tokens, keys, len(tokens) - 1)
        assert self.cache.extend(table, len(tokens))
        assert self.content(table, covered) == tokens[:covered]
        return table, covered

    def compute(self, table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        for at in range(start, end):
            self.rows[table.blocks[at // SIZE]][at % SIZE] = tokens[at]
        self.cache.register(table, tokens, end)

    def content(self, table: BlockTable, count: int) -> list[int | None]:
        return [self.rows[table.blocks[at // SIZE]][at % SIZE] for at in range(count)]

    def finish(self, tokens: list[int]) -> int:
        """A whole request; returns the tokens reused."""
        started = self.start(tokens)
        assert started is not None
        table, covered = started
        self.compute(table, tokens, covered, len(tokens))
        self.cache.release(table, tokens, len(tokens))
        self.cache.check_integrity([])
        return covered


def test_keys_name_the_whole_prefix() -> None:
    assert prefix_keys(list(range(11)), SIZE) == prefix_keys(list(range(8)), SIZE)
    first, second = prefix_keys([1, 2, 3, 4, 1, 2, 3, 4], SIZE)
    assert first != second
    assert second == block_key(first, [1, 2, 3, 4])


def test_full_blocks_are_reused_but_never_the_last_token() -> None:
    books = Books()
    tokens = list(range(8))
    assert books.finish(tokens) == 0
    # Seven of the eight are covered: one full block, and three rows of the second by a copy.
    assert books.finish(tokens) == 7
    assert books.num_copies == 1
    assert books.finish([*tokens, 9]) == 8
    assert books.num_copies == 1


def test_blocks_are_usable_as_soon_as_they_are_computed() -> None:
    books = Books()
    tokens = list(range(10))
    first = books.start(tokens)
    assert first is not None
    books.compute(first[0], tokens, 0, 6)
    second = books.start(tokens)
    assert second is not None
    assert second[1] == 4
    assert second[0].blocks[0] == first[0].blocks[0]
    books.cache.check_integrity([first[0], second[0]])


def test_a_partly_filled_block_is_copied_not_shared() -> None:
    books = Books()
    books.finish([1, 2, 3, 4, 5, 6])
    started = books.start([1, 2, 3, 4, 5, 7, 8])
    assert started is not None
    table, covered = started
    assert covered == 5
    assert books.num_copies == 1
    books.compute(table, [1, 2, 3, 4, 5, 7, 8], 5, 7)
    again = books.start([1, 2, 3, 4, 5, 6, 9])
    assert again is not None
    assert again[1] == 6


def test_the_longest_match_is_copied() -> None:
    books = Books()
    books.finish([1, 2, 9, 9, 9])
    books.finish([1, 2, 3, 9, 9])
    started = books.start([1, 2, 3, 4, 5])
    assert started is not None
    assert started[1] == 3


def test_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    books = Books(num_blocks=6)
    old, new = list(range(100, 108)), list(range(200, 208))
    books.finish(old)
    books.finish(new)
    assert (books.cache.num_free, books.cache.num_cached) == (2, 4)
    # Needs four blocks: two free ones, and the two of the older sequence.
    books.finish(list(range(300, 316)))
    assert books.finish([*new, 1]) == 8
    # Now the beginning of `new` is younger than its end; one block more evicts from the third sequence.
    books2 = Books(num_blocks=3)
    books2.finish(old)
    books2.finish([1] * 5)
    assert books2.finish([*old, 1]) == 4


def test_held_blocks_are_not_evicted() -> None:
    books = Books(num_blocks=4)
    tokens = list(range(8))
    started = books.start(tokens)
    assert started is not None
    books.compute(started[0], tokens, 0, 8)
    assert books.start(list(range(50, 62))) is None
    assert not books.cache.extend(BlockTable(), 12)
    assert books.start(list(range(50, 58))) is not None
    assert books.content(started[0], 8) == tokens


def test_no_block_left_means_no_copy() -> None:
    books = Books(num_blocks=2)
    books.finish([1, 2, 3, 4, 5])
    table = BlockTable()
    # The match is the only other block, and it is the source: nothing can be had for the copy but itself.
    covered = books.cache.take_prefix(table, [1, 2, 3, 4, 5, 6], prefix_keys([1, 2, 3, 4, 5, 6], SIZE), 5)
    assert covered == 4
    books.cache.check_integrity([table])


def test_discarded_blocks_are_reported_and_not_cached() -> None:
    books = Books()
    tokens = list(range(9))
    started = books.start(tokens)
    assert started is not None
    table, _ = started
    books.compute(table, tokens, 0, 5)
    blocks = list(table.blocks)
    assert books.cache.discard(table) == blocks[1:]
    books.cache.check_integrity([])
    assert (books.cache.num_cached, books.cache.num_free) == (1, 7)


def test_reuse_switched_off() -> None:
    books = Books(reuse=False)
    tokens = list(range(9))
    assert books.finish(tokens) == 0
    assert books.finish(tokens) == 0
    assert books.cache.num_cached == 0


def test_broken_books_are_noticed() -> None:
    books = Books()
    started = books.start(list(range(8)))
    assert started is not None
    with pytest.raises(AssertionError, match="references"):
        books.cache.check_integrity([])
    books.cache._free.append(books.cache._free[0])
    with pytest.raises(AssertionError, match="twice"):
        books.cache.check_integrity([started[0]])


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["start", "compute", "extend", "release", "discard"]), st.integers(0, 5), st.integers(0, 12)),
    max_size=60,
)


@given(OPERATIONS, st.booleans())
def test_the_books_add_up_and_no_content_is_mixed_whatever_happens(operations: list[Any], reuse: bool) -> None:
    books = Books(num_blocks=7, reuse=reuse)
    live: list[list[Any]] = []
    for operation, pick, number in operations:
        if operation == "start":
            # Few distinct tokens, so that prefixes meet often.
            tokens = [(number >> bit) & 1 for bit in range(2 + pick * 2)]
            started = books.start(tokens)
            if started is not None:
                live.append([started[0], tokens, started[1]])
        elif live:
            sequence = live[pick % len(live)]
            table, tokens, computed = sequence
            if operation == "compute":
                end = min(len(tokens), computed + 1 + number % 5)
                books.compute(table, tokens, computed, end)
                sequence[2] = end
            elif operation == "extend" and books.cache.extend(table, len(tokens) + 1):
                tokens.append(number & 1)
            elif operation == "release":
                books.cache.release(table, tokens, computed)
                live.remove(sequence)
            elif operation == "discard":
                books.cache.discard(table)
                live.remove(sequence)
        books.cache.check_integrity([one[0] for one in live])
        for table, tokens, computed in live:
            assert books.content(table, computed) == tokens[:computed]
