"""Tables between whose entries one interpolates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.hardware.tables import Grid, Line

numbers = st.floats(-1e3, 1e3)
axes = st.lists(st.integers(0, 1000), min_size=2, max_size=6, unique=True).map(sorted).map(lambda xs: tuple(map(float, xs)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    xs, ys = draw(axes), draw(axes)
    rows = st.lists(numbers, min_size=len(ys), max_size=len(ys)).map(tuple)
    return Grid(xs, ys, tuple(draw(st.lists(rows, min_size=len(xs), max_size=len(xs)))))


@given(grids())
def test_at_its_entries_a_table_holds_what_was_written(grid: Grid) -> None:
    for x, row in zip(grid.xs, grid.values, strict=True):
        line = Line(grid.ys, row)
        for y, value in zip(grid.ys, row, strict=True):
            assert grid.at(x, y) == pytest.approx(value, abs=1e-6)
            assert line.at(y) == pytest.approx(value, abs=1e-6)


@given(axes, axes, numbers, numbers, numbers, st.floats(0.0, 2000.0), st.floats(0.0, 2000.0))
def test_a_plane_is_met_everywhere_behind_its_first_entries(
    xs: tuple[float, ...], ys: tuple[float, ...], slope: float, other: float, start: float, x: float, y: float
) -> None:
    grid = Grid(xs, ys, tuple(tuple(start + slope * one + other * two for two in ys) for one in xs))
    x, y = max(x, xs[0]), max(y, ys[0])
    assert grid.at(x, y) == pytest.approx(start + slope * x + other * y, rel=1e-6, abs=1e-3)


def test_before_its_first_entry_a_table_stays_there_and_beyond_the_last_it_goes_on() -> None:
    line = Line((10.0, 20.0, 40.0), (1.0, 2.0, 6.0))
    assert [line.at(x) for x in (0.0, 10.0, 15.0, 30.0, 40.0, 50.0)] == [1.0, 1.0, 1.5, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("xs", [(1.0,), (2.0, 1.0), (1.0, 1.0)])
def test_an_axis_must_ascend(xs: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Line(xs, (0.0,) * len(xs))


def test_ragged_values_are_no_grid() -> None:
    with pytest.raises(ValueError, match="2 by 2"):
        Grid((1.0, 2.0), (1.0, 2.0), ((1.0, 2.0), (3.0,)))
    with pytest.raises(ValueError, match="1 values for 2"):
        Line((1.0, 2.0), (1.0,))
