"""Lookahead Reasoning (arXiv 2506.19830): draft steps ahead, write the target's own beside them, keep what means the same.

:meth:`LookaheadLoop._reason` is the paper's algorithm, driven by completions instead of rounds:

    expand    start a target step after every prefix in the window, and the next drafted step below it
    await     something completes: a drafted step, a target step, or a verdict
    verify    whoever has a target step t and a drafted step d after the same prefix is judged, at any depth
    advance   the root moves onto the accepted drafted step, or past the target's own; what cannot win any more is cancelled

The rest of the module is the frame around it: what comes before and after the reasoning, the deadline, the one end that every
request has. It knows engines, verifiers and proposers by protocol only; no Triton, no torch, no tensors beyond token arrays.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from lr_backend.config import Checker, LoopConfig
from lr_backend.contract import IntArray
from lr_backend.engine import Engine, Role, Sampling
from lr_backend.errors import EngineError, EngineRejected, TargetUnavailable
from lr_backend.loop.audit import AuditDesk, RequestAudit
from lr_backend.loop.clock import running_clock
from lr_backend.loop.ledger import Job, Ledger, MeteredEngine, made_for
from lr_backend.loop.pace import DepthChooser, Evidence, Pace
from lr_backend.loop.segments import Lengths, make_segmenter
from lr_backend.loop.speculation import DraftWait, num_engine_drafts, token_speculation
from lr_backend.loop.steps import StepRules
from lr_backend.loop.text import TextStream
from lr_backend.loop.tree import Decision, Node, Tree, append
from lr_backend.loop.writer import DraftedTally, StepWriter, TokenSpeculation
from lr_backend.request import (
    DepthPolicy,
    FinishReason,
    LookaheadRequest,
    Origin,
    StepRecord,
    Usage,
)
from lr_backend.step import Step, StepEnd, StepTokenizer
from lr_backend.trace.schema import Purpose
from lr_backend.verify import ExactVerifier, Reason, StepPair, Verdict, VerifierParts, make_verifier
from lr_backend.verify.judge_prompt import JudgePrompt
from lr_backend.verify.similarity import Embedder


@dataclass(frozen=True)
class Engines:
    """The three models. Draft and judge may be down; then the target answers alone."""

    target: Engine
    draft: Engine
    judge: Engine


@dataclass(frozen=True)
class Models:
    """What is known about the models beside their engines: built once, shared by all requests."""

    rules: StepRules
    tokenizer: StepTokenizer
    judge_prompt: JudgePrompt
    judge_tokenizer: StepTokenizer
    embedder: Embedder | None = None
    checker: Checker | None = None


@dataclass(frozen=True)
class Committed:
    """Newly committed text, and the record of the step that brought it (None for text that was held back)."""

    text: str
    record: StepRecord | None


@dataclass(frozen=True)
class Outcome:
    """The one end of a request."""

    finish_reason: FinishReason
    usage: Usage
    completion_ids: tuple[int, ...]
    ledger: Ledger


Emit = Callable[[Committed], None]
Change = Callable[[], None]
"""What a completion does to the tree; raises where the work failed."""
Work = Callable[[], Awaitable[Change]]

REASONING_TAIL_TOKENS = 8
"""A chat template that opens or skips the reasoning does so in the last few tokens of the prompt."""


class LookaheadLoop:
    """One request from its prompt to its end.

    Args:
        prompt_ids: the rendered prompt, shape [N].
        emit: receives committed text in order; must not block.
        pace: what the server has measured, shared by its requests; None: this request's own.
        audits: the server's desk for audits; None: nothing is audited.

    Raises:
        InvalidRequest: this server lacks what the request's verifier, its proposer or its audits need.
    """

    def __init__(
        self,
        request: LookaheadRequest,
        prompt_ids: IntArray,
        request_id: str,
        engines: Engines,
        models: Models,
        config: LoopConfig,
        emit: Emit,
        pace: Pace | None = None,
        audits: AuditDesk | None = None,
    ) -> None:
        self._request = request
        self._models = models
        self._config = config
        self._emit = emit
        self._request_id = request_id
        self._prefix = prompt_ids
        self._prompt_length = len(prompt_ids)
        self._end = len(prompt_ids) + min(request.max_tokens, config.limits.max_tokens)
        self._text = TextStream(models.tokenizer, request.stop)
        self._finish: FinishReason | None = None
        self._reasoning = self._may_reason(prompt_ids)
        clock = running_clock()
        self.ledger = Ledger(clock, len(prompt_ids), traced=request.trace)
        self._pace = pace or Pace(clock)
        self._depth = DepthChooser(self._pace, min(request.max_depth, config.limits.max_depth))
        # Which depth pays depends on time, what is likely on other requests, and a deterministic result on neither.
        self._chooses_depth = request.depth is DepthPolicy.AUTO and not request.deterministic
        self._min_chance = 0.0 if request.deterministic else request.min_chance

        lengths = Lengths(config.min_step_tokens, config.soft_step_tokens)
        self._segmenter = make_segmenter(request.segmenter, models.rules, lengths, start=len(prompt_ids))
        patient = request.deterministic
        timeouts = config.timeouts
        self._target = MeteredEngine(engines.target, Role.TARGET, self.ledger, timeout_s=timeouts.target_s)
        draft = MeteredEngine(engines.draft, Role.DRAFT, self.ledger, timeout_s=None if patient else timeouts.draft_s)
        judge = MeteredEngine(engines.judge, Role.JUDGE, self.ledger, timeout_s=None)
        speculation = token_speculation(request, config, engines.draft, self.ledger, request_id, self._pace)
        self._target_writer = self._writer(self._target, Role.TARGET, speculation, num_engine_drafts(request, config))
        self._draft_writer = self._writer(draft, Role.DRAFT)
        self._exact = ExactVerifier()
        self._judge_calls = count()
        parts = VerifierParts(self._target, judge, models.tokenizer, models.judge_prompt, models.judge_tokenizer, models.embedder)
        self._verifier = make_verifier(request, config, parts)
        unmetered = replace(parts, target=engines.target, judge=engines.judge)
        self._audit = RequestAudit(request, audits, lambda: make_verifier(request, config, unmetered))
        # Nodes in the window with their tasks; completions in the order in which they came. A node that is no longer here has
        # lost: its tasks are cancelled, and what they still complete is ignored.
        self._window: defaultdict[Node, list[asyncio.Task[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._completions: asyncio.Queue[tuple[Node, Change]] = asyncio.Queue()
        self._arrivals: defaultdict[Node, asyncio.Event] = defaultdict(asyncio.Event)
        self._draft_wait = DraftWait.of(request, speculation, self._pace.waiting)

    # The frame -----------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Answer the request.

        Raises:
            TargetUnavailable: the target failed. Draft and judge failures only degrade the answer.
            EngineRejected: the target refused the request, for instance as too long.
        """
        limit_s = self._config.timeouts.request_s
        deadline_s = min(self._request.deadline_s or limit_s, limit_s)
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                with self._pace.request():
                    await self._answer()
        except TimeoutError:
            assert deadline.expired()
            self._finish = FinishReason.DEADLINE
        except EngineRejected:
            raise
        except EngineError as error:
            raise TargetUnavailable(f"the target engine failed: {error.message}") from error
        if held := self._text.flush():
            self._emit(Committed(held, None))
        assert self._finish is not None
        completion = tuple(self._prefix[self._prompt_length :].tolist())
        usage = self.ledger.usage(self._request.mode).model_copy(update=self._audit.usage())
        return Outcome(self._finish, usage, completion, self.ledger)

    async def _answer(self) -> None:
        # Lookahead belongs to the reasoning; the answer after it is the target's alone, token for token.
        if self._request.mode.speculates_steps:
            with self._pace.trial.request() if self._chooses_depth else nullcontext():
                while self._finish is None and self._reasoning:
                    depth = self._next_depth()
                    await (self._reason(depth) if depth or self._watched else self._pause())
        while self._finish is None:
            await self._write_alone(self._end - len(self._prefix))

    async def _write_alone(self, most: int) -> int:
        """A stretch of at most ``most`` tokens by the target alone, or no more than a step where somebody waits for it."""
        budget = self._budget(self._prefix) if self._watched else most
        with self._pace.target() as work:
            step = await self._target_writer.write(self._prefix, budget, answer=not self._watched)
            work.num_tokens = len(step.ids)
        self._commit(step, Origin.TARGET, Reason.NONE)
        return len(step.ids)

    async def _pause(self) -> None:
        """No lookahead for as many steps as it is known not to pay, or ever again, in one call."""
        left = self._end - len(self._prefix)
        if not self._chooses_depth or "draft" in self.ledger.degraded:
            await self._write_alone(left)
            return
        self._depth.went_alone(await self._write_alone(min(left, self._depth.tokens_alone())))

    # The algorithm -------------------------------------------------------------------------------------------------

    async def _reason(self, depth: int) -> None:
        """Lookahead reasoning, until the reasoning or the answer ends, or looking ahead does not pay for a while."""
        request, limits = self._request, self._config.limits
        tree = Tree(
            self._prefix,
            end=self._end,
            max_depth=depth,
            # Greedy siblings would be the same step over again.
            width=1 if request.sampling.greedy else min(request.width, limits.max_width),
            min_chance=self._min_chance,
            wait_for_drafts=request.deterministic,
        )
        try:
            while self._finish is None and self._reasoning and not self._has_come_to_rest(tree):
                self._expand(tree)
                await self._absorb()
                self._verify(tree)
                self._advance(tree)
        finally:
            await self._cancel_all()

    def _expand(self, tree: Tree) -> None:
        """Start every drafted step and every target step that the window allows."""
        for node in tree.start_drafts():
            self._start(node, Purpose.DRAFTED_STEP, partial(self._draft, tree, node))
        for node in tree.start_targets():
            self._start(node, Purpose.TARGET_STEP, partial(self._write_target, tree, node))

    async def _absorb(self) -> None:
        """Wait until something completes; take all that has."""
        completed = [await self._completions.get()]
        while not self._completions.empty():
            completed.append(self._completions.get_nowait())
        for node, change in completed:
            if node in self._window:
                change()

    def _verify(self, tree: Tree) -> None:
        """Have every new pair of a target step and a drafted step judged, wherever in the window."""
        for target, node in tree.start_verdicts():
            self._start(node, Purpose.VERDICT, partial(self._judge, tree, target, node))

    def _advance(self, tree: Tree) -> None:
        """Move the root as far as verdicts allow: commit what it passes, cancel what has lost."""
        while self._finish is None and self._reasoning and (decision := tree.decide()) is not None:
            accepted, compared = decision.winner is not None, decision.compared
            self._cancel(decision.discarded)
            self.ledger.root_moved(decision)
            self._audit.moved(decision, self._pair_decided)
            self._learn(tree, decision)
            origin = Origin.DRAFT if accepted else Origin.CORRECTION if compared is not None else Origin.TARGET
            self._commit(decision.step, origin, decision.reason, decision)

    def _learn(self, tree: Tree, decision: Decision) -> None:
        """Learn from a move of the root, and look ahead from here as far as that pays; a failed draft is never asked again."""
        if (compared := decision.compared) is not None:
            accepted, drafted = decision.winner is not None, compared.drafted
            self._depth.decided(accepted)
            self._evidence.decided(accepted, drafted.log_prob if drafted is not None else None)
        if self._chooses_depth and "draft" not in self.ledger.degraded:
            self._pace.trial.committed(len(decision.step.ids))
            tree.max_depth = self._next_depth()

    @property
    def _evidence(self) -> Evidence:
        """What the server knows of whoever decides just now."""
        return self._pace.evidence[self._audit.decides]

    # The work at one node: each coroutine returns what its completion changes ---------------------------------------

    async def _draft(self, tree: Tree, node: Node) -> Change:
        node.times_s["drafted_started_s"] = self.ledger.now_s()
        begun = node.begun
        try:
            with self._pace.draft() as work:
                step = await self._draft_writer.write(
                    node.prefix,
                    self._budget(node.prefix),
                    sibling=node.sibling,
                    sampling=self._draft_sampling(node.sibling),
                    scored=self._min_chance > 0.0,
                    begun=begun,
                    run_tokens=min(self._request.draft_run_tokens, self._end - len(node.prefix) - len(begun.ids)),
                )
                work.num_tokens = len(step.ids) + len(step.tail.ids) - len(begun.ids)
        except EngineError:
            return lambda: self._draft_arrived(tree, node, None)
        node.times_s["drafted_finished_s"] = self.ledger.now_s()
        self._pace.step_tokens.add(len(step.ids))
        self.ledger.num_steps_drafted += 1
        return lambda: self._draft_arrived(tree, node, step)

    def _draft_arrived(self, tree: Tree, node: Node, step: Step | None) -> None:
        if step is None:  # no draft, no lookahead: the target goes on alone
            self.ledger.degrade("draft")
            tree.max_depth = 0
        elif self._min_chance:
            node.chance = self._evidence.confidence.chance(step.log_prob)
        tree.drafted(node, step)
        self._arrivals[node].set()

    async def _write_target(self, tree: Tree, node: Node) -> Change:
        could_begin_s = self.ledger.now_s()
        waits = bool(node.children) and self._draft_wait.choose()
        if waits:
            await self._arrivals[node.children[0]].wait()
        node.times_s["target_started_s"] = self.ledger.now_s()
        tally = DraftedTally()
        with self._pace.target() as work:
            step = await self._target_writer.write(
                node.prefix,
                self._budget(node.prefix),
                sibling=node.sibling,
                drafted=lambda: tree.drafted_after(node),
                tally=tally,
            )
            work.num_tokens = len(step.ids)
        if drafted := tree.drafted_after(node):
            node.token_share = tally.share(len(drafted))
        node.times_s["target_finished_s"] = now_s = self.ledger.now_s()
        if node.children:
            self._draft_wait.wrote(waits, now_s - could_begin_s, len(step.ids))
        return lambda: tree.targeted(node, step)

    async def _judge(self, tree: Tree, target: Step, node: Node) -> Change:
        position = node.parent
        assert position is not None
        pair = self._pair(position, target, node, f"{self._request_id}/judge/{next(self._judge_calls)}")
        # Before the reasoning is known to have begun, only the same tokens will do.
        verifier = self._audit.allowed(self._verifier) if self._has_opened(node.prefix) else self._exact
        # What takes the verifier's place takes no time, and says nothing of the verifier's.
        timed = self._pace.verdict(self._request.effective_verifier) if verifier is self._verifier else nullcontext()
        with timed:
            verdict = await verifier.verify(pair)
        if verdict.reason is Reason.JUDGE_ERROR:
            self.ledger.degrade("judge")
        if verdict.reason is Reason.VERIFIER_ERROR:
            self.ledger.degrade("verifier")
        return lambda: self._judged(tree, node, verdict)

    def _pair(self, position: Node, target: Step, node: Node, call_id: str) -> StepPair:
        assert node.drafted is not None
        # Only the first sibling went to the target as token drafts.
        share = position.token_share if node.sibling == 0 else None
        return StepPair(target, node.drafted, self._plain(target), self._plain(node.drafted), call_id, position.prefix, share)

    def _pair_decided(self, decision: Decision) -> StepPair:
        """The pair by which the root has moved, for its audit."""
        position, node = decision.position, decision.compared
        assert position.target is not None and node is not None
        return self._pair(position, position.target, node, f"{self._request_id}/audit/{len(position.prefix)}")

    def _judged(self, tree: Tree, node: Node, verdict: Verdict) -> None:
        tree.judged(node, verdict)
        if not verdict.accepted:
            self._cancel(tuple(node.subtree()))

    # Tasks: none outlives the request -------------------------------------------------------------------------------

    def _start(self, node: Node, purpose: Purpose, work: Work) -> None:
        task = asyncio.create_task(self._complete(node, self.ledger.job(purpose, node), work))
        self._window[node].append(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete(self, node: Node, job: Job | None, work: Work) -> None:
        try:
            with made_for(job):
                change = await work()
        except Exception as error:  # whatever it is, the loop's own task raises it: no work fails unseen
            change = _raising(error)
        self._completions.put_nowait((node, change))

    def _cancel(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for task in self._window.pop(node, ()):
                task.cancel()
            self._arrivals.pop(node, None)

    async def _cancel_all(self) -> None:
        self._cancel(list(self._window))
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Committing ----------------------------------------------------------------------------------------------------

    def _commit(self, step: Step, origin: Origin, reason: Reason, decision: Decision | None = None) -> None:
        """Make a step final: extend the prefix, send its text, see whether it ends anything."""
        self._prefix = append(self._prefix, step)
        text = self._text.push(step.ids)
        self.ledger.step_committed(len(step.ids), num_reasoning=self._count_reasoning(step))
        self._reasoning = self._reasoning and self._may_reason(self._prefix) and self._has_opened(self._prefix)
        if self._text.stopped or step.end is StepEnd.END:
            self._finish = FinishReason.STOP
        elif len(self._prefix) >= self._end:
            self._finish = FinishReason.LENGTH
        self._emit(Committed(text, self._record(step, origin, reason, decision)))

    def _record(self, step: Step, origin: Origin, reason: Reason, decision: Decision | None) -> StepRecord | None:
        if not self._request.trace:
            return None
        compared = decision.compared if decision is not None else None
        drafted_times = compared.times_s if compared is not None else {}
        target_times = decision.position.times_s if decision is not None else {}
        target = decision.position.target if decision is not None else step
        verdict = compared.verdict if compared is not None else None
        record = StepRecord(
            index=self.ledger.num_steps - 1,
            origin=origin,
            reason=reason.value,
            verifier=verdict.verifier if verdict is not None else None,
            score=verdict.score if verdict is not None else None,
            text=self._plain(step),
            num_tokens=len(step.ids),
            sibling=compared.sibling if compared is not None else None,
            drafted_text=self._plain(compared.drafted) if compared is not None and compared.drafted else None,
            target_text=self._plain(target) if target is not None else None,
            committed_s=self.ledger.now_s(),
            **{name: drafted_times[name] for name in DRAFTED_TIMES if name in drafted_times},
            **{name: target_times[name] for name in TARGET_TIMES if name in target_times},
        )
        self.ledger.records.append(record)
        return record

    def _count_reasoning(self, step: Step) -> int:
        if not self._reasoning:
            return 0
        close = self._models.rules.think_close_id
        return step.ids.index(close) + 1 if close in step.ids else len(step.ids)

    # Small questions -----------------------------------------------------------------------------------------------

    @property
    def _watched(self) -> bool:
        """Somebody waits for single steps: for their text, or for a stop string in it."""
        return self._request.stream or bool(self._request.stop)

    def _next_depth(self) -> int:
        """How far to look ahead from here; 0: the target alone."""
        if "draft" in self.ledger.degraded:
            return 0
        return self._depth.depth(self._audit.decides) if self._chooses_depth else self._depth.max_depth

    def _has_come_to_rest(self, tree: Tree) -> bool:
        """Nothing is in flight and nothing would be but the target's next step, which then need not end where a step does."""
        return tree.max_depth == 0 and not self._window and not self._watched

    def _budget(self, prefix: IntArray) -> int:
        """Tokens that a step after ``prefix`` may have."""
        return min(self._config.limits.max_step_tokens, self._end - len(prefix))

    def _draft_sampling(self, sibling: int) -> Sampling:
        """The first sibling may be the draft's best guess; the others must differ from it."""
        asked, temperature = self._request.sampling, self._config.draft_temperature
        return asked if sibling or temperature is None else replace(asked, temperature=min(temperature, asked.temperature))

    def _may_reason(self, prefix: IntArray) -> bool:
        """The reasoning has not been closed, be it by the prompt's last tokens or since."""
        close = self._models.rules.think_close_id
        return close is None or close not in self._since_prompt(prefix)

    def _has_opened(self, prefix: IntArray) -> bool:
        """The reasoning has begun; always true for a model that marks none."""
        opening = self._models.rules.think_open_id
        return opening is None or opening in self._since_prompt(prefix)

    def _since_prompt(self, prefix: IntArray) -> IntArray:
        return prefix[max(0, self._prompt_length - REASONING_TAIL_TOKENS) :]

    def _plain(self, step: Step) -> str:
        return str(self._models.tokenizer.decode(list(step.ids), skip_special_tokens=True))

    def _writer(
        self, engine: Engine, role: Role, speculation: TokenSpeculation | None = None, num_engine_drafts: int = 0
    ) -> StepWriter:
        return StepWriter(
            engine=engine,
            role=role,
            rules=self._models.rules,
            sampling=self._request.sampling,
            seed=self._request.seed,
            request_id=self._request_id,
            ledger=self.ledger,
            speculation=speculation,
            segmenter=self._segmenter,
            num_engine_drafts=num_engine_drafts,
        )


DRAFTED_TIMES = ("drafted_started_s", "drafted_finished_s")
TARGET_TIMES = ("target_started_s", "target_finished_s")


def _raising(error: Exception) -> Change:
    def change() -> None:
        raise error

    return change
