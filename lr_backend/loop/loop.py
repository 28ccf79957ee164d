"""Lookahead Reasoning (arXiv 2506.19830): draft steps ahead, write the target's own beside them, keep what means the same.

:meth:`LookaheadLoop._reason` is the paper's asynchronous algorithm (``bench/kit/synchronous.py``: the synchronous one):

    expand    start a target step after every prefix in the window, and the next drafted step below it
    await     something completes: a drafted step, a target step, or a verdict
    verify    each pair of a target step t and a drafted step d after one prefix is judged, at any depth
    advance   what cannot win any more is cancelled; the root moves onto the accepted drafted step, or past the target's own

The rest of the module is the frame around it: the deadline, the answer behind the reasoning, the one end that every request has.
Engines, verifiers and proposers are known by protocol only. :mod:`~lr_backend.loop.assemble` puts them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil

from lr_backend.audit.request import RequestAudit
from lr_backend.config import LoopConfig
from lr_backend.contract import IntArray
from lr_backend.engine import Role, Sampling
from lr_backend.errors import EngineError, EngineRejected, NotFinite, TargetUnavailable
from lr_backend.loop.answer import Answer, Outcome
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.tree import Decision, Horizon, Node, Tree
from lr_backend.loop.work import Change, WorkUnderWay
from lr_backend.loop.writer import StepWriter
from lr_backend.policy.policy import RequestPolicy
from lr_backend.propose.growing import GrowingText
from lr_backend.request import FinishReason, LookaheadRequest, Origin, VerifierName
from lr_backend.steps.rules import Ending, StepRules
from lr_backend.steps.step import Step
from lr_backend.trace.schema import Purpose
from lr_backend.verify import UNASKED, ExactVerifier, Reason, StepPair, Verifier

STRETCH_STEPS = 4
"""Tokens in one call of the target alone, counted in longest steps. A further call costs one admission."""


@dataclass(eq=False)
class LookaheadLoop:
    """One request from its prompt to its end.

    Attributes:
        draft_sampling: how the first drafted step after a prefix is drawn; the others are drawn as the request asks.
        policy: what this request speculates; ``policy.shared`` is what all requests learn from.
    """

    request: LookaheadRequest
    request_id: str
    config: LoopConfig
    rules: StepRules
    answer: Answer
    ledger: Ledger
    target: StepWriter
    draft: StepWriter
    draft_sampling: Sampling
    verifier: Verifier
    audit: RequestAudit
    policy: RequestPolicy
    _work: WorkUnderWay = field(init=False)
    _drafting: dict[Node, GrowingText] = field(default_factory=dict)
    """Drafted steps as far as they are written."""
    _verdicts: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._work = WorkUnderWay(self.ledger)

    # The frame -----------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Answer the request.

        Raises:
            TargetUnavailable: the target failed at the next step. Draft and judge failures only degrade the answer.
            EngineRejected: the target refused the request, for instance as too long.
            NotFinite: the target computed no numbers for it.
        """
        answer, limit_s = self.answer, self.config.timeouts.request_s
        try:
            async with asyncio.timeout(min(self.request.deadline_s or limit_s, limit_s)) as deadline:
                with self.policy.shared.prices.request():
                    self.policy.begin()
                    await self._answer()
        except TimeoutError:
            assert deadline.expired()
            answer.finish = answer.finish or FinishReason.DEADLINE  # it may have come to its end just before
        except (EngineRejected, NotFinite):
            raise
        except EngineError as error:
            raise TargetUnavailable(f"the target engine failed: {error.message}") from error
        answer.flush()
        if self.target.draft_tokens is not None:
            timed = self.ledger.timed_verifications(), self.ledger.timed_draft_calls(), self.ledger.beginnings
            self.policy.shared.learn_draft_length(self.request.proposer, *timed)
        assert answer.finish is not None
        usage = self.ledger.usage(self.request.mode).model_copy(update={**self.audit.usage(), "seed": self.request.seed})
        return Outcome(self.request, answer.finish, usage, answer.completion_ids, self.ledger)

    async def _answer(self) -> None:
        # Lookahead belongs to the reasoning; the answer after it is the target's alone, token for token.
        while self.answer.finish is None and self.answer.is_reasoning and self.request.mode.speculates_steps:
            await (self._reason() if self._depth or self.request.is_watched else self._write_alone(self._num_alone))
        self.policy.keep_alone()
        while self.answer.finish is None:
            await self._write_alone(self._num_alone if self.ledger.reads(*self._readers) else self.answer.num_left)

    async def _write_alone(self, most: int) -> None:
        """A stretch of at most ``most`` tokens by the target alone, or no more than a step where somebody waits for it.

        No stretch is long: what is written is kept when the time is up, and a target that is stuck is noticed before that.
        """
        prefix, watched = self.answer.prefix, self.request.is_watched or self.answer.is_closing
        most = min(most, self.answer.room(len(prefix)), STRETCH_STEPS * self.config.limits.max_step_tokens)
        ending = self.rules.of_step if watched else self.rules.of_answer
        step = await self._target_step(prefix, self._budget(prefix) if watched else most, ending)
        num_steps = 1 if watched else max(1, round(len(step.ids) / self.policy.shared.step_tokens))
        self.policy.committed(len(step.ids), num_steps, verifier=self.audit.decides, counts=not self.ledger.has_waited())
        self.answer.commit(step, Origin.TARGET, Reason.NONE)

    # The algorithm -------------------------------------------------------------------------------------------------

    async def _reason(self) -> None:
        """Lookahead reasoning, until the reasoning or the answer ends, or looking ahead does not pay for a while."""
        request, answer = self.request, self.answer
        tree = Tree(
            answer.prefix,
            end=answer.end,
            width=request.width,
            own_branches=self.config.own_branches,
            wait_for_drafted=request.deterministic,
        )
        self._look_ahead(tree)
        try:
            while answer.finish is None and answer.is_reasoning and not self._has_come_to_rest(tree):
                self._expand(tree)
                await self._work.absorb()
                self._verify(tree)
                self._advance(tree)
        finally:
            await self._work.cancel_all()

    def _expand(self, tree: Tree) -> None:
        """Start every drafted step and every target step that the window allows."""
        # Target steps are chosen first, as steps are drafted only beside them, and start last: the next depth waits for a draft.
        targets = tree.start_targets()
        for node in () if self.ledger.draft_failed else tree.start_drafted():
            self._drafting[node] = GrowingText()
            self._work.start(node, Purpose.DRAFTED_STEP, partial(self._draft, tree, node))
        for node in targets:
            self._work.start(node, Purpose.TARGET_STEP, partial(self._write_target, tree, node))

    def _verify(self, tree: Tree) -> None:
        """Have every new pair of a target step and a drafted step judged, wherever in the window."""
        for target, node in tree.start_verdicts():
            self._work.start(node, Purpose.VERDICT, partial(self._judge, tree, target, node))

    def _advance(self, tree: Tree) -> None:
        """While the verdict on the next step is known: cancel what has lost by it, and commit the step."""
        answer = self.answer
        self._cancel(tree.prune())
        while answer.finish is None and answer.is_reasoning and (move := tree.move_root(only_equal=self.audit.takes_only_equal)):
            self._cancel(move.discarded)
            self._commit(move)
            self._look_ahead(tree)

    def _commit(self, decision: Decision) -> None:
        """Make the step final, and tell all who count it or learn from it."""
        waits = self.ledger.waits_for_draft(decision) and self.policy.shared.prices.excuses_draft()
        answer, compared, by = self.answer, decision.compared, self.audit.decides
        first = None if waits else decision.first_by(by)
        pair = partial(self._pair, decision.position, compared, f"{self.request_id}/audit/{len(decision.position.prefix)}")
        self.ledger.root_moved(decision)
        self.audit.decided(decision.verdict, len(decision.position.prefix), pair)
        if first is not None and (by == VerifierName.EXACT or answer.decided_by_meaning(decision)):
            self.policy.shared.decided(by, *first)
        accepted, began_s = first and first[0], decision.position.times_s["target_started_s"]
        counts = not (waits or self.ledger.has_waited(began_s))
        self.policy.committed(len(decision.step.ids), accepted=accepted, compared=bool(compared), verifier=by, counts=counts)
        answer.commit(decision.step, decision.origin, decision.reason, decision)

    def _cancel(self, nodes: Collection[Node]) -> None:
        self._work.cancel(nodes)
        for node in nodes:
            self._drafting.pop(node, None)

    def _look_ahead(self, tree: Tree) -> None:
        """As far as it pays from here."""
        policy, acceptance = self.policy, self.policy.shared.acceptance[self.audit.decides]
        tree.horizon = Horizon(self._depth, policy.min_chance, policy.min_draft_chance, acceptance.rate)

    # The work at one node: each coroutine returns what its completion changes ---------------------------------------

    async def _draft(self, tree: Tree, node: Node) -> Change:
        node.times_s["drafted_started_s"] = self.ledger.now_s()
        is_first, tokens = node.sibling == 0, self.target.draft_tokens
        # In pieces, where the target verifies them while they are written.
        in_pieces = is_first and tokens is not None and tokens.source.follows_drafted and self.policy.uses_draft_tokens
        try:
            with self.policy.shared.prices.drafting(self.ledger.num_read(Role.DRAFT)) as work:
                step = await self.draft.draft(
                    node.prefix,
                    self._budget(node.prefix),
                    self.rules.of_step,
                    self._drafting[node],
                    sibling=node.sibling,
                    sampling=self.draft_sampling if is_first else self.request.sampling,
                    tokens_a_call=tokens.most if tokens is not None and in_pieces else None,
                    scored=self.request.mode.chooses,
                )
                work.num_tokens = len(step.ids)
        except EngineError:
            return partial(self._drafted, tree, node, None)
        node.times_s["drafted_finished_s"] = self.ledger.now_s()
        self.ledger.num_steps_drafted += 1
        return partial(self._drafted, tree, node, step)

    def _drafted(self, tree: Tree, node: Node, step: Step | None) -> None:
        if step is None:  # no draft, no lookahead: the target goes on alone
            self.ledger.degrade("draft")
            self.policy.lose_draft()
        elif step.log_prob is not None:
            node.chance = self.policy.shared.acceptance[self.audit.decides].confidence.chance(step.log_prob)
        tree.drafted(node, step)

    async def _write_target(self, tree: Tree, node: Node) -> Change:
        node.times_s["target_started_s"] = self.ledger.now_s()
        try:
            step = await self._target_step(node.prefix, self._budget(node.prefix), self.rules.of_step, node)
        except EngineError as error:
            return partial(tree.target_failed, node, error)
        node.times_s["target_finished_s"] = self.ledger.now_s()
        return lambda: tree.targeted(node, step)

    async def _judge(self, tree: Tree, target: Step, node: Node) -> Change:
        pair = self._pair(node.parent, node, f"{self.request_id}/judge/{next(self._verdicts)}")
        # Before the reasoning is known to have begun, and in a tool call, only the same tokens will do.
        by_meaning = self.answer.may_accept_by_meaning(node.prefix, target)
        verifier = self.audit.allowed(self.verifier) if by_meaning else ExactVerifier()
        began_s, verdict = self.ledger.now_s(), await verifier.verify(pair)
        # Only the verifier's own verdicts are timed: no stand-in's, no failure's.
        if verifier is self.verifier and verdict.reason not in UNASKED:
            self.policy.shared.prices.judged(self.request.effective_verifier, self.ledger.now_s() - began_s)
        if verdict.reason is Reason.JUDGE_ERROR:
            self.ledger.degrade("judge")
            self.policy.keep_alone()
        if verdict.reason is Reason.VERIFIER_ERROR:
            self.ledger.degrade("verifier")
        return lambda: tree.judged(node, verdict)

    def _pair(self, position: Node | None, node: Node | None, call_id: str) -> StepPair:
        """What the target and the draft have written after the same prefix."""
        assert position is not None and position.target is not None and node is not None and node.drafted is not None
        target, drafted = position.target, node.drafted
        return StepPair(target, drafted, self.answer.stated(target), self.answer.stated(drafted), call_id, position.prefix)

    async def _target_step(self, prefix: IntArray, most: int, ending: Ending, node: Node | None = None) -> Step:
        """The target's step after ``prefix``, timed; with draft tokens where they pay."""
        sibling, with_tokens = node.sibling if node is not None else 0, self.policy.uses_draft_tokens
        with self.policy.shared.prices.step(drafts=with_tokens, num_read=self.ledger.num_read(*self._readers)) as work:
            if with_tokens and self.target.draft_tokens is not None:
                drafted = self._drafting.get(node.children[0]) if node is not None and node.children else None
                step = await self.target.speculate(prefix, most, ending, sibling=sibling, drafted=drafted)
            else:
                step = await self.target.write(prefix, most, ending, sibling=sibling, drafts=with_tokens)
            work.num_tokens = len(step.ids)
        return step

    # Small questions -----------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        """How far to look ahead from here; 0: the target alone. A failed draft is never asked again."""
        audited = min(self.policy.max_depth, self.audit.wants_pair(len(self.answer.prefix)))
        return 0 if self.ledger.draft_failed else max(self.policy.depth, audited)

    @property
    def _readers(self) -> tuple[Role, ...]:
        """Who has to have read the text before the target's next step comes."""
        return (Role.TARGET, Role.DRAFT) if self.policy.asks_draft else (Role.TARGET,)

    @property
    def _num_alone(self) -> int:
        """Tokens that the target writes before looking ahead may pay again."""
        steps = None if self.ledger.draft_failed else self.policy.alone_steps(reads=self.ledger.reads(*self._readers))
        return self.answer.num_left if steps is None else min(self.answer.num_left, ceil(steps * self.policy.shared.step_tokens))

    def _has_come_to_rest(self, tree: Tree) -> bool:
        """Only the target's next step is left to start; alone it may be longer than a step."""
        return tree.horizon.max_depth == 0 and not self._work and not self.request.is_watched

    def _budget(self, prefix: IntArray) -> int:
        """Tokens that a step after ``prefix`` may have."""
        return min(self.config.limits.max_step_tokens, self.answer.room(len(prefix)))
