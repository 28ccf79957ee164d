"""The books of one request: every engine call and every move of the root, counted once.

Everything in :class:`~lr_backend.request.Usage` and in the trace is read from here, so that the two cannot disagree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lr_backend.engine import Engine, EngineCall, Generation, Role
from lr_backend.errors import EngineTimeout
from lr_backend.loop.tree import Node
from lr_backend.request import Mode, StepRecord, Usage, rate
from lr_backend.verify.verdict import Reason

Clock = Callable[[], float]


@dataclass(slots=True)
class CallSpan:
    """One engine call on the timeline; seconds since the request was admitted."""

    role: Role
    started_s: float
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_proposed: int = 0
    num_tokens: int = 0
    cancelled: bool = False


@dataclass
class Ledger:
    """Counts of one request. ``clock`` returns seconds; only differences are used."""

    clock: Clock
    prompt_tokens: int
    origin_s: float = field(init=False)
    spans: list[CallSpan] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)
    reasons: Counter[Reason] = field(default_factory=Counter)
    accepted_by: Counter[Reason] = field(default_factory=Counter)
    accepted_runs: list[int] = field(default_factory=list)
    committed_tokens: int = 0
    reasoning_tokens: int = 0
    num_steps: int = 0
    num_steps_drafted: int = 0
    num_steps_accepted: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_reused_tokens: int = 0
    first_step_s: float | None = None
    _run_length: int = 0

    def __post_init__(self) -> None:
        self.origin_s = self.clock()

    def now_s(self) -> float:
        return self.clock() - self.origin_s

    def degrade(self, what: str) -> None:
        """Note once that the answer goes on without something."""
        if what not in self.degraded:
            self.degraded.append(what)

    def drafts_verified(self, proposed: Sequence[int], returned: Sequence[int]) -> None:
        """Count token drafts by comparing tokens: engines may shorten or drop drafts without a word."""
        self.num_proposed += len(proposed)
        self.num_accepted += num_equal(proposed, returned)

    def step_committed(self, num_tokens: int, *, num_reasoning: int) -> None:
        self.num_steps += 1
        self.committed_tokens += num_tokens
        self.reasoning_tokens += num_reasoning
        if self.first_step_s is None:
            self.first_step_s = self.now_s()

    def root_moved(self, compared: Node | None, *, accepted: bool, reason: Reason) -> None:
        """A position at the root was decided, with or without a drafted step."""
        if accepted:
            self.num_steps_accepted += 1
            self.accepted_by[reason] += 1
            self._run_length += 1
            return
        if compared is not None:
            self.reasons[reason] += 1
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
            num_wasted_tokens=max(0, written - self.committed_tokens),
            num_reused_tokens=self.num_reused_tokens,
            first_step_s=self.first_step_s,
            latency_s=self.now_s(),
            mode=mode,
            degraded=tuple(self.degraded),
        )

    @staticmethod
    def _passes(span: CallSpan) -> int:
        """Sequence-passes of the target: one a token, or one for a whole verification."""
        return 1 if span.num_proposed else span.num_tokens


def num_equal(proposed: Sequence[int], returned: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    return next(
        (index for index, (one, other) in enumerate(zip(proposed, returned, strict=False)) if one != other),
        min(len(proposed), len(returned)),
    )


class MeteredEngine:
    """An engine whose calls are entered in a ledger and bounded in time.

    Args:
        timeout_s: limit of one call; past it the call is cancelled and :class:`EngineTimeout` raised. None: no limit.
    """

    def __init__(self, engine: Engine, role: Role, ledger: Ledger, *, timeout_s: float | None) -> None:
        self._engine = engine
        self._role = role
        self._ledger = ledger
        self._timeout_s = timeout_s

    async def generate(self, call: EngineCall) -> Generation:
        num_proposed = 0 if call.draft_ids is None else len(call.draft_ids)
        span = CallSpan(self._role, self._ledger.now_s(), num_prompt_tokens=len(call.input_ids), num_proposed=num_proposed)
        self._ledger.spans.append(span)
        try:
            async with asyncio.timeout(self._timeout_s):
                generation = await self._engine.generate(call)
        except TimeoutError as error:
            raise EngineTimeout(f"the {self._role.value} engine did not answer within {self._timeout_s} s") from error
        except asyncio.CancelledError:
            span.cancelled = True
            raise
        finally:
            span.finished_s = self._ledger.now_s()
        span.num_tokens = len(generation.token_ids)
        self._ledger.num_reused_tokens += generation.num_reused_tokens
        return generation

    async def close(self) -> None:
        await self._engine.close()
