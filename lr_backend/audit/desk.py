"""The desk that audits: cases come in, and what was accepted wrongly is counted.

One :class:`AuditDesk` is shared by all requests of a process of the step loop. It asks the auditor off the critical path, a few
cases at a time, and keeps for each verifier the share of its acceptances that were wrong (:mod:`~lr_backend.audit.interval`).
Steps of the same words are no cases: they are right by themselves, and the share would only look small.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from lr_backend.audit.auditor import Auditor
from lr_backend.audit.interval import Estimate, FalseAccepts
from lr_backend.config import AuditSettings
from lr_backend.errors import ENDS
from lr_backend.verify import Reason, StepPair, Verifier
from lr_backend.verify.verdict import FAILED, SAME


class Recent:
    """The pairs that counted last, by their tokens. An auditor sees no more of a pair, so a repeat tells nothing new."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def repeats(self, pair: StepPair) -> bool:
        """Whether the pair is one of them; else it is from now on."""
        digest = blake2b(repr((pair.target.ids, pair.drafted.ids)).encode(), digest_size=16).digest()
        if digest in self._digests:
            return True
        self._digests[digest] = None
        if len(self._digests) > self._memory:
            self._digests.popitem(last=False)  # its evidence has faded
        return False


@dataclass
class AuditCounts:
    """What became of the cases of one verifier.

    Attributes:
        false_accepts: what they come to; a pair that ``recent`` knows adds nothing to it.
        num_right, num_false_accepts: by the auditor's answer.
        num_failed: the auditor, or the verifier asked before it, failed, was late, or its answer was none.
        num_dropped: the line was full, or the server was going down.
        num_cleared: pairs that the verifier, asked while a budget was spent, would not have accepted, or for their same words:
            nothing to audit.
        num_requests_spent: requests that accepted equal tokens only, for all or some of their steps.
    """

    false_accepts: FalseAccepts
    recent: Recent
    num_right: int = 0
    num_false_accepts: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_cleared: int = 0
    num_requests_spent: int = 0


@dataclass(frozen=True)
class AuditCase:
    """One pair to be audited.

    Attributes:
        verifier: whose acceptance is audited.
        first: asked first, off the critical path; what it rejects, or accepts for the same words, is no case. None: the pair was
            accepted.
        share: of its request's steps that are audited.
        done: told whether the step was rightly accepted; None: nobody could tell.
        context: of its request, for logs and spans. Another request's audit may be what makes room for this one.
    """

    pair: StepPair
    verifier: str
    first: Verifier | None = None
    share: float = 1.0
    done: Callable[[bool | None], None] = lambda right: None
    context: Context = field(default_factory=copy_context)


class AuditDesk:
    """Takes cases and has them audited, never more than ``at_a_time``; nobody waits for it.

    Used from one event loop; ``counts`` may be read from any thread.

    Args:
        make_auditor: called when first needed.
        on_change: called after every change of a count.
    """

    def __init__(
        self, make_auditor: Callable[[], Auditor], settings: AuditSettings, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._make_auditor = make_auditor
        self._auditor: Auditor | None = None
        self._settings = settings
        self.on_change = on_change
        self.counts: dict[str, AuditCounts] = {}
        self._waiting: deque[AuditCase] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def open(self) -> None:
        """Make sure that there is an auditor.

        Raises:
            InvalidRequest: this server can audit nothing.
        """
        self._auditor = self._auditor or self._make_auditor()

    def estimate(self, verifier: str) -> Estimate:
        """The server's false-accept rate of one verifier."""
        return self.counts_of(verifier).false_accepts.estimate

    def counts_of(self, verifier: str) -> AuditCounts:
        """Those of one verifier, from its first case on."""
        if verifier not in self.counts:
            memory, errors = self._settings.memory, (self._settings.sensitivity, self._settings.specificity)
            # Replaced as a whole: another thread may walk through it.
            self.counts = {**self.counts, verifier: AuditCounts(FalseAccepts(memory, *errors), Recent(memory))}
        return self.counts[verifier]

    def offer(self, case: AuditCase) -> bool:
        """Put a case in line, at once; False if it was dropped."""
        taken = not self._closed and len(self._waiting) < self._settings.max_waiting
        if taken:
            self._waiting.append(case)
            self._start()
        else:
            self.counts_of(case.verifier).num_dropped += 1
        self.on_change()
        return taken

    def cancel(self) -> None:
        """Stop everything; what was in line or in flight is dropped, and so is whatever comes later."""
        self._closed = True
        while self._waiting:
            self.counts_of(self._waiting.popleft().verifier).num_dropped += 1
        for task in self._running:
            task.cancel()

    async def drain(self) -> None:
        """Wait until nothing is in line or in flight."""
        while self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._settings.at_a_time:
            case = self._waiting.popleft()
            task = asyncio.create_task(self._work(case), context=case.context)
            self._running.add(task)
            task.add_done_callback(partial(self._finished, case))

    def _finished(self, case: AuditCase, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.counts_of(case.verifier).num_dropped += task.cancelled()
        self._start()
        self.on_change()

    async def _work(self, case: AuditCase) -> None:
        counts = self.counts_of(case.verifier)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._answer(case)
        except ENDS:
            raise
        except BaseException:  # whatever it is, an audit that failed concerns no request
            answer = Reason.VERIFIER_ERROR
        if answer is None:
            counts.num_cleared += 1
        elif isinstance(answer, Reason):
            counts.num_failed += 1
            case.done(None)
        else:
            counts.num_right += answer
            counts.num_false_accepts += not answer
            if not counts.recent.repeats(case.pair):
                counts.false_accepts.add(not answer, case.share)
            case.done(answer)

    async def _answer(self, case: AuditCase) -> bool | Reason | None:
        """The auditor's answer; None where there is nothing to audit."""
        assert self._auditor is not None
        if case.first is not None:
            verdict = await case.first.verify(case.pair)
            if not verdict.accepted or verdict.reason in SAME:
                return verdict.reason if verdict.reason in FAILED else None
        return await self._auditor.audit(case.pair)
