"""When a measurement at some pace is void, and that it says so."""

from __future__ import annotations

import pytest

from lr_backend.hardware.lateness import MAX_LATE_SHARE, Lateness


def test_shares_are_of_the_paced_seconds() -> None:
    both = Lateness(90.0, 0.3) + Lateness(10.0, 0.2)
    assert both.share == pytest.approx(0.005)
    assert not both.void
    assert both - Lateness(90.0, 0.3) == Lateness(10.0, pytest.approx(0.2))
    assert Lateness().share == 0.0


def test_what_nobody_measured_is_void() -> None:
    assert Lateness().void
    assert str(Lateness()) == "nothing was paced"


def test_more_than_one_percent_late_says_that_it_is_void() -> None:
    assert Lateness(100.0, 100.0 * MAX_LATE_SHARE).void is False
    late = Lateness(100.0, 1.2)
    assert late.void
    assert str(late).startswith("1.2% late over 100 s of paced iterations, more than 1%")
    assert "void" in str(late)
    assert "void" not in str(Lateness(100.0, 0.9))
