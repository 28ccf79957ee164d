"""Which way brings tokens soonest: by prediction, corrected by what each way has lately taken.

All requests of a server at one load take the same way at a time: one that takes more than its share slows the others down, so
that each by itself would gain even where all together lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

from lr_backend.policy.average import Average

SPAN_STEPS, FEWEST_STEPS, ENOUGH_STEPS = 8, 3, 64
"""Steps of each request in one span of a way: a window fills within a few. Fewer where all requests together have enough, down to
so many each."""
MOST_OVER = 4
"""A span ends after so many times these steps at the latest, though requests still join its way."""
LEAST_STEPS = 3
"""Of each kind of target step before its price is believed."""
CHANGED_SHARE, CHANGED_SPANS = 1.5, 3
"""What a way takes has changed where it takes so much longer or shorter than usual, so many spans in a row."""
MEMORY = 24
"""Spans after which a way's older ones have faded to about a third. Here and below one of ``SPAN_STEPS`` steps is meant: a span
of many requests tells as much as several of one."""
PRIOR_SPANS = 2.0
"""A prediction counts as much as so many spans at first, and no more once a way's memory is full."""
DOUBT, KNOWN_SPANS, SPANS_A_TRY = 0.3, 8, 4
"""By which share the time of one span may be wrong; after how many spans a way is known; one span of so many tries a way that is
not known yet and may be the best."""
CAUTION, CAUTION_OF_DRAFTS = 1.0 / 32.0, 1.0 / 16.0
"""Looking ahead is expected to take so much longer for every request in flight beyond those at its last try; and draft tokens by
calls, of which a step makes several."""
EXPLORED_SHARE = 0.01
"""Trying ways that are known to be slower may cost this share of the time at most."""
STALE_SPANS = 512
"""Spans after which a way is tried again whatever it may cost: it may have been timed while the server stood still. As long as it
then takes far less than it seemed to, it is tried on."""
COST_MEMORY = 256
"""Spans after which what trying has cost has faded to about a third."""


class Way(NamedTuple):
    """How answers are written: looking ahead by steps, and with draft tokens."""

    ahead: bool
    draft_tokens: bool


class Turn(NamedTuple):
    """From one change of the way to the next, at one load.

    Attributes:
        num: changes before it.
        load: as :class:`~lr_backend.policy.policy.Learned` counts it.
    """

    way: Way
    num: int
    load: int


class Span(NamedTuple):
    """Steps of all requests, and what they took."""

    seconds: float
    num_tokens: int
    num_steps: int

    def plus(self, seconds: float, num_tokens: int, num_steps: int) -> Span:
        return Span(self.seconds + seconds, self.num_tokens + num_tokens, self.num_steps + num_steps)


NOTHING = Span(0.0, 0, 0)

Predict = Callable[[Way], float]
"""Seconds that a committed token will take that way."""


class Trial:
    """The way that requests take at one load.

    Args:
        like: the trial of a load near this one: its best way is taken first, and predictions are as wrong as there, until more
            is known.
        drafts_by_calls: draft tokens are verified by calls of their own, and not inside the engine.

    Attributes:
        way: to take now.
        num_spans: that have come to their end.
        num_kept: spans in a row after which it was still the best. Tries of other ways between them count for nothing.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        like: Trial | None = None,
        *,
        load: int = 0,
        drafts_by_calls: bool = True,
    ) -> None:
        self._ways, self._load = tuple(ways), load
        self._drafts_by_calls = drafts_by_calls
        self._like = like
        self._taken, self._off = ({way: Average(memory=MEMORY) for way in ways} for _ in range(2))
        """Seconds a token, and the same over those that were predicted, by spans."""
        self._surprises = dict.fromkeys(self._ways, 0)
        """How many spans of each way in a row took far longer than usual, or far shorter (negative)."""
        self._spent_s = self._lost_s = 0.0
        self.num_spans = 0
        self._span = self._settled = NOTHING
        """What this span has brought, and of it what came after all requests took its way."""
        self._num_requests = 1
        self._kept, self._left = dict.fromkeys(self._ways, 0), dict.fromkeys(self._ways, 0)
        """Spans in a row after which a way was still the best, and spans since it was taken."""
        self._doubted: Way | None = None
        """It was left for long, and taken again."""
        self._is_charged = False
        """The way that is taken was not the best when it was chosen, and is tried for its low price."""
        self._does_more = False
        """Than the way before."""
        self._num_turns = 0
        self._best: Way = like._best if like is not None else self._ways[0]
        """It was the best when a way was last chosen. ``way`` may be another one, which is tried."""
        self.way = self._best

    @property
    def turn(self) -> Turn:
        """The way to take now, and since which change."""
        return Turn(self.way, self._num_turns, self._load)

    @property
    def num_kept(self) -> int:
        return self._kept[self.way]

    def off(self, way: Way) -> float | None:
        """What the way took over what was predicted; None: it was never taken, here or at a load near this one."""
        off, usual = self._off[way], self._usual(way)
        return usual if off.value is None else self._blend(off, 1.0 if usual is None else usual)

    def expected(self, way: Way, predict: Predict) -> float:
        """Seconds a token: as they have lately been at this load; before that as predicted, and as wrong as near this load."""
        usual = self._usual(way)
        return self._blend(self._taken[way], predict(way) * (1.0 if usual is None else usual) * self._caution(way))

    def seen_at(self, way: Way) -> int:
        """Requests in flight at the load, this or one near it, where the way was taken; 1: it never was."""
        if self._taken[way].value is not None:
            return self._num_requests
        return self._like.seen_at(way) if self._like is not None else 1

    def _usual(self, way: Way) -> float | None:
        """What it takes over what is predicted at the load near this one. That may yet be found to have been a moment's."""
        return self._like.off(way) if self._like is not None else None

    def _caution(self, way: Way) -> float:
        """What calls that are made more than now cost the others is in no price before all of them have taken that way."""
        num_others = max(0, self._num_requests - self.seen_at(way))
        ahead, drafts = way.ahead > self.way.ahead, self._adds_draft_calls(way, self.way)
        return 1.0 + num_others * (CAUTION * ahead + CAUTION_OF_DRAFTS * drafts)

    def _adds_draft_calls(self, way: Way, to: Way) -> bool:
        """It has draft tokens by calls, which the other way does not make."""
        return self._drafts_by_calls and way.draft_tokens > to.draft_tokens

    @staticmethod
    def _blend(found: Average, prior: float) -> float:
        if found.value is None:
            return prior
        weight = PRIOR_SPANS * (1.0 - found.count / MEMORY)
        return (found.count * found.value + weight * prior) / (found.count + weight)

    def committed(
        self,
        way: Way,
        seconds: float,
        num_tokens: int,
        num_steps: int,
        num_requests: int,
        *,
        predict: Predict,
        fresh: bool = True,
        joins: bool = False,
    ) -> None:
        """One request took ``seconds`` for so many tokens, the steps of one or more commits, in that way.

        Args:
            fresh: nothing is under way behind these steps. Where a span ends so, no work of it is left to the next one.
            joins: it took another way before. What all did until now was beside that, and says little of all in one way.
        """
        if way != self.way:
            return
        self._num_requests = max(1, num_requests)
        self._span, self._settled = (each.plus(seconds, num_tokens, num_steps) for each in (self._span, self._settled))
        if joins:
            self._settled = NOTHING
        enough = max(FEWEST_STEPS * self._num_requests, min(SPAN_STEPS * self._num_requests, ENOUGH_STEPS))
        is_settled = self._settled.num_steps >= enough
        timed = self._settled if is_settled else self._span
        is_long = (is_settled and fresh) or timed.num_steps >= (2 if is_settled else MOST_OVER) * enough
        # What is slower than the best way ends early. Beside others that do less a way seems faster than it is: so where it is
        # slower even then, no more need join it. One that fills the KV memory takes many times as long.
        seen = self._span if self._does_more else self._settled
        is_sure = self._does_more and seen.num_steps >= enough
        is_bad = seen.num_steps >= max(SPAN_STEPS, self._num_requests) and self._takes_longer(seen, predict, is_sure)
        timed = timed if is_long else seen
        # Luck that was taken off may be more than a few short steps took: such a span goes on.
        if timed.num_tokens and timed.seconds > 0.0 and (is_long or is_bad):
            self._end_span(timed, predict)

    def choose(self, predict: Predict) -> Way:
        """Take the best way, or another one where its price may be paid; the best."""
        expected = {way: self.expected(way, predict) for way in self._ways}
        best = self._best = min(expected, key=expected.__getitem__)
        if self.way == best:
            others = [way for way in self._ways if way != best]
            new = [way for way in others if self._is_new(way, expected[way], expected[best])]
            close = [way for way in others if self._may_be_best(way, expected[way], expected[best])]
            free = new or (close if self.num_spans % SPANS_A_TRY == 0 else [])
            # A span of a way that is slower by some share costs that share of a span.
            cheap = [way for way in others if self._affords(expected[way] / expected[best] - 1.0)]
            stale = [way for way in others if self._left[way] >= STALE_SPANS or way == self._doubted]
            if tried := free or stale or cheap:
                self.way, self._is_charged = min(tried, key=lambda way: (self._taken[way].count, expected[way])), not free
                if tried is stale:
                    self._doubted = self.way
                return best
        self.way, self._is_charged = best, False
        return best

    @property
    def _most(self) -> float:
        """A try may take so many times as long as the best way: it then costs all requests no more than one of them takes."""
        return 1.0 + 1.0 / self._num_requests

    def _is_new(self, way: Way, expected: float, best: float) -> bool:
        """It was never taken, here or at a load near this one, and a try may be paid for.

        The way that does least is tried at each load: what it takes is seen neither beside a draft on the same cards nor among
        fewer requests. A try of it may take twice as long as the best way at any load, since it is in nobody's way.
        """
        if way == min(self._ways):
            return self._taken[way].value is None and expected < 2.0 * best
        # Looking ahead may be tried before it is trusted: that costs less than to do without it for long. Draft tokens by calls
        # cost many requests more.
        at_first = expected if self._adds_draft_calls(way, self.way) else expected / self._caution(way)
        return self.off(way) is None and at_first < self._most * best

    def _may_be_best(self, way: Way, expected: float, best: float) -> bool:
        """Too few spans were timed to say that it is slower, and a try may be paid for."""
        count, most = self._taken[way].count, self._most * best
        return 0 < count < KNOWN_SPANS and expected < most and expected * (1.0 - DOUBT / sqrt(count)) < best

    def _takes_longer(self, seen: Span, predict: Predict, is_sure: bool) -> bool:
        """These steps take more than the best other way is expected to; by more than chance makes it, unless that is sure."""
        others = [self.expected(way, predict) for way in self._ways if way != self.way]
        # Twice the doubt, for they are looked at after each step.
        share = 1.0 if is_sure else 1.0 + 2.0 * DOUBT / sqrt(seen.num_steps / SPAN_STEPS)
        return bool(others) and seen.seconds > share * min(others) * seen.num_tokens

    def _affords(self, share: float) -> bool:
        """A span that costs that share of the last one."""
        return self._lost_s + share * self._span.seconds <= EXPLORED_SHARE * self._spent_s

    def _look_for_change(self, taken: float) -> None:
        """Some spans in a row that are far from what a way used to take tell of another world: what was before says nothing."""
        usual, before = self._taken[self.way].value or taken, self._surprises[self.way]
        surprise = (taken > CHANGED_SHARE * usual) - (taken * CHANGED_SHARE < usual)
        self._surprises[self.way] = before + surprise if surprise and before * surprise >= 0 else surprise
        if abs(self._surprises[self.way]) >= CHANGED_SPANS:
            self._taken[self.way], self._off[self.way] = Average(memory=MEMORY), Average(memory=MEMORY)
            self._surprises[self.way] = 0

    def _end_span(self, timed: Span, predict: Predict) -> None:
        expected = {way: self.expected(way, predict) for way in self._ways}
        best, taken = min(expected.values()), timed.seconds / timed.num_tokens
        self._look_for_change(taken)
        if self.way == self._doubted and self._surprises[self.way] >= 0:
            self._doubted = None
        told = timed.num_steps / SPAN_STEPS
        self._taken[self.way].add(taken, told)
        self._off[self.way].add(taken / predict(self.way), told)
        fade = 1.0 - 1.0 / COST_MEMORY
        self._spent_s, self._lost_s = fade * self._spent_s + self._span.seconds, fade * self._lost_s
        self.num_spans += 1
        before = self.way
        self._left = {way: num + 1 for way, num in self._left.items()} | {before: 0}
        if self._is_charged:  # what a way loses that has been the best until now is no price of trying
            self._lost_s += max(0.0, self._span.seconds - best * self._span.num_tokens)
        is_best = self.choose(predict) == before
        if self.way != before:
            self._num_turns += 1
            self._does_more = self.way.ahead > before.ahead or self._adds_draft_calls(self.way, before)
        self._kept[before] = self._kept[before] + 1 if is_best else 0
        self._span = self._settled = NOTHING
