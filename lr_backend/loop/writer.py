"""Writing one step with one engine, with or without token drafts.

The engine contract gives no finish reason, so the tokens decide: a step is complete when its rules find an end in what is
written so far; anything shorter means *continue* (drafts may be dropped, calls may come back short).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.engine import Engine, EngineCall, Generation, Role, Sampling, one_hot_logits
from lr_backend.errors import EngineUnavailable
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.payoff import Payoff, Verifications
from lr_backend.loop.seeds import derive_seed
from lr_backend.loop.segments import BlankLines, Segmenter, WholeAnswer
from lr_backend.loop.steps import StepRules
from lr_backend.propose import Position, Proposal, Proposer
from lr_backend.propose.draft_length import DraftCosts, DraftLength
from lr_backend.step import NO_TAIL, Step, Tail
from lr_backend.tokens import num_equal

MAX_EMPTY_ANSWERS = 2
"""An engine that returns nothing this often in a row is taken for dead: something else keeps ending the call."""

NO_COSTS = DraftCosts()
"""A verification takes as long as a token."""

DraftedIds = Callable[[], Sequence[int] | None]


@dataclass(frozen=True)
class TokenSpeculation:
    """How a writer speculates by tokens.

    Attributes:
        num_draft_tokens: proposals in one verification at most.
        costs: what verifying and drafting take; below this gain a verification does not pay.
        adaptive: choose the number of proposals by how many were accepted of late.
        plain_chunk: tokens decoded before the proposer is asked again, where it had nothing; doubles while it has nothing.
        one_hot_vocab: width of one-hot draft logits to send along, 0 for none.
        remember: judge the payoff by the request's earlier steps too; otherwise a step's calls follow from its own tokens alone.
        lately: what verifications have brought to earlier requests; None: nothing is known of them.
    """

    proposer: Proposer
    num_draft_tokens: int
    costs: DraftCosts = NO_COSTS
    adaptive: bool = False
    plain_chunk: int = 4
    one_hot_vocab: int = 0
    remember: bool = True
    lately: Verifications | None = None


@dataclass
class DraftedTally:
    """How much of the drafted step a target step took over as token drafts, counted while it is written."""

    num_proposed: int = 0
    num_accepted: int = 0

    def verified(self, drafted: Sequence[int] | None, proposed: Sequence[int], returned: Sequence[int]) -> None:
        """Count one verification; proposals that the drafted step does not hold came from elsewhere."""
        if drafted is None or not _holds(drafted, proposed):
            return
        self.num_proposed += len(proposed)
        self.num_accepted += num_equal(proposed, returned)

    def share(self, num_drafted: int) -> float | None:
        """Accepted part of a drafted step of ``num_drafted`` tokens; None where none of it was proposed."""
        # Re-aligned, the target can take a token over twice.
        return min(1.0, self.num_accepted / num_drafted) if self.num_proposed else None


def _holds(drafted: Sequence[int], proposed: Sequence[int]) -> bool:
    size = len(proposed)
    return any(tuple(drafted[start : start + size]) == tuple(proposed) for start in range(len(drafted) - size + 1))


class History:
    """What became of the token drafts of a request, or of a step: whether they pay, and how many do."""

    def __init__(self, costs: DraftCosts, num_draft_tokens: int, adaptive: bool, lately: Verifications | None = None) -> None:
        self._costs, self._most = costs, num_draft_tokens
        self._length = DraftLength(costs) if adaptive else None
        self.payoff = Payoff(costs.verification, lately)

    def num_draft_tokens(self) -> int:
        """How many to propose next, at most."""
        return self._most if self._length is None else self._length.next(self._most)

    def verified(self, proposal: Proposal, proposed: Sequence[int], returned: Sequence[int]) -> None:
        """A verification of ``proposed``, the part of ``proposal`` before the step's end, brought ``returned``."""
        self.payoff.verified(len(returned) - self._costs.drafted_token * proposal.num_drafted)
        if self._length is not None:
            num_accepted = num_equal(proposed, returned)
            # Drafts that the engine has dropped without a word are no mismatch.
            mismatch = num_accepted < min(len(proposed), len(returned))
            self._length.observed(num_accepted, mismatch or proposal.unsure)

    def decoded(self, proposal: Proposal, num_tokens: int) -> None:
        """``num_tokens`` were decoded without drafts; ``proposal`` held none."""
        self.payoff.decoded(num_tokens)
        if self._length is not None and proposal.unsure:
            self._length.observed(0, ended=True)


NOTHING = Proposal()


@dataclass
class StepWriter:
    """Writes steps of one request with one role's engine.

    Attributes:
        request_id: prefix of every call's id; ids in flight are unique.
        speculation: None decodes a step in one call.
        segmenter: where steps end; None: at the delimiter.
        num_engine_drafts: tokens that the engine may guess by itself for each of its passes; for those without ``speculation``.
    """

    engine: Engine
    role: Role
    rules: StepRules
    sampling: Sampling
    seed: int
    request_id: str
    ledger: Ledger
    speculation: TokenSpeculation | None = None
    segmenter: Segmenter | None = None
    num_engine_drafts: int = 0
    _history: History = field(init=False)
    _calls: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._history = self._new_history()

    async def write(
        self,
        prefix: IntArray,
        max_tokens: int,
        *,
        sibling: int = 0,
        drafted: DraftedIds = lambda: None,
        answer: bool = False,
        sampling: Sampling | None = None,
        scored: bool = False,
        tally: DraftedTally | None = None,
        begun: Tail = NO_TAIL,
        run_tokens: int = 0,
    ) -> Step:
        """The step after ``prefix``, at most ``max_tokens`` long.

        Args:
            drafted: asked before each verification for the drafted step that continues the same prefix, if there is one.
            answer: only an end token ends it, no delimiter.
            sampling: for this step, instead of the writer's own.
            scored: ask for the step's log-probability.
            tally: counts what the target takes over of the drafted step.
            begun: what is written of the step already; with ``scored``, scored too.
            run_tokens: tokens that are written past the step's end if need be, in one call, so that the next steps need none of
                their own; the step's ``tail`` has them. 0: none.

        Raises:
            EngineError: the engine failed.
        """
        segment = WholeAnswer(self.rules) if answer else (self.segmenter or BlankLines(self.rules)).begin(prefix)
        written, log_probs = list(begun.ids), list(begun.log_probs)
        history = self._history if self.speculation is None or self.speculation.remember else self._new_history()
        num_empty = num_plain = 0
        while (step := segment.cut(written, max_tokens)) is None:
            context = np.concatenate([prefix, np.asarray(written, dtype=np.int32)]) if written else prefix
            drafted_ids = drafted()
            rules = segment.call_rules(written)
            # One token of the budget is the target's own.
            limit = min(history.num_draft_tokens(), max_tokens - len(written) - 1)
            position = Position(context, written, drafted_ids, limit, rules.stop_words, sibling)
            proposal = await self._propose(position) if history.payoff.pays else NOTHING
            proposed = _until_end(proposal.token_ids, written, max_tokens, segment.cut)
            num_plain = 0 if proposed else num_plain + 1
            room = min(max_tokens - len(written), rules.max_tokens)
            budget = len(proposed) + 1 if proposed else min(room, self._plain_tokens(num_plain, history.payoff))
            stop_words = rules.stop_words
            if (left := run_tokens - (len(written) - len(begun.ids))) > 0:
                budget, stop_words = left, self.rules.closing_words
            generation = await self._call(context, proposed, budget, sibling, sampling or self.sampling, stop_words, scored)
            if proposed:
                self.ledger.drafts_verified(proposed, generation.token_ids, proposal.call_id)
                history.verified(proposal, proposed, generation.token_ids)
                if tally is not None:
                    tally.verified(drafted_ids, proposed, generation.token_ids)
            else:
                history.decoded(proposal, len(generation.token_ids))
            num_empty = 0 if generation.token_ids else num_empty + 1
            if num_empty >= MAX_EMPTY_ANSWERS:
                raise EngineUnavailable(f"the {self.role.value} engine keeps answering with no tokens")
            written.extend(generation.token_ids)
            log_probs.extend(generation.log_probs)
        count = len(step.ids)
        complete = scored and len(log_probs) == len(written)
        tail = Tail(tuple(written[count:]), tuple(log_probs[count:])) if run_tokens else NO_TAIL
        return replace(step, log_prob=math.fsum(log_probs[:count]) if complete else None, tail=tail)

    async def _propose(self, position: Position) -> Proposal:
        return NOTHING if self.speculation is None else await self.speculation.proposer(position)

    def _plain_tokens(self, num_plain: int, payoff: Payoff) -> int:
        """Tokens that the ``num_plain``-th call without drafts in a row may bring."""
        if self.speculation is None:
            return sys.maxsize
        return self.speculation.plain_chunk << min(num_plain - 1, 16) if payoff.pays else payoff.tokens_until_chance

    def _new_history(self) -> History:
        if self.speculation is None:
            return History(NO_COSTS, 0, adaptive=False)
        known = self.speculation
        return History(known.costs, known.num_draft_tokens, known.adaptive, known.lately)

    async def _call(
        self,
        context: IntArray,
        proposed: tuple[int, ...],
        budget: int,
        sibling: int,
        sampling: Sampling,
        stop_words: IntArray,
        scored: bool,
    ) -> Generation:
        draft_ids = np.asarray(proposed, dtype=np.int32) if proposed else None
        one_hot = self.speculation is not None and self.speculation.one_hot_vocab and not sampling.greedy
        call = EngineCall(
            request_id=f"{self.request_id}/{self.role.value}/{next(self._calls)}",
            input_ids=context,
            max_new_tokens=budget,
            sampling=sampling,
            seed=derive_seed(self.seed, len(context), self.role, sibling),
            stop_words=stop_words,
            draft_ids=draft_ids,
            draft_logits=one_hot_logits(draft_ids, self.speculation.one_hot_vocab)
            if draft_ids is not None and self.speculation is not None and one_hot
            else None,
            return_log_probs=scored,
            num_draft_tokens=self.num_engine_drafts,
        )
        return await self.engine.generate(call)


def _until_end(
    proposed: tuple[int, ...], written: Sequence[int], max_tokens: int, cut: Callable[[Sequence[int], int], Step | None]
) -> tuple[int, ...]:
    """Token drafts at most up to the first end: nothing is proposed past one."""
    ended = cut([*written, *proposed], max_tokens) if proposed else None
    return proposed if ended is None else proposed[: len(ended.ids) - len(written)]
