"""What work costs, as it is measured while serving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lr_backend.policy.policy import Learned
from lr_backend.policy.prices import LONG_PROMPT, Crowding, Prices
from lr_backend.request import VerifierName

STEEP = ((6.0, 0.9), (7.0, 0.5), (1.0, 0.01))
"""Companions and seconds through which a line leaves less than nothing for a token alone."""


@dataclass
class Clock:
    """A clock that is set by hand."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(alone=st.floats(0.001, 10.0), share=st.floats(0.0, 1.0))
def test_crowding_finds_the_line_it_is_shown(alone: float, share: float) -> None:
    crowding = Crowding()
    for companions in (0, 1, 2, 3, 5, 7) * 20:
        crowding.add(companions, alone * (1.0 + share * companions))
    assert crowding.at(0) == pytest.approx(alone, rel=0.15)
    assert crowding.at(3) == pytest.approx(alone * (1.0 + 3 * share), rel=0.15)
    assert crowding.slowdown(0, 4) == pytest.approx(1.0 + 4 * share, rel=0.2)


@example(list(STEEP), 0.0, 1.0)
@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(1e-6, 100.0)), max_size=30), st.floats(0, 20), st.floats(0, 20))
def test_a_crowd_never_speeds_up_nor_takes_less_than_nothing(seen: list[tuple[float, float]], others: float, more: float) -> None:
    crowding = Crowding()
    for companions, seconds in seen:
        crowding.add(companions, seconds)
    assert crowding.slowdown(others, more) >= 1.0
    assert not seen or crowding.at(0) > 0.0
    assert crowding.at(others) >= 0.0


@pytest.mark.parametrize("admission_s", [0.0, 0.5])
def test_a_line_tells_an_admission_from_the_tokens_of_its_call(admission_s: float) -> None:
    crowding = Crowding()
    for num_tokens in (5, 20, 40, 80) * 10:
        for companions in (0, 1, 3, 7):
            seconds = admission_s + num_tokens * 0.01 * (1.0 + 0.1 * companions)
            crowding.add(companions, seconds / num_tokens, num_tokens)
    assert crowding.at(7, 1_000) == pytest.approx(0.017 + admission_s / 1_000, rel=0.1)
    assert crowding.at(7, 10) == pytest.approx(0.017 + admission_s / 10, rel=0.15)


def test_a_call_counts_by_its_tokens() -> None:
    """A short one that waited says little of what tokens take."""
    crowding = Crowding()
    for _ in range(50):
        crowding.add(1.0, 0.01, 40)
        crowding.add(1.0, 0.1, 1)
    assert crowding.at(1.0, 40) < 0.015


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(1e-6, 100.0), st.integers(1, 500)), min_size=1, max_size=30))
def test_no_admission_and_no_token_takes_less_than_nothing(seen: list[tuple[float, float, int]]) -> None:
    crowding = Crowding()
    for each in seen:
        crowding.add(*each)
    assert crowding.at(0.0) > 0.0
    assert crowding.at(0.0, 1) >= crowding.at(0.0)
    assert crowding.at(1.0) >= crowding.at(0.0)


def companions(of: Crowding) -> float:
    """Of the one call so far."""
    return of._first[1] / of._n


def test_a_token_is_timed_with_its_company_by_whether_drafts_are_verified() -> None:
    clock = Clock()
    prices = Prices(clock)
    with prices.step(drafts=False) as outer:
        with prices.step(drafts=True) as inner:
            clock.now_s += 2.0
            inner.num_tokens = 4
        clock.now_s += 2.0
        outer.num_tokens = 2
    plain, verified = prices.target[False], prices.target[True]
    assert (plain.token_s.value, verified.token_s.value) == (2.0, 0.5)
    assert companions(plain.crowding) == pytest.approx(0.5)  # half of the time another ran
    assert companions(verified.crowding) == pytest.approx(1.0)
    assert prices.num_sequences == 0


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError()])
def test_work_that_does_not_come_to_its_end_counts_as_company_only(error: BaseException) -> None:
    clock = Clock()
    prices = Prices(clock)

    def given_up() -> None:
        with prices.step(drafts=False), prices.drafting():
            clock.now_s += 3.0
            raise error

    with prices.step(drafts=False) as other:
        with pytest.raises(type(error)):
            given_up()
        other.num_tokens = 3
    assert prices.target[False].token_s.value == 1.0
    assert companions(prices.target[False].crowding) == pytest.approx(1.0)
    assert prices.drafted_token_s.value is None
    assert prices.num_sequences == 0


def test_what_took_no_time_or_brought_nothing_has_no_price() -> None:
    clock = Clock()
    prices = Prices(clock)
    with prices.step(drafts=False) as work:
        work.num_tokens = 5
    with prices.step(drafts=False):
        clock.now_s += 1.0
    with prices.drafting():
        clock.now_s += 1.0
    assert prices.target[False].token_s.value is None
    assert prices.drafted_token_s.value is None


def test_what_reads_a_long_prompt_has_no_price() -> None:
    clock = Clock()
    prices = Prices(clock)
    for num_read in (LONG_PROMPT, LONG_PROMPT - 1):
        assert prices.target[True].token_s.value is prices.drafted_token_s.value is None
        with prices.step(drafts=True, num_read=num_read) as work, prices.drafting(num_read) as drafted:
            clock.now_s += 4.0
            work.num_tokens = drafted.num_tokens = 2
    assert prices.target[True].token_s.value == prices.drafted_token_s.value == 2.0


def test_the_price_of_a_row_is_that_of_the_steps_that_are_written_now() -> None:
    clock = Clock()
    prices = Prices(clock)
    for drafts in (False, True, True):
        for _ in range(64):
            with prices.step(drafts=drafts) as work:
                clock.now_s += 1.0
                work.num_tokens = 2
    assert prices.usual is prices.target[True]


def test_how_slow_one_verifier_is_says_nothing_of_another() -> None:
    clock = Clock()
    prices = Prices(clock)
    for name, seconds in ((VerifierName.JUDGE, 2.0), (VerifierName.CASCADE, 0.5)):
        prices.judged(name, seconds)
    assert prices.verdict_s[VerifierName.JUDGE].value == 2.0
    assert prices.verdict_s[VerifierName.CASCADE].value == 0.5
    assert prices.verdict_s[VerifierName.EXACT].value is None


def test_requests_are_counted_while_they_are_answered() -> None:
    prices = Prices(Clock())
    with prices.request(), prices.request():
        assert prices.num_requests == 2
    assert prices.num_requests == 0


# What a row costs ------------------------------------------------------------------------------------------------------


def learned(per_companion: float) -> Learned:
    found = Learned(Clock())
    for companions in (0, 1, 3, 7) * 10:
        found.prices.target[False].crowding.add(companions, 1.0 + per_companion * companions)
        found.prices.target[False].token_s.add(1.0)
    return found


def test_a_row_costs_what_it_slows_down_and_that_of_everybody_in_flight() -> None:
    free, dear = learned(0.0), learned(0.5)
    for one in (free, dear):
        one.prices.num_requests = 4
    assert free.least_chance == pytest.approx(0.0, abs=0.02)
    assert dear.price_of_row == pytest.approx(0.5, rel=0.1)
    assert dear.least_chance == pytest.approx(2.0, rel=0.1)  # of no use, however likely


def test_before_anything_is_measured_a_row_costs_little() -> None:
    found = Learned(Clock())
    found.prices.num_requests = 1
    assert 0.0 <= found.least_chance < 0.1
