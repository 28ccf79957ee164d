"""Depth by measurement: how far ahead to speculate, from what steps, drafts and verdicts have lately cost and brought.

One :class:`Pace` is shared by all requests of a server: it knows what a token of the target takes alone and among others, what
a drafted one takes, how long steps are, and of each verifier what its verdicts take and how often they accept. Each request has
a :class:`DepthChooser`, which starts from its verifier's acceptance rate and learns its own. The choice is the paper's formula
with measured overheads (:func:`lr_backend.loop.depth.speedup`), maximised over the depth. Where no depth pays the request goes
on by the target alone and tries again after a while.

A prediction cannot know everything: where draft and judge take their time from the target's own cores, even a step that is
alone in its batch is slower than without lookahead. So the whole of it is put on :class:`Trial` against the target alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from lr_backend.loop.average import Average
from lr_backend.loop.clock import Clock
from lr_backend.loop.confidence import Confidence
from lr_backend.loop.depth import speedup, useful_depth
from lr_backend.loop.payoff import Verifications
from lr_backend.request import Mode, ProposerName, VerifierName

LEAST_GAIN = 1.03
"""Predicted speedup below which lookahead is not worth the risk that the prediction is wrong."""
STEPS_UNTIL_RETRY = 24
"""Steps by the target alone before one is looked ahead from again: at most one part in so many is lost."""
PRIOR_STEPS = 6
"""The verifier's acceptance rate weighs as much as this many steps of the request's own."""
USUAL_ALPHA, USUAL_STEPS, USUAL_UNTIL = 0.6, 8.0, 64
"""What is expected of a verifier that has decided nothing yet; as how many of its steps that counts at first, and after how many
it counts no more."""
MAX_ALPHA = 0.98
USUAL_STEP_TOKENS = 24
"""Length of a step before one was seen."""
SPAN_STEPS = 8
"""Steps of each request in one span of a trial: a window fills within a few."""
SPANS_A_TRY, MOST_SPANS_A_TRY = 12, 96
"""Of so many spans one goes to the policy that did worse so far; of twice as many each time that it did so again."""
MOST_SPANS_AT_ONCE = 4
"""Longest stretch by the target alone: what one request may write before the policy can change."""


class Crowding:
    """How the time of a target token grows with the target sequences in flight: a line, by weighted least squares.

    Old points fade. Until different crowds were seen, the line keeps to ``prior`` of a token's time a companion.
    """

    FADE = 0.98
    LEAST_ALONE = 1e-3
    """A token alone takes this part of the mean at least."""

    def __init__(self, prior: float = 0.15, weight: float = 4.0) -> None:
        self._prior = prior
        self._weight = weight
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, companions: float, seconds: float) -> None:
        """Tokens took ``seconds`` > 0 each while on average ``companions`` others ran."""
        self._n, self._x, self._y = self._n * self.FADE + 1.0, self._x * self.FADE + companions, self._y * self.FADE + seconds
        self._xx = self._xx * self.FADE + companions * companions
        self._xy = self._xy * self.FADE + companions * seconds

    @property
    def alone_s(self) -> float | None:
        """Seconds of a token with no other sequence in flight, above 0; None before the first."""
        return self._fit()[0] if self._n else None

    def slowdown(self, companions: float, more: float) -> float:
        """Time of a token with ``companions + more`` others in flight over that with ``companions``, at least 1."""
        alone, slope = self._fit()
        return max(1.0, (alone + slope * (companions + more)) / (alone + slope * companions)) if self._n else 1.0

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


class Policy(StrEnum):
    """What is on trial."""

    PREDICTED = "predicted"
    """The depth that the formula finds best."""
    ALONE = "alone"


class Trial:
    """Which policy brings committed tokens sooner, found out by following each for a while.

    All requests of the server follow one policy at a time, whatever their verifiers: one that looks ahead slows the others
    down, so that each by itself would gain even where all together lose. A span's figure is seconds of requests for each
    committed token.
    """

    def __init__(self, clock: Clock) -> None:
        self._presence = Presence(clock)
        self._seconds_a_token = {policy: Average(memory=8) for policy in Policy}
        self._spans_a_try = SPANS_A_TRY
        self._spans_until_try = SPANS_A_TRY
        self._better: Policy | None = None
        self.policy = Policy.PREDICTED
        self._begin()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request follows the policy."""
        self._presence.change(+1)
        try:
            yield
        finally:
            self._presence.change(-1)

    @property
    def steps_left(self) -> int:
        """Steps of one request until the policy may change, at least one."""
        spans = min(self._spans_until_try, MOST_SPANS_AT_ONCE) if self.policy is self._better else 1
        return max(1, spans * SPAN_STEPS - self._num_steps // max(1, self._presence.count))

    def committed(self, num_tokens: int, num_steps: int = 1) -> None:
        """Steps were committed; after enough of them the next span begins."""
        self._num_steps += num_steps
        self._num_tokens += num_tokens
        span = SPAN_STEPS * max(1, self._presence.count)
        if self._num_steps < span or not self._num_tokens:
            return
        self._seconds_a_token[self.policy].add((self._presence.seconds - self._started) / self._num_tokens)
        self.policy = self._next(self._num_steps // span)
        self._begin()

    def _next(self, num_spans: int) -> Policy:
        """After so many spans."""
        seconds = {policy: average.value for policy, average in self._seconds_a_token.items()}
        untried = [policy for policy, value in seconds.items() if value is None]
        if untried:
            return untried[0]
        better, worse = sorted(Policy, key=lambda policy: seconds[policy] or 0.0)
        if better is not self._better:
            self._better, self._spans_a_try, self._spans_until_try = better, SPANS_A_TRY, SPANS_A_TRY
        elif self.policy is worse:
            self._spans_a_try = self._spans_until_try = min(2 * self._spans_a_try, MOST_SPANS_A_TRY)
        self._spans_until_try -= num_spans
        return better if self._spans_until_try > 0 else worse

    def _begin(self) -> None:
        self._started, self._num_steps, self._num_tokens = self._presence.seconds, 0, 0


class Waiting:
    """Whether target steps had better wait for the drafted step that they verify as token drafts: found out by doing both.

    A figure is seconds a token of a target step, from when it could have begun.
    """

    LEAST_TRIES = 4
    STEPS_A_TRY = 16
    """Of so many steps one does what was slower so far."""

    def __init__(self) -> None:
        self._seconds_a_token = {False: Average(memory=32), True: Average(memory=32)}
        self._num_steps = 0

    def choose(self) -> bool:
        """Whether the next step waits."""
        self._num_steps += 1
        fewest = min(self._seconds_a_token, key=lambda waits: self._seconds_a_token[waits].count)
        if self._seconds_a_token[fewest].count < self.LEAST_TRIES:
            return fewest
        faster = min(self._seconds_a_token, key=lambda waits: self._seconds_a_token[waits].value or 0.0)
        return faster if self._num_steps % self.STEPS_A_TRY else not faster

    def wrote(self, waited: bool, seconds: float, num_tokens: int) -> None:
        """A step of ``num_tokens`` took ``seconds``."""
        if num_tokens:
            self._seconds_a_token[waited].add(seconds / num_tokens)


class Evidence:
    """What the verdicts of one verifier have lately taken and come to. Those of another say nothing of it.

    Attributes:
        verdict_s: what a verdict takes.
        acceptance: share of the drafted steps at the root that were accepted.
        confidence: that share by how sure the draft was.
    """

    def __init__(self) -> None:
        self.verdict_s = Average()
        self.acceptance = Average(memory=256)
        self.confidence = Confidence()

    @property
    def acceptance_rate(self) -> float:
        """Smoothed while there are few: a first verdict says little."""
        count, value = self.acceptance.count, self.acceptance.value or 0.0
        weight = USUAL_STEPS * max(0.0, 1.0 - count / USUAL_UNTIL)
        return (count * value + weight * USUAL_ALPHA) / (count + weight)

    def decided(self, accepted: bool, log_prob: float | None) -> None:
        """A drafted step at the root was accepted, or not; ``log_prob``: the draft's, None where it is not known."""
        self.acceptance.add(float(accepted))
        if log_prob is not None:
            self.confidence.decided(log_prob, accepted)


@dataclass
class Work:
    """What a stretch of work has brought, to be filled in by whoever does it."""

    num_tokens: int = 0


class Pace:
    """What one server has measured lately. ``clock`` returns seconds; only differences are used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.crowding = Crowding()
        self.drafted_token_s = Average()
        self.step_tokens = Average()
        self.num_requests = 0
        self.trial = Trial(clock)
        self.waiting = Waiting()
        self.evidence = {name: Evidence() for name in VerifierName}
        # Of token drafts, by who proposes them and whether steps are drafted too.
        self.verifications: defaultdict[tuple[ProposerName, Mode], Verifications] = defaultdict(Verifications)
        self._sequences = Presence(clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is being answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def target(self) -> Iterator[Work]:
        """The target writes: a companion to the others while it does, and timed by token if it comes to its end."""
        work, started, before = Work(), self._clock(), self._sequences.change(+1)
        try:
            yield work
        except BaseException:
            self._sequences.change(-1)
            raise
        after, seconds = self._sequences.change(-1), self._clock() - started
        if seconds > 0.0 and work.num_tokens:
            self.crowding.add(max(0.0, (after - before) / seconds - 1.0), seconds / work.num_tokens)

    @contextmanager
    def draft(self) -> Iterator[Work]:
        """The draft writes; timed by token if it comes to its end."""
        work, started = Work(), self._clock()
        yield work
        if work.num_tokens:
            self.drafted_token_s.add((self._clock() - started) / work.num_tokens)

    @contextmanager
    def verdict(self, verifier: VerifierName) -> Iterator[None]:
        """A verdict is made; timed if it comes to its end."""
        started = self._clock()
        yield
        self.evidence[verifier].verdict_s.add(self._clock() - started)


@dataclass
class DepthChooser:
    """The depth of one request's window, anew at every move of its root.

    Attributes:
        max_depth: never more than this.
    """

    pace: Pace
    max_depth: int
    num_accepted: int = 0
    num_decided: int = 0
    _num_alone: int = 0

    def decided(self, accepted: bool) -> None:
        """A drafted step at the root was accepted, or not."""
        self.num_decided += 1
        self.num_accepted += accepted
        self._num_alone = 0

    def depth(self, verifier: VerifierName) -> int:
        """Target steps in flight from here on, where this verifier decides; 0: the target alone."""
        if self.pace.trial.policy is Policy.ALONE:
            return 0
        gains = {depth: self._predicted(depth, self.pace.evidence[verifier]) for depth in range(1, self.max_depth + 1)}
        best = max(gains, key=gains.__getitem__, default=0)
        if best and gains[best] >= LEAST_GAIN:
            return best
        self._num_alone += 1
        return min(1, self.max_depth) if self._num_alone > STEPS_UNTIL_RETRY else 0

    def tokens_alone(self) -> int:
        """How much to write by the target alone, after :meth:`depth` was 0: as many steps as nothing else would be tried."""
        num_steps = self.pace.trial.steps_left
        if self.pace.trial.policy is Policy.PREDICTED:
            num_steps = min(num_steps, max(1, STEPS_UNTIL_RETRY - self._num_alone))
        return ceil(num_steps * self._step_tokens)

    def went_alone(self, num_tokens: int) -> None:
        """So many tokens were written by the target alone."""
        num_steps = max(1, round(num_tokens / self._step_tokens))
        if self.pace.trial.policy is Policy.PREDICTED:
            self._num_alone += num_steps - 1  # one was counted with the depth
        self.pace.trial.committed(num_tokens, num_steps)

    @property
    def _step_tokens(self) -> float:
        return self.pace.step_tokens.value or USUAL_STEP_TOKENS

    def acceptance_rate(self, seen: Evidence) -> float:
        """The request's own, leaning on what the server has seen while it is young."""
        prior = seen.acceptance_rate
        alpha = (self.num_accepted + PRIOR_STEPS * prior) / (self.num_decided + PRIOR_STEPS)
        return min(alpha, MAX_ALPHA)

    def _predicted(self, depth: int, seen: Evidence) -> float:
        """Speedup over the target alone, given what the other requests do."""
        pace = self.pace
        alone, drafted, num_tokens = pace.crowding.alone_s, pace.drafted_token_s.value, pace.step_tokens.value
        if not alone or drafted is None or num_tokens is None:
            return 1.0 + depth  # nothing measured yet: look as far ahead as allowed
        cost_ratio = min(1.0, max(drafted / alone, 1e-3))
        # Beside its own branches a step has those of the other requests, which look ahead alike.
        others = max(0, pace.num_requests - 1)
        verdict_cost = (seen.verdict_s.value or 0.0) / (alone * num_tokens)
        branches = min(depth, useful_depth(min(1.0, cost_ratio / (1.0 + verdict_cost))))
        slowdown = pace.crowding.slowdown(others, (branches - 1) * (others + 1))
        return speedup(
            self.acceptance_rate(seen),
            cost_ratio,
            depth,
            verdict_cost=verdict_cost,
            slowdown=slowdown,
        )
