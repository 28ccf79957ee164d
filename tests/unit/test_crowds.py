"""The bench of modes under load: who answers what when, and what a line says."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from rich.console import Console

from bench.crowds import ROWS, Row, Taken, lines_of, set_size
from demo.asking import in_turns


def turns(num_sets: int) -> list[tuple[int, Row]]:
    """Sets and rows in the order in which they are asked."""
    console = Console(file=io.StringIO())
    return [(number, row) for number, _, row in in_turns(ROWS, range(num_sets), "sets", console)]


def test_every_row_answers_every_set_and_none_follows_another_on_the_same() -> None:
    order = turns(10)
    assert {(number, row.name) for number, row in order} == {(number, row.name) for number in range(10) for row in ROWS}
    assert len(order) == 10 * len(ROWS)
    assert all(before[0] != after[0] for before, after in pairwise(order))


def test_each_row_comes_in_every_place() -> None:
    order = [row.name for _, row in turns(10)]
    rounds = [order[start : start + len(ROWS)] for start in range(0, len(order), len(ROWS))]
    assert all(len({names[place] for names in rounds}) == len(ROWS) for place in range(len(ROWS)))


@pytest.mark.parametrize(("concurrency", "size"), [(1, 8), (2, 8), (16, 48)])
def test_every_client_has_some_problems(concurrency: int, size: int) -> None:
    assert set_size(concurrency) == size


def test_a_line_compares_the_same_sets() -> None:
    """Whatever order they were answered in."""
    taken = [Taken(row.name, number, 1.0 + number, 100) for row in ROWS for number in (1, 0)]
    taken = [Taken(one.row, one.number, 2 * one.seconds, 100) if one.row == "lr" else one for one in taken]
    lines = {one["name"]: one for one in lines_of(4, taken)}

    assert lines["lr"]["speedup"] == lines["lr"]["speedup_low"] == lines["lr"]["speedup_high"] == 0.5
    assert lines["ar"]["speedup"] == 1.0
    assert lines["ar"]["tokens_per_s"] == pytest.approx(200 / 3, abs=0.1)
    assert {one["concurrency"] for one in lines.values()} == {4}
