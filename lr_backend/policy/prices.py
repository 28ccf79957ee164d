"""What work has lately cost, measured while serving.

One :class:`Prices` is shared by all requests of a server: what a token of the target takes alone and among others, with draft
tokens and without, what a drafted one takes, how long steps are, and what the verdicts of each verifier take. What a row more in
the target's iterations costs follows from how a token's time grows with the sequences in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lr_backend.clock import Clock
from lr_backend.policy.average import Average


class Crowding:
    """How the time of a target token grows with the target sequences in flight: a line, by weighted least squares.

    Old points fade. Until different crowds were seen, the line keeps to ``prior`` of a token's time a companion.
    """

    FADE = 0.98
    LEAST_ALONE = 1e-3
    """A token alone takes this part of the mean at least."""

    def __init__(self, prior: float = 0.05, weight: float = 4.0) -> None:
        self._prior = prior
        self._weight = weight
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, companions: float, seconds: float) -> None:
        """Tokens took ``seconds`` > 0 each while on average ``companions`` others ran."""
        self._n, self._x, self._y = self._n * self.FADE + 1.0, self._x * self.FADE + companions, self._y * self.FADE + seconds
        self._xx = self._xx * self.FADE + companions * companions
        self._xy = self._xy * self.FADE + companions * seconds

    def at(self, companions: float) -> float:
        """Seconds of a token with so many others in flight; 0 before the first."""
        alone, slope = self._fit()
        return alone + slope * companions

    def slowdown(self, companions: float, more: float) -> float:
        """Time of a token with ``companions + more`` others in flight over that with ``companions``, at least 1."""
        alone, slope = self._fit() if self._n else (1.0, self._prior)
        return max(1.0, (alone + slope * (companions + more)) / (alone + slope * companions))

    def _fit(self) -> tuple[float, float]:
        """(seconds alone, seconds a companion): ridge regression towards the prior's slope."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx - self._n * mean_x**2
        together = self._xy - self._n * mean_x * mean_y
        expected = self._prior * mean_y / (1.0 + self._prior * mean_x)
        slope = max(0.0, (together + self._weight * expected) / (spread + self._weight))
        # However steep, a line through noise must not leave a token alone no time, or less.
        most = (1.0 - self.LEAST_ALONE) * mean_y / mean_x if mean_x else slope
        slope = min(slope, most)
        return mean_y - slope * mean_x, slope


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


@dataclass
class TargetPrices:
    """Of the target's steps, all with draft tokens or all without.

    Attributes:
        crowding: seconds a token by the sequences in flight.
        token_s: seconds a token, as it has lately been.
    """

    crowding: Crowding = field(default_factory=Crowding)
    token_s: Average = field(default_factory=Average)


class Prices:
    """What one server has measured lately. ``clock`` returns seconds; only differences are used."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.target = {False: TargetPrices(), True: TargetPrices()}
        """By whether draft tokens are verified."""
        self.drafted_token_s = Average()
        self.step_tokens = Average()
        self.verdict_s: defaultdict[str, Average] = defaultdict(Average)
        self.num_requests = 0
        self._sequences = Presence(clock)

    @property
    def num_sequences(self) -> int:
        """Target sequences in flight."""
        return self._sequences.count

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is being answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def step(self, *, drafts: bool) -> Iterator[Work]:
        """The target writes: a companion to the others while it does, and timed by token if it comes to its end."""
        work, started, before = Work(), self.clock(), self._sequences.change(+1)
        try:
            yield work
        except BaseException:
            self._sequences.change(-1)
            raise
        after, seconds = self._sequences.change(-1), self.clock() - started
        if seconds > 0.0 and work.num_tokens:
            found = self.target[drafts]
            found.crowding.add(max(0.0, (after - before) / seconds - 1.0), seconds / work.num_tokens)
            found.token_s.add(seconds / work.num_tokens)

    @contextmanager
    def drafting(self) -> Iterator[Work]:
        """The draft writes; timed by token if it comes to its end."""
        work, started = Work(), self.clock()
        yield work
        if work.num_tokens:
            self.drafted_token_s.add((self.clock() - started) / work.num_tokens)

    @contextmanager
    def verdict(self, verifier: str) -> Iterator[None]:
        """A verdict is made; timed if it comes to its end."""
        started = self.clock()
        yield
        self.verdict_s[verifier].add(self.clock() - started)
