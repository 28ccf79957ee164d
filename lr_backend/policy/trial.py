"""Which way brings tokens soonest: by prediction, corrected by what each way has lately taken.

All requests of a server at one load take the same way at a time: one that takes more than its share slows the others down, so
that each by itself would gain even where all together lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lr_backend.policy.average import Average

SPAN_STEPS = 8
"""Steps of each request in one span of a way: a window fills within a few."""
LEAST_STEPS = 8
"""Of each kind of target step before its price is believed."""
MEMORY = 24
"""Spans after which a way's older ones have faded to about a third."""
PRIOR_SPANS = 2.0
"""A prediction counts as much as so many spans at first, and no more once a way's memory is full."""
FIRST_TRY_WITHIN, SPANS_A_FIRST_TRY = 2.0, 8
"""Every eighth span tries a way that was never taken, unless it is expected to take more than twice as long as the best."""
EXPLORED_SHARE = 0.01
"""Trying other ways than the best may cost this share of the time at most."""


@dataclass(frozen=True, slots=True)
class Way:
    """How answers are written: looking ahead by steps, and with draft tokens."""

    ahead: bool
    drafts: bool


Predict = Callable[[Way], float]
"""Seconds that a committed token will take that way."""


class Trial:
    """The way that requests take at one load.

    Attributes:
        way: to take now.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = tuple(ways)
        self._found = {way: Average(memory=MEMORY) for way in ways}
        """Seconds a token over those that were predicted, by spans."""
        self._spent_s = self._lost_s = 0.0
        self._num_spans = self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self.way = self._ways[0]

    def expected(self, way: Way, predict: Predict) -> float:
        """Seconds a token: the prediction, as wrong as it has lately been."""
        found = self._found[way]
        off, prior = found.value if found.value is not None else 1.0, PRIOR_SPANS * (1.0 - found.count / MEMORY)
        return predict(way) * (found.count * off + prior) / (found.count + prior)

    def committed(self, way: Way, seconds: float, num_tokens: int, num_steps: int, predict: Predict, num_requests: int) -> None:
        """One request took ``seconds`` for so many tokens, the steps of one or more commits, in that way."""
        if way != self.way:
            return
        self._seconds += seconds
        self._num_tokens += num_tokens
        self._num_steps += num_steps
        if self._num_steps >= SPAN_STEPS * max(1, num_requests) and self._num_tokens:
            self._end_span(predict)

    def choose(self, predict: Predict) -> None:
        """Take the best way, or another one where its price may be paid."""
        expected = {way: self.expected(way, predict) for way in self._ways}
        best = min(expected, key=expected.__getitem__)
        if self.way == best:
            others = [way for way in self._ways if way != best]
            new = [way for way in others if not self._found[way].count and expected[way] < FIRST_TRY_WITHIN * expected[best]]
            fresh = new if self._num_spans % SPANS_A_FIRST_TRY == 0 else []
            # A span of a way that is slower by some share costs that share of a span.
            cheap = [way for way in others if self._affords(expected[way] / expected[best] - 1.0)]
            if tried := fresh or cheap:
                self.way = min(tried, key=lambda way: self._found[way].count)
                return
        self.way = best

    def _affords(self, share: float) -> bool:
        """A span that costs that share of the last one."""
        return self._lost_s + share * self._seconds <= EXPLORED_SHARE * self._spent_s

    def _end_span(self, predict: Predict) -> None:
        expected = {way: self.expected(way, predict) for way in self._ways}
        best, taken = min(expected.values()), self._seconds / self._num_tokens
        self._found[self.way].add(taken / predict(self.way))
        self._spent_s += self._seconds
        self._num_spans += 1
        if expected[self.way] > best:  # another way was tried
            self._lost_s += max(0.0, self._seconds - best * self._num_tokens)
        if taken >= best:  # a way that was faster than any is expected to be gets one more span
            self.choose(predict)
        self._seconds, self._num_steps, self._num_tokens = 0.0, 0, 0
