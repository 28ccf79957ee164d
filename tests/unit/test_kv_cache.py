"""KV block accounting: reuse, copies, eviction, and the same sums after whatever was done in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.embedded.kv_cache import BlockTable, KvCache, block_key, prefix_keys

SIZE = 4


class Harness:
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
    harness = Harness()
    tokens = list(range(8))
    assert harness.finish(tokens) == 0
    # Seven of the eight are covered: one full block, and three rows of the second by a copy.
    assert harness.finish(tokens) == 7
    assert harness.num_copies == 1
    assert harness.finish([*tokens, 9]) == 8
    assert harness.num_copies == 1


def test_blocks_are_usable_as_soon_as_they_are_computed() -> None:
    harness = Harness()
    tokens = list(range(10))
    first = harness.start(tokens)
    assert first is not None
    harness.compute(first[0], tokens, 0, 6)
    second = harness.start(tokens)
    assert second is not None
    assert second[1] == 4
    assert second[0].blocks[0] == first[0].blocks[0]
    harness.cache.check_integrity([first[0], second[0]])


def test_a_partly_filled_block_is_copied_not_shared() -> None:
    harness = Harness()
    harness.finish([1, 2, 3, 4, 5, 6])
    started = harness.start([1, 2, 3, 4, 5, 7, 8])
    assert started is not None
    table, covered = started
    assert covered == 5
    assert harness.num_copies == 1
    harness.compute(table, [1, 2, 3, 4, 5, 7, 8], 5, 7)
    again = harness.start([1, 2, 3, 4, 5, 6, 9])
    assert again is not None
    assert again[1] == 6


def test_the_longest_match_is_copied() -> None:
    harness = Harness()
    harness.finish([1, 2, 9, 9, 9])
    harness.finish([1, 2, 3, 9, 9])
    started = harness.start([1, 2, 3, 4, 5])
    assert started is not None
    assert started[1] == 3


def test_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    harness = Harness(num_blocks=6)
    old, new = list(range(100, 108)), list(range(200, 208))
    harness.finish(old)
    harness.finish(new)
    assert (harness.cache.num_free, harness.cache.num_cached) == (2, 4)
    # Needs four blocks: two free ones, and the two of the older sequence.
    harness.finish(list(range(300, 316)))
    assert harness.finish([*new, 1]) == 8
    # Now the beginning of `new` is younger than its end; one block more evicts from the third sequence.
    small = Harness(num_blocks=3)
    small.finish(old)
    small.finish([1] * 5)
    assert small.finish([*old, 1]) == 4


def test_held_blocks_are_not_evicted() -> None:
    harness = Harness(num_blocks=4)
    tokens = list(range(8))
    started = harness.start(tokens)
    assert started is not None
    harness.compute(started[0], tokens, 0, 8)
    assert harness.start(list(range(50, 62))) is None
    assert not harness.cache.extend(BlockTable(), 12)
    assert harness.start(list(range(50, 58))) is not None
    assert harness.content(started[0], 8) == tokens


def test_no_block_left_means_no_copy() -> None:
    harness = Harness(num_blocks=2)
    harness.finish([1, 2, 3, 4, 5])
    table = BlockTable()
    # The match is the only other block, and it is the source: nothing can be had for the copy but itself.
    covered = harness.cache.take_prefix(table, [1, 2, 3, 4, 5, 6], prefix_keys([1, 2, 3, 4, 5, 6], SIZE), 5)
    assert covered == 4
    harness.cache.check_integrity([table])


def test_discarded_blocks_are_reported_and_not_cached() -> None:
    harness = Harness()
    tokens = list(range(9))
    started = harness.start(tokens)
    assert started is not None
    table, _ = started
    harness.compute(table, tokens, 0, 5)
    blocks = list(table.blocks)
    assert harness.cache.discard(table) == blocks[1:]
    harness.cache.check_integrity([])
    assert (harness.cache.num_cached, harness.cache.num_free) == (1, 7)


def test_what_a_wholly_discarded_block_was_copied_from_is_not_found_again() -> None:
    harness = Harness()
    harness.finish([1, 2, 3, 4, 5, 6])
    started = harness.start([1, 2, 3, 4, 5, 7])
    assert started is not None and harness.num_copies == 1

    assert len(harness.cache.discard(started[0], whole=True)) == 3
    harness.cache.check_integrity([])
    assert harness.finish([1, 2, 3, 4, 5, 6]) == 0


def test_what_has_taken_the_place_of_a_source_stays() -> None:
    harness = Harness(num_blocks=4)
    harness.finish([1, 2, 3])
    started = harness.start([1, 2, 4])
    assert started is not None and harness.num_copies == 1
    other = harness.start([9] * 12)
    assert other is not None
    harness.compute(other[0], [9] * 12, 0, 12)

    harness.cache.discard(started[0], whole=True)
    harness.cache.release(other[0], [9] * 12, 12)
    harness.cache.check_integrity([])
    assert harness.finish([9] * 12) == 11


def test_a_remembered_text_is_found_as_if_it_had_been_computed() -> None:
    cache = KvCache(8, SIZE, reuse=True)
    tokens = list(range(2 * SIZE + 2))
    cache.remember(tokens)
    assert (cache.num_held, cache.num_cached) == (0, 3)
    table = BlockTable()
    assert cache.take_prefix(table, tokens, prefix_keys(tokens, SIZE), len(tokens) - 1) == len(tokens) - 1
    cache.check_integrity([table])


def test_a_text_that_finds_no_room_is_not_remembered() -> None:
    cache, table = KvCache(4, SIZE, reuse=True), BlockTable()
    assert cache.extend(table, 2 * SIZE)
    cache.remember(list(range(3 * SIZE)))
    assert (cache.num_held, cache.num_cached) == (2, 0)
    cache.remember(list(range(2 * SIZE)))
    assert (cache.num_held, cache.num_cached) == (2, 2)
    cache.check_integrity([table])


def test_reuse_switched_off() -> None:
    harness = Harness(reuse=False)
    tokens = list(range(9))
    assert harness.finish(tokens) == 0
    assert harness.finish(tokens) == 0
    assert harness.cache.num_cached == 0


def test_broken_accounting_is_noticed() -> None:
    harness = Harness()
    started = harness.start(list(range(8)))
    assert started is not None
    with pytest.raises(AssertionError, match="references"):
        harness.cache.check_integrity([])
    harness.cache._free.append(harness.cache._free[0])
    with pytest.raises(AssertionError, match="twice"):
        harness.cache.check_integrity([started[0]])


OPERATION_NAMES = ["start", "compute", "extend", "release", "discard", "fail"]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(OPERATION_NAMES), st.integers(0, 5), st.integers(0, 12)),
    max_size=60,
)


@given(OPERATIONS, st.booleans())
def test_the_accounting_adds_up_and_no_content_is_mixed_whatever_happens(operations: list[Any], reuse: bool) -> None:
    harness = Harness(num_blocks=7, reuse=reuse)
    live: list[list[Any]] = []
    for operation, pick, number in operations:
        if operation == "start":
            # Few distinct tokens, so that prefixes meet often.
            tokens = [(number >> bit) & 1 for bit in range(2 + pick * 2)]
            started = harness.start(tokens)
            if started is not None:
                live.append([started[0], tokens, started[1]])
        elif live:
            sequence = live[pick % len(live)]
            table, tokens, computed = sequence
            if operation == "compute":
                end = min(len(tokens), computed + 1 + number % 5)
                harness.compute(table, tokens, computed, end)
                sequence[2] = end
            elif operation == "extend" and harness.cache.extend(table, len(tokens) + 1):
                tokens.append(number & 1)
            elif operation == "release":
                harness.cache.release(table, tokens, computed)
                live.remove(sequence)
            elif operation in ("discard", "fail"):
                harness.cache.discard(table, whole=operation == "fail")
                live.remove(sequence)
        harness.cache.check_integrity([one[0] for one in live])
        for table, tokens, computed in live:
            assert harness.content(table, computed) == tokens[:computed]
