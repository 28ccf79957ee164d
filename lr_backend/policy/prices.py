"""What work has lately cost, measured while serving.

One :class:`Prices` is shared by all requests of a server: what a token of the target takes alone and among others, with draft
tokens and without, what a drafted one takes, how long steps are, and what the verdicts of each verifier take. What a row more in
the target's iterations costs follows from how a token's time grows with the sequences in flight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lr_backend.clock import Clock
from lr_backend.policy.average import Average
from lr_backend.policy.others import Alone, Others


class Crowding:
    """How the time of a target token grows with the target sequences in flight, and what a call takes besides: its admission.

    Seconds of a call = admission + tokens x (alone + slope x companions), by weighted least squares over the seconds a token.
    Old points fade. Until different crowds were seen, the slope keeps to ``prior`` of a token's time a companion; until calls of
    different lengths were seen, an admission costs nothing.
    """

    FADE = 0.98
    LEAST_ALONE = 1e-3
    """A token alone takes this part of the mean at least."""
    MOST_WEIGHT = 4.0
    """Of a call, whose weight is its tokens, over that of a usual one."""

    def __init__(self, prior: float = 0.05, weight: float = 4.0) -> None:
        self._prior = prior
        self._weight = weight
        self._usual_tokens = 1.0
        self._n = 0.0
        self._first = (0.0,) * 3
        self._second = (0.0,) * 5
        """Moments of the calls a token (u), the companions (x) and the seconds a token (y)."""

    def add(self, companions: float, token_s: float, num_tokens: int = 1) -> None:
        """A call's tokens took ``token_s`` > 0 each while on average ``companions`` others ran."""
        if token_s <= 0.0:
            return  # it was not timed
        usual = self._usual_tokens = self._usual_tokens + 0.02 * (num_tokens - self._usual_tokens) if self._n else num_tokens
        weight = min(num_tokens / usual, self.MOST_WEIGHT)
        fade, u, x, y = self.FADE**weight, 1.0 / num_tokens, companions, token_s
        self._n = self._n * fade + weight
        self._first = tuple(old * fade + weight * new for old, new in zip(self._first, (u, x, y), strict=True))
        products = (u * u, u * x, x * x, u * y, x * y)
        self._second = tuple(old * fade + weight * new for old, new in zip(self._second, products, strict=True))

    def at(self, companions: float, num_tokens: float = math.inf) -> float:
        """Seconds of a token with so many others in flight, in a call of so many; 0 before the first."""
        alone, slope, admission_s = self._fit()
        return alone + slope * companions + admission_s / num_tokens

    def slowdown(self, companions: float, more: float) -> float:
        """Time of a token with ``companions + more`` others in flight over that with ``companions``, at least 1."""
        alone, slope, _ = self._fit() if self._n else (1.0, self._prior, 0.0)
        return max(1.0, (alone + slope * (companions + more)) / (alone + slope * companions))

    def _fit(self) -> tuple[float, float, float]:
        """(seconds of a token alone, seconds a companion, seconds of an admission): ridge regression towards the priors."""
        if not self._n:
            return 0.0, 0.0, 0.0
        u, x, y = (value / self._n for value in self._first)
        uu, ux, xx, uy, xy = self._second
        uu, ux, xx = uu - self._n * u * u + self._weight * u * u, ux - self._n * u * x, xx - self._n * x * x + self._weight
        uy, xy = uy - self._n * u * y, xy - self._n * x * y + self._weight * self._prior * y / (1.0 + self._prior * x)
        both = uu * xx - ux * ux
        admission_s, slope = (uy * xx - xy * ux) / both, (xy * uu - uy * ux) / both
        if admission_s < 0.0 or slope < 0.0:  # then only the other one counts
            slope, admission_s = (0.0, max(0.0, uy / uu)) if slope < 0.0 else (max(0.0, xy / xx), 0.0)
        # However steep, lines through noise must not leave a token alone no time, or less.
        too_steep = max(1.0, (slope * x + admission_s * u) / ((1.0 - self.LEAST_ALONE) * y))
        slope, admission_s = slope / too_steep, admission_s / too_steep
        return y - slope * x - admission_s * u, slope, admission_s


class Presence:
    """How many of something there are, and their seconds together."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = 0.0
        self.count = 0

    def change(self, by: int) -> float:
        """``by`` more from now on; returns :attr:`seconds`."""
        seconds = self.seconds
        self.count += by
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds until now, each counted as often as there was one."""
        now = self._clock()
        self._seconds, self._since = self._seconds + self.count * (now - self._since), now
        return self._seconds


@dataclass
class Work:
    """What a stretch of work has brought, to be filled in by whoever does it."""

    num_tokens: int = 0


LONG_PROMPT = 1024
"""Tokens of a prompt from which on the step that reads it says little of what a token takes."""


MOST_EXCUSED = 64
"""Steps for which drafts may be late while they read, if not one comes meanwhile."""


STALE_STEPS = 1024
"""Steps of the other kind after which what a kind of target steps has cost counts no more once there is a new one."""


@dataclass
class TargetPrices:
    """Of the target's steps, all with draft tokens or all without.

    Attributes:
        crowding: seconds a token by the sequences in flight.
        token_s: seconds a token, as it has lately been.
        num_under_way: steps that are being written.
        num_since: steps of the other kind since the last one of this kind.
    """

    crowding: Crowding = field(default_factory=Crowding)
    token_s: Average = field(default_factory=Average)
    num_under_way: int = 0
    num_since: int = 0


class Prices:
    """What one server has measured lately.

    Args:
        clock: returns seconds; only differences are used.
        others: the server's other processes.
        tell: is told what was measured, by its kind, and has :meth:`learn` called with it, here and in the other processes.

    Attributes:
        num_requests: in flight in this process.
    """

    def __init__(self, clock: Clock, others: Others | None = None, tell: Callable[..., None] | None = None) -> None:
        self.clock = clock
        self._others = others or Alone()
        self._tell = tell or self.learn
        self.target = {False: TargetPrices(), True: TargetPrices()}
        """By whether draft tokens are verified."""
        self._verifies = Average()
        """Share of the steps whose draft tokens were."""
        self.drafted_token_s = Average()
        self.step_tokens = Average()
        self.verdict_s: defaultdict[str, Average] = defaultdict(Average)
        self.num_requests = 0
        self._sequences = Presence(clock)
        self._num_excused = 0
        """Steps for which a draft was late that first read a long text, since the last one that has read such a text."""

    @property
    def num_in_all(self) -> int:
        """Requests in flight in all processes."""
        return self.num_requests + self._others.num_requests

    @property
    def num_sequences(self) -> int:
        """Target sequences in flight, of all processes."""
        return self._sequences.count + self._others.num_sequences

    @property
    def usual(self) -> TargetPrices:
        """Of the steps that have lately been more."""
        return self.target[(self._verifies.value or 0.0) > 0.5]

    def learn(self, kind: str, *values: Any) -> None:
        """Take in what this process or another one has measured."""
        match kind, values:
            case "step", (drafts, companions, token_s, num_tokens):
                found, other = self.target[drafts], self.target[not drafts]
                if found.num_since >= STALE_STEPS:
                    found.crowding, found.token_s = Crowding(), Average()
                found.crowding.add(companions, token_s, num_tokens)
                found.token_s.add(token_s)
                found.num_since, other.num_since = 0, other.num_since + 1
                self._verifies.add(float(drafts))
            case "drafted", (token_s, num_tokens):
                self.drafted_token_s.add(token_s)
                self.step_tokens.add(num_tokens)
            case "verdict", (verifier, seconds):
                self.verdict_s[verifier].add(seconds)

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is being answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def step(self, *, drafts: bool, num_read: int = 0) -> Iterator[Work]:
        """The target writes: a companion to the others while it does, and timed by token if it comes to its end.

        Args:
            num_read: tokens of the prompt, where this step waits until it is read.
        """
        work, started, found = Work(), self.clock(), self.target[drafts]
        elsewhere, before = self._others.num_sequences, self._change(+1)
        found.num_under_way += 1
        try:
            yield work
        finally:
            after = self._change(-1)
            found.num_under_way -= 1
        seconds = self.clock() - started
        if seconds > 0.0 and work.num_tokens and num_read < LONG_PROMPT:
            # Of the other processes two looks have to do.
            companions = (after - before) / seconds - 1.0 + (elsewhere + self._others.num_sequences) / 2.0
            self._tell("step", drafts, max(0.0, companions), seconds / work.num_tokens, work.num_tokens)

    def _change(self, by: int) -> float:
        seconds = self._sequences.change(by)
        self._others.say_sequences(self._sequences.count)
        return seconds

    @contextmanager
    def drafting(self, num_read: int = 0) -> Iterator[Work]:
        """The draft writes a step; timed by token if it comes to its end. ``num_read`` as in :meth:`step`."""
        work, started = Work(), self.clock()
        yield work
        if work.num_tokens and num_read < LONG_PROMPT:
            self._tell("drafted", (self.clock() - started) / work.num_tokens, work.num_tokens)
        elif work.num_tokens:
            self._num_excused = 0

    def excuses_draft(self) -> bool:
        """Whether a draft may be late once more as it first reads a long text. Not for ever, where none comes."""
        self._num_excused += 1
        return self._num_excused <= MOST_EXCUSED

    def judged(self, verifier: str, seconds: float) -> None:
        """A verdict took so long."""
        self._tell("verdict", verifier, seconds)
