"""What one request did: every engine call and every move of the root, counted once.

Everything in :class:`~lr_backend.request.Usage` and in the trace is read from here, so that the two cannot disagree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import inf

from lr_backend.clock import Clock, is_late
from lr_backend.engine import Engine, EngineCall, Generation, Role
from lr_backend.errors import EngineError, EngineTimeout
from lr_backend.loop.tree import Decision, Node, forget_prefixes
from lr_backend.policy.prices import LONG_PROMPT
from lr_backend.request import Mode, StepRecord, Usage, rate
from lr_backend.steps.tokens import num_equal
from lr_backend.trace.schema import Purpose
from lr_backend.verify.verdict import Reason

READING_STEPS = 4
"""Target steps for which a draft may read a long text before it counts as late."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What engine calls are made for: one drafted step, one target step or one verdict at a node of the tree.

    Attributes:
        index: of the step in the answer, if the chain that it belongs to is accepted.
        depth: drafted steps between the committed text and that step when the job was begun.
    """

    purpose: Purpose
    node: Node
    index: int
    depth: int


_JOB: ContextVar[Job | None] = ContextVar("job", default=None)


@contextmanager
def made_for(job: Job | None) -> Iterator[None]:
    """Whatever engine calls are made inside are made for this job, however deep in writers and verifiers."""
    token = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(token)


@dataclass(slots=True)
class CallSpan:
    """One engine call on the timeline; seconds since the request was admitted.

    ``index`` is that of the step that the call works on; ``job`` is None outside the tree, and where nothing is traced.
    ``drafts_tokens``: for draft tokens, by the draft model; ``num_proposed`` and ``num_accepted`` are then what the target made
    of its tokens. Otherwise they are the draft tokens that the call verified, its own or the engine's.
    """

    role: Role
    started_s: float
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_reused_tokens: int | None = None
    queue_s: float = 0.0
    engine_s: float = 0.0
    cancelled: bool = False
    failed: bool = False
    job: Job | None = None
    index: int = 0
    drafts_tokens: bool = False


@dataclass
class Ledger:
    """Counts of one request. ``clock`` returns seconds; only differences are used.

    Attributes:
        traced: keep what a trace needs beyond the counts: whose call each was, and how the root moved (``moves``, by the
            index of the step that the move committed).
        draft_calls: calls of the draft model for draft tokens, by id.
        verifications: tokens proposed and accepted, one pair a verification of draft tokens.
        beginnings: the same of each step's first one.
        committed_s: when the last step was committed.
        num_engine_passes: passes of calls whose draft tokens the engine wrote itself.
        degraded: what the answer goes on without, and since when.
        read_s: when a model had read what was there, as its first call came back; 0 where that was short.
        on_call: told of every call that has come to its end; must not block.
    """

    clock: Clock
    prompt_tokens: int
    traced: bool = False
    origin_s: float = field(init=False)
    spans: list[CallSpan] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    moves: dict[int, Decision] = field(default_factory=dict)
    draft_calls: dict[str, CallSpan] = field(default_factory=dict)
    verifications: list[tuple[int, int]] = field(default_factory=list)
    beginnings: list[tuple[int, int]] = field(default_factory=list)
    degraded: dict[str, float] = field(default_factory=dict)
    on_call: Callable[[CallSpan], None] = field(default=lambda span: None)
    reasons: Counter[Reason] = field(default_factory=Counter)
    accepted_by: Counter[Reason] = field(default_factory=Counter)
    accepted_runs: list[int] = field(default_factory=list)
    committed_tokens: int = 0
    committed_s: float = 0.0
    reasoning_tokens: int = 0
    num_closing_tokens: int = 0
    """Of the committed ones, those that no engine has written."""
    num_steps: int = 0
    num_steps_drafted: int = 0
    num_steps_accepted: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_engine_passes: int = 0
    num_reused_tokens: int | None = None
    first_step_s: float | None = None
    read_s: dict[Role, float] = field(default_factory=dict)
    _run_length: int = 0
    _discarded: Sequence[Node] = ()
    """By the last move of the root."""

    def __post_init__(self) -> None:
        self.origin_s = self.clock()

    def now_s(self) -> float:
        return self.clock() - self.origin_s

    def job(self, purpose: Purpose, node: Node) -> Job | None:
        """The job that is begun at a node now; None where nothing is traced, so that no node outlives the window."""
        if not self.traced:
            return None
        # A drafted step and its verdict stand at the position of the target step that they are compared with.
        depth = node.depth if purpose is Purpose.TARGET_STEP else node.depth - 1
        return Job(purpose, node, self.num_steps + depth, depth)

    def degrade(self, what: str) -> None:
        """Note once that the answer goes on without something."""
        self.degraded.setdefault(what, self.now_s())

    @property
    def draft_failed(self) -> bool:
        return "draft" in self.degraded

    def num_read(self, *roles: Role) -> int:
        """Tokens of prompt and text that a step waits for if it begins now: all until the first call of each role is back."""
        return 0 if self.read_s.keys() >= set(roles) else self.prompt_tokens + self.committed_tokens

    def reads(self, *roles: Role) -> bool:
        """A step that begins now waits until a long text is read."""
        return self.num_read(*roles) >= LONG_PROMPT

    def has_waited(self, began_s: float = inf) -> bool:
        """What is committed next may have waited until a model had read a long text: it did so since the last commit.

        Args:
            began_s: when the target began to write it. That may be before other steps were committed.
        """
        target_s, draft_s = (self.read_s.get(role, 0.0) for role in (Role.TARGET, Role.DRAFT))
        return max(target_s, draft_s) > self.committed_s or target_s > began_s

    def waits_for_draft(self, decision: Decision) -> bool:
        """The draft is late as it first reads a long text. Once that has taken many steps, it is as slow as that."""
        return decision.reason is Reason.LATE and self.reads(Role.DRAFT) and self.reasons[Reason.LATE] < READING_STEPS

    def called(self, role: Role) -> None:
        """A call has come back: from now on its role has read what was there."""
        self.read_s.setdefault(role, self.now_s() if self.reads(role) else 0.0)

    def drafts_verified(self, num_proposed: int, num_accepted: int, *, begins_step: bool) -> None:
        """Count one verification of draft tokens."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self.verifications.append((num_proposed, num_accepted))
        if begins_step:
            self.beginnings.append((num_proposed, num_accepted))

    def timed_verifications(self) -> Iterator[tuple[int, int, float]]:
        """Draft tokens proposed and accepted, and seconds, of every verification that has come to its end.

        Here and below: but for those that read a long prompt.
        """
        for span in self._timed(Role.TARGET):
            if span.num_proposed:
                assert span.finished_s is not None
                yield span.num_proposed, span.num_accepted, span.finished_s - span.started_s

    def timed_draft_calls(self) -> Iterator[tuple[int, float]]:
        """Tokens and seconds of every call of the draft that has come to its end."""
        for span in self._timed(Role.DRAFT):
            if span.num_tokens:
                assert span.finished_s is not None
                yield span.num_tokens, span.finished_s - span.started_s

    def _timed(self, role: Role) -> Iterator[CallSpan]:
        read_s = self.read_s.get(role, 0.0)
        for span in self.spans:
            is_whole = span.finished_s is not None and not (span.cancelled or span.failed)
            if span.role is role and is_whole and span.started_s >= read_s:
                yield span

    def draft_tokens_verified(self, call_id: str, num_proposed: int, num_accepted: int) -> None:
        """Of those that a call of the draft model has written, some were verified."""
        if (span := self.draft_calls.get(call_id)) is not None:
            span.num_proposed += num_proposed
            span.num_accepted += num_accepted

    def engine_drafted(self, generation: Generation) -> None:
        """Count the draft tokens that an engine wrote by itself, which only it can say."""
        self.num_proposed += generation.num_draft_tokens
        self.num_accepted += generation.num_accepted_tokens
        self.num_engine_passes += len(generation.token_ids) - generation.num_accepted_tokens

    def step_committed(self, num_tokens: int, *, num_reasoning: int) -> None:
        """Count a step. Nobody asks any more for the text before what its move has discarded."""
        forget_prefixes(self._discarded)
        self._discarded = ()
        self.num_steps += 1
        self.committed_tokens += num_tokens
        self.reasoning_tokens += num_reasoning
        self.committed_s = self.now_s()
        if self.first_step_s is None:
            self.first_step_s = self.committed_s

    def root_moved(self, decision: Decision) -> None:
        """A position at the root was decided, with or without a drafted step; its step is committed next."""
        self._discarded = decision.discarded
        if self.traced:
            self.moves[self.num_steps] = decision
        if decision.winner is not None:
            self.num_steps_accepted += 1
            self.accepted_by[decision.reason] += 1
            self._run_length += 1
            return
        if decision.compared is not None:
            self.reasons[decision.reason] += 1
            self.accepted_runs.append(self._run_length)
            self._run_length = 0

    def usage(self, mode: Mode) -> Usage:
        """The request's closing account."""
        runs = [*self.accepted_runs, self._run_length] if self._run_length else self.accepted_runs
        late = self.reasons[Reason.LATE]
        rejected = {reason.value: count for reason, count in sorted(self.reasons.items()) if reason is not Reason.LATE}
        decided = self.num_steps_accepted + sum(self.reasons.values()) - self.reasons[Reason.DRAFT_ERROR]
        calls = Counter(span.role for span in self.spans)
        written = sum(span.num_tokens for span in self.spans if span.role is not Role.JUDGE)
        taken_over = sum(span.num_accepted for span in self.spans if span.drafts_tokens)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.committed_tokens,
            reasoning_tokens=self.reasoning_tokens,
            num_steps=self.num_steps,
            num_steps_drafted=self.num_steps_drafted,
            num_steps_accepted=self.num_steps_accepted,
            num_steps_accepted_by={reason.value: count for reason, count in sorted(self.accepted_by.items())},
            num_steps_late=late,
            num_steps_rejected=rejected,
            step_acceptance_rate=rate(self.num_steps_accepted, decided),
            mean_accepted_length=rate(sum(runs), len(runs)),
            num_draft_tokens=self.num_proposed,
            num_accepted_tokens=self.num_accepted,
            token_acceptance_rate=rate(self.num_accepted, self.num_proposed),
            num_target_calls=calls[Role.TARGET],
            num_draft_calls=calls[Role.DRAFT],
            num_judge_calls=calls[Role.JUDGE],
            num_target_passes=sum(self._passes(span) for span in self.spans if span.role is Role.TARGET),
            num_wasted_tokens=max(0, written - taken_over - (self.committed_tokens - self.num_closing_tokens)),
            num_reused_tokens=self.num_reused_tokens,
            first_step_s=self.first_step_s,
            latency_s=self.now_s(),
            mode=mode,
            degraded=tuple(self.degraded),
        )

    @staticmethod
    def _passes(span: CallSpan) -> int:
        """Sequence-passes of the target: one a token but for those that were taken over, at least one for a verification."""
        return max(span.num_tokens - span.num_accepted, 1 if span.num_proposed else 0)


class MeteredEngine:
    """An engine whose calls are entered in a ledger and bounded in time.

    Args:
        timeout_s: limit of a call for one step; past it the call is cancelled and :class:`EngineTimeout` raised. None: no limit.
        max_step_tokens: of a step; a call for n times as many may take n times as long. None: no call is for more.
        drafts_tokens: its calls are for draft tokens, whoever they are made for.
    """

    def __init__(
        self,
        engine: Engine,
        role: Role,
        ledger: Ledger,
        *,
        timeout_s: float | None,
        max_step_tokens: int | None = None,
        drafts_tokens: bool = False,
    ) -> None:
        self._engine = engine
        self._role = role
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._max_step_tokens = max_step_tokens
        self._drafts_tokens = drafts_tokens

    async def generate(self, call: EngineCall) -> Generation:
        span = self._begin(call)
        try:
            return await self._metered(call, span)
        finally:
            self._ledger.on_call(span)

    async def _metered(self, call: EngineCall, span: CallSpan) -> Generation:
        if self._ledger.traced or call.num_draft_tokens:
            call = replace(call, return_perf_metrics=True)
        limit_s = self._limit_s(call)
        try:
            async with asyncio.timeout(limit_s):
                generation = await self._engine.generate(call)
        except TimeoutError as error:
            span.failed = True
            within = "in time" if limit_s is None else f"within {limit_s:g} s"
            raise EngineTimeout(f"the {self._role.value} engine did not answer {within}") from error
        except asyncio.CancelledError:
            span.failed = is_late()
            span.cancelled = not span.failed
            raise
        except EngineError:
            span.failed = True
            raise
        finally:
            span.finished_s = self._ledger.now_s()
        self._ledger.called(self._role)
        span.num_tokens = len(generation.token_ids)
        if call.draft_ids is not None:
            span.num_accepted = num_equal(call.draft_ids.tolist(), generation.token_ids)
        if call.num_draft_tokens:
            span.num_proposed, span.num_accepted = generation.num_draft_tokens, generation.num_accepted_tokens
            self._ledger.engine_drafted(generation)
        span.num_reused_tokens = generation.num_reused_tokens
        span.queue_s, span.engine_s = generation.queue_s, generation.total_s
        if generation.num_reused_tokens is not None:
            self._ledger.num_reused_tokens = (self._ledger.num_reused_tokens or 0) + generation.num_reused_tokens
        return generation

    def _limit_s(self, call: EngineCall) -> float | None:
        if self._timeout_s is None or self._max_step_tokens is None:
            return self._timeout_s
        return self._timeout_s * max(1.0, call.max_new_tokens / self._max_step_tokens)

    def _begin(self, call: EngineCall) -> CallSpan:
        job = _JOB.get()
        span = CallSpan(
            self._role,
            self._ledger.now_s(),
            num_prompt_tokens=len(call.input_ids),
            num_proposed=0 if call.draft_ids is None else len(call.draft_ids),
            job=job,
            index=self._ledger.num_steps if job is None else job.index,
            drafts_tokens=self._drafts_tokens,
        )
        self._ledger.spans.append(span)
        if self._drafts_tokens:
            self._ledger.draft_calls[call.request_id] = span
        return span

    async def close(self) -> None:
        await self._engine.close()
