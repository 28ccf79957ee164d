"""How a command that serves is told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lr_backend.cli.stop import StopRequest
from tests.support.waiting import until


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under nohup
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_while_the_event_is_looked_at_is_seen(stop: StopRequest) -> None:
    with stop.event._cond:  # as at the end of a wait; a handler that wanted this lock would never return
        signal.raise_signal(signal.SIGTERM)
    until(lambda: stop.asked() == 1)

    with stop.event._cond:
        signal.raise_signal(signal.SIGINT)
    until(lambda: stop.asked() == 2)


def test_a_terminal_that_closes_twice_is_not_impatient(stop: StopRequest) -> None:
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    until(lambda: stop.asked() == 1)
    assert not stop.impatient
    signal.raise_signal(signal.SIGTERM)
    until(lambda: stop.asked() == 2)
