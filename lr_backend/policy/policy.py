"""What a request speculates: how far ahead, on which branches, and with draft tokens or without.

A row more in the target's iterations makes each request in flight slower by its price. So work is started where it is of use
with a probability of at least that price times the number of requests: this one rule bounds depth and own branches, and shares
the target fairly under load. Whether to look ahead at all, and with draft tokens or without, is the paper's formula with measured
prices, corrected by what was measured (:mod:`~lr_backend.policy.trial`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

from lr_backend.clock import Clock
from lr_backend.policy.acceptance import Acceptance
from lr_backend.policy.draft_length import MEMORY, DraftLength
from lr_backend.policy.formulas import speedup
from lr_backend.policy.others import Alone, Others
from lr_backend.policy.prices import STALE_STEPS, Prices
from lr_backend.policy.trial import LEAST_STEPS, Predict, Trial, Turn, Way
from lr_backend.request import LookaheadRequest, ProposerName

USUAL_GAIN_OF_DRAFTS = 1.3
"""Of the target's steps, before draft tokens were tried."""
USUAL_STEP_TOKENS = 24
"""Of a step, before one was seen."""
USUAL_CHANCE = 0.6
"""That work ahead is of use, before anything was measured."""
STEPS_ALONE = (4, 8, 16)
"""In one go: half a span of a trial at first, so that a way that has changed is soon left. More after each span that has kept to
the way, for each call pays an admission."""


Key = tuple[int, str, str, tuple[Way, ...]]
"""Of a trial: the load, the proposer, the verifier, and the ways that there are."""


class Learned:
    """What one server has learned, shared by all its requests.

    Args:
        clock: returns seconds; only differences are used.
        others: the server's other processes of the step loop, which learn the same; None: there are none.

    Attributes:
        draft_length: how many draft tokens bring most. Each process learns it by itself.
    """

    def __init__(self, clock: Clock, others: Others | None = None) -> None:
        self._others = others or Alone()
        self.prices = Prices(clock, self._others, self._tell)
        self.acceptance: defaultdict[str, Acceptance] = defaultdict(Acceptance)
        self.draft_length: defaultdict[str, DraftLength] = defaultdict(DraftLength)
        self._trials: dict[Key, Trial] = {}

    def trial(self, proposer: str, verifier: str, ways: tuple[Way, ...]) -> Trial:
        """That of the present load: requests in flight, by the nearest power of two."""
        key = round(log2(max(1, self.prices.num_in_all))), proposer, verifier, ways
        if key not in self._trials:
            self._tell("trial", *key, self._most_first)
        return self._trials[key]

    @property
    def _most_first(self) -> bool:
        """Where nothing is known: the most speculation first, or the least if a row is likely to cost more than it brings."""
        return self.least_chance < USUAL_CHANCE

    def committed(
        self,
        of: tuple[str, str, tuple[Way, ...]],
        turn: Turn,
        seconds: float,
        num_tokens: int,
        num_steps: int,
        predict: Predict,
        *,
        fresh: bool,
        joins: bool = False,
    ) -> None:
        """One request took ``seconds`` for so many tokens, as in :meth:`~lr_backend.policy.trial.Trial.committed`.

        Args:
            of: the proposer, the verifier and the ways that the request has.
            turn: in which the steps were begun. Those that outlast it say nothing: meanwhile others took another way, or were
                more or fewer.
        """
        if turn == self.trial(*of).turn:
            about = (seconds, num_tokens, num_steps, self.prices.num_in_all)  # first: others may come meanwhile
            predicted = [predict(each) for each in of[-1]]
            self._tell("committed", turn.load, *of, self._most_first, turn.way, predicted, fresh, joins, *about)

    def decided(self, verifier: str, accepted: bool, log_prob: float | None) -> None:
        """A drafted step at the root was accepted by this verifier, or not."""
        self._tell("decided", verifier, accepted, log_prob)

    def catch_up(self) -> None:
        """Take in what the other processes have learned."""
        for lesson in self._others.heard():
            self._learn(*lesson)

    def _tell(self, *lesson: Any) -> None:
        if not self._others.tell(lesson):
            self._learn(*lesson)
        self.catch_up()

    def _learn(self, kind: str, *values: Any) -> None:
        """Depends on lessons alone: so all processes come to the same."""
        match kind, values:
            case "trial", (load, proposer, verifier, ways, most_first):
                self._begin_trial(load, (proposer, verifier, _ways(ways)), most_first=most_first)
            case "committed", (load, proposer, verifier, ways, most_first, way, predicted, fresh, joins, *about):
                others = (proposer, verifier, _ways(ways))
                predict = dict(zip(others[-1], predicted, strict=True)).__getitem__
                # A process that has come late may have missed its beginning. It takes the others' way: it heeds no other's steps.
                self._begin_trial(load, others, most_first=most_first, way=Way(*way))
                self._trials[load, *others].committed(Way(*way), *about, predict=predict, fresh=fresh, joins=joins)
            case "decided", (verifier, accepted, log_prob):
                self.acceptance[verifier].decided(accepted, log_prob)
            case _:
                self.prices.learn(kind, *values)

    def _begin_trial(
        self, load: int, others: tuple[str, str, tuple[Way, ...]], *, most_first: bool, way: Way | None = None
    ) -> None:
        if (load, *others) in self._trials:
            return
        known = {key[0]: trial for key, trial in self._trials.items() if key[1:] == others and trial.num_spans}
        like = known[min(known, key=lambda one: abs(one - load))] if known else None
        proposer, _, ways = others
        first = ways if most_first else ways[::-1]
        by_calls = proposer != ProposerName.ENGINE
        trial = Trial(first, like, load=load, drafts_by_calls=by_calls)
        trial.way = way or trial.way
        self._trials[load, *others] = trial

    def learn_draft_length(
        self,
        proposer: str,
        verifications: Iterable[tuple[int, int, float]],
        draft_calls: Iterable[tuple[int, float]],
        beginnings: Iterable[tuple[int, int]],
    ) -> None:
        """From one answer: draft tokens proposed and accepted, and seconds, of every verification; tokens and seconds of every
        call of the draft; draft tokens proposed and accepted where a step began."""
        learned = self.draft_length[proposer]
        # Averages keep next to nothing of earlier ones. A long answer has thousands, and other requests would wait for them.
        for num_proposed, num_accepted, seconds in deque(verifications, 4 * MEMORY):
            learned.verified(num_proposed, num_accepted, seconds)
        if proposer == ProposerName.DRAFT_MODEL:
            for num_tokens, seconds in deque(draft_calls, 4 * MEMORY):
                learned.drafted(num_tokens, seconds)
            for num_proposed, num_accepted in beginnings:
                learned.verified_first(num_proposed, num_accepted)

    @property
    def step_tokens(self) -> float:
        """Of a step, as they have lately been."""
        return self.prices.step_tokens.value or USUAL_STEP_TOKENS

    @property
    def price_of_row(self) -> float:
        """By which share one sequence more slows down the target, with those in flight."""
        prices = self.prices
        return prices.usual.crowding.slowdown(max(0, prices.num_sequences - 1), 1) - 1.0

    @property
    def least_chance(self) -> float:
        """That a branch is of use, for it to be worth its row."""
        return self.price_of_row * self.prices.num_in_all


@dataclass
class RequestPolicy:
    """What one request speculates: what it asks for.

    Attributes:
        can_draft: there are draft tokens to be had.
    """

    request: LookaheadRequest
    shared: Learned
    max_depth: int
    can_draft: bool = field(kw_only=True)

    @property
    def depth(self) -> int:
        """Target steps at a time along one chain; 0: the target alone."""
        return self.max_depth

    @property
    def uses_draft_tokens(self) -> bool:
        """Whether the target's steps are written with draft tokens."""
        return self.can_draft

    @property
    def min_chance(self) -> float:
        """Below which no own branch is begun."""
        # What pays depends on time, hence on other requests, and a deterministic result on neither.
        return 0.0 if self.request.deterministic else self.shared.least_chance

    @property
    def min_draft_chance(self) -> float:
        """Below which nothing is begun behind drafted steps."""
        return 0.0

    def alone_steps(self, *, reads: bool = False) -> int | None:
        """Steps that the target writes alone in one go, where the depth is 0; None: all the rest.

        Args:
            reads: a long text is read first. Such a call has no price, so it is to be a short one.
        """
        return None

    def begin(self) -> None:
        """From now on the request is counted among those in flight, and its steps take time. Only the measured policy heeds this
        and what follows."""

    @property
    def asks_draft(self) -> bool:
        """Whether the target's steps wait for the draft's tokens."""
        return self.uses_draft_tokens and self.request.proposer == ProposerName.DRAFT_MODEL

    def lose_draft_tokens(self) -> None:
        """Their source has failed."""
        self.can_draft = False

    def lose_draft(self) -> None:
        """It has failed, and drafts neither steps nor tokens any more."""
        self.keep_alone()
        if self.request.proposer == ProposerName.DRAFT_MODEL:
            self.lose_draft_tokens()

    def keep_alone(self) -> None:
        """Looking ahead is over: the reasoning has ended, or the judge has failed."""

    def committed(
        self,
        num_tokens: int,
        num_steps: int = 1,
        *,
        accepted: bool | None = None,
        compared: bool = False,
        verifier: str | None = None,
        counts: bool = True,
    ) -> None:
        """Steps were committed.

        Args:
            accepted: whether the first drafted step was, where somebody could say.
            compared: whether one was there to be compared.
            verifier: who decides on drafted steps by now; None: who did.
            counts: what they took says something of how they were written.
        """


@dataclass
class Measured(RequestPolicy):
    """As it pays: depth and draft tokens up to the request's bounds.

    Attributes:
        verifier: who decides on drafted steps.
        must_draft: the target writes nothing without draft tokens.
    """

    verifier: str
    must_draft: bool = False
    _ways: tuple[Way, ...] = field(init=False)
    _turn: Turn = field(init=False)
    _since_s: float = field(init=False)
    _way_before: Way | None = None
    """Of the steps before; None: these are the first."""
    _is_alone: bool = False

    def __post_init__(self) -> None:
        self._find_ways()
        self.begin()

    def _find_ways(self) -> None:
        depths = (True, False) if self.max_depth > 1 else (False,)  # at 1 a drafted step waits for the target's
        drafts = (self.can_draft,) if self.must_draft or not self.can_draft else (True, False)
        self._ways = tuple(Way(ahead, one) for ahead in depths for one in drafts)

    def begin(self) -> None:
        # The load that its steps are counted at is one with this request.
        self._since_s = self.shared.prices.clock()
        self._turn = self._turn_now

    def lose_draft_tokens(self) -> None:
        # Steps with draft tokens will have no price any more, so none must wait for one.
        if self.can_draft and not self.must_draft:
            super().lose_draft_tokens()
            self._find_ways()

    @property
    def depth(self) -> int:
        return self.max_depth if self._chosen.ahead else 0

    @property
    def uses_draft_tokens(self) -> bool:
        first = self._chosen.draft_tokens
        if self.can_draft and not self.must_draft:
            # Both kinds of steps must have a price before they are compared.
            for drafts in (first, not first):
                found = self.shared.prices.target[drafts]
                if found.token_s.count + found.num_under_way < LEAST_STEPS:
                    return drafts
            # Beside looking ahead the trial sees to it. Where nothing is looked ahead, nobody else does.
            other = self.shared.prices.target[not first]
            if self._is_alone and other.num_since >= STALE_STEPS and not other.num_under_way:
                return not first
        return first

    @property
    def min_chance(self) -> float:
        return self.shared.least_chance

    @property
    def min_draft_chance(self) -> float:
        # Whether looking ahead pays is the trial's affair. Where it is tried, a usual drafted step is followed: else its way
        # would be timed without what it is for, as long as nobody knows the price of a row.
        return min(self.shared.least_chance / self._share_sooner, self.shared.acceptance[self.verifier].rate)

    def alone_steps(self, *, reads: bool = False) -> int:
        if self.request.is_watched or reads:  # somebody waits for each, or it teaches nothing
            return 1
        return STEPS_ALONE[min(self._trial.num_kept, len(STEPS_ALONE) - 1)]

    def keep_alone(self) -> None:
        # What the target now writes by itself says nothing of looking ahead: so it counts for no way.
        self._is_alone = True

    def committed(
        self,
        num_tokens: int,
        num_steps: int = 1,
        *,
        accepted: bool | None = None,
        compared: bool = False,
        verifier: str | None = None,
        counts: bool = True,
    ) -> None:
        self.verifier = verifier or self.verifier  # once a risk budget is spent, only equal tokens are accepted
        now_s = self.shared.prices.clock()
        # What was drafted before looking ahead has stopped was paid for then.
        if counts and not self._is_alone and (self._turn.way.ahead or not compared):
            seconds = now_s - self._since_s - (0.0 if accepted is None else self._luck_s(accepted))
            about = (seconds, num_tokens, num_steps, self._predicted)
            joins = self._way_before not in (None, self._turn.way)
            self.shared.committed(self._of, self._turn, *about, fresh=not accepted, joins=joins)
        self._way_before = self._turn.way
        self._since_s, self._turn = now_s, self._turn_now

    @property
    def _of(self) -> tuple[str, str, tuple[Way, ...]]:
        return self.request.proposer, self.verifier, self._ways

    @property
    def _trial(self) -> Trial:
        return self.shared.trial(*self._of)

    @property
    def _chosen(self) -> Way:
        """The trial's way; where nothing is looked ahead any more, the best of the others."""
        trial = self._trial
        if not self._is_alone:
            return trial.way
        return min((way for way in self._ways if not way.ahead), key=lambda way: trial.expected(way, self._predicted))

    @property
    def _turn_now(self) -> Turn:
        """What is done: the chosen way, but for steps that are taken for their price."""
        return self._trial.turn._replace(way=Way(self._chosen.ahead, self.uses_draft_tokens))

    @property
    def _share_sooner(self) -> float:
        """By which share of its time a target step comes sooner if it begins behind a drafted one."""
        prices = self.shared.prices
        token_s, drafted = prices.usual.token_s.value, prices.drafted_token_s.value
        if token_s is None or drafted is None:
            return 1.0
        verdict = (prices.verdict_s[self.verifier].value or 0.0) / self.shared.step_tokens
        return max(1e-3, 1.0 - drafted / (token_s + verdict))

    def _luck_s(self, accepted: bool) -> float:
        """What a verdict cost beyond what one costs on average: after a rejection a step is the target's, not the draft's.

        How often drafts are accepted is the same in all ways, and is known from all of them. So the luck of the steps that one
        way happened to have is taken off the time that they took.
        """
        prices = self.shared.prices
        token_s, drafted = prices.target[self._turn.way.draft_tokens].token_s.value, prices.drafted_token_s.value
        if token_s is None or drafted is None:
            return 0.0
        alpha = self.shared.acceptance[self.verifier].rate_lately
        return (alpha - accepted) * self.shared.step_tokens * max(0.0, token_s - drafted)

    def _predicted(self, way: Way) -> float:
        """Seconds a committed token."""
        prices = self.shared.prices
        found, other = prices.target[way.draft_tokens], prices.target[not way.draft_tokens]
        token_s, crowding, off = found.token_s.value, found.crowding, 1.0
        if token_s is None:
            token_s, crowding = other.token_s.value, other.crowding
            off = 1.0 / USUAL_GAIN_OF_DRAFTS if way.draft_tokens else USUAL_GAIN_OF_DRAFTS
        if token_s is None:
            return 1.0
        # At the present load: what tokens have lately taken may be of another.
        num_requests = max(1, prices.num_in_all)
        num_tokens, drafted = prices.step_tokens.value, prices.drafted_token_s.value
        a_call = self.shared.step_tokens * (1 if way.ahead else self.alone_steps())
        alone_s = off * crowding.at(num_requests - 1, a_call)
        if not way.ahead or num_tokens is None or drafted is None:
            return alone_s
        alpha = self.shared.acceptance[self.verifier].rate
        cost_ratio = min(1.0, max(drafted / alone_s, 1e-3))
        verdict = (prices.verdict_s[self.verifier].value or 0.0) / (alone_s * num_tokens)
        return alone_s / speedup(alpha, cost_ratio, self._depth_that_pays(alpha), verdict_cost=verdict)

    def _depth_that_pays(self, alpha: float) -> int:
        """Steps behind so many drafted ones are of use often enough."""
        depth, chance, least = 1, alpha, self.min_draft_chance
        while depth < self.max_depth and chance >= least:
            depth, chance = depth + 1, chance * alpha
        return depth


def _ways(told: Iterable[Sequence[bool]]) -> tuple[Way, ...]:
    """Ways as a lesson has them: as pairs."""
    return tuple(Way(*each) for each in told)
