"""Audits: a sample of the accepted drafted steps is judged again, and what was accepted wrongly is counted.

One :class:`AuditDesk` is shared by all requests of a server. It asks the auditor off the critical path, a few cases at a time,
and keeps for each verifier the share of its acceptances that were wrong (:class:`FalseAccepts`), with an interval that allows for
the auditor's own errors. Steps of equal tokens are no cases: they are right by themselves, and the share would only look small.

Each request has a :class:`RequestAudit`: which of its steps are cases, and whether its risk budget still lets its verifier
accept. Where the budget is spent, only equal tokens are accepted, which is lossless; so that the share can be seen to fall again,
the verifier is then asked off the critical path too, about a few pairs, and what it would have accepted is audited in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from lr_backend.audit.auditor import Auditor
from lr_backend.config import AuditSettings
from lr_backend.loop.seeds import audit_draw
from lr_backend.loop.tree import Decision
from lr_backend.request import LookaheadRequest, VerifierName
from lr_backend.verify import ExactVerifier, Reason, StepPair, Verifier

Z_95 = 1.959964
"""Two-sided 95 % of a normal distribution."""
LEAST_AUDITS = 20.0
"""An interval around a few audits is too sure of itself; nothing is beyond doubt before these."""
TRICKLE = 0.1
"""Least share of a request's cases that are audited where it has a risk budget: without evidence the budget means nothing."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A false-accept rate and its 95 % interval. ``num``: audits that it rests on, older ones for less; at 0 nothing is known."""

    rate: float | None = None
    low: float = 0.0
    high: float = 1.0
    num: float = 0.0

    def exceeds(self, budget: float) -> bool:
        """The rate is above ``budget`` beyond doubt."""
        return self.num >= LEAST_AUDITS and self.low > budget


Trials = tuple[int, int]
"""Successes and trials."""


def corrected(called: float, num: float, sensitivity: Trials | None = None, specificity: Trials | None = None) -> Estimate:
    """The share that was wrong, where an auditor ``called`` that share of ``num`` > 0 cases wrong.

    Rogan and Gladen's estimate (1978) with Lang and Reiczigel's interval (2014), in which sensitivity and specificity are as
    uncertain as the trials they were measured in. Without such trials the auditor makes no errors, and the interval is that of
    Agresti and Coull (1998).
    """
    (seen_se, se, var_se), (seen_sp, sp, var_sp) = _measured(sensitivity), _measured(specificity)
    more = num + Z_95**2
    share = (called * num + Z_95**2 / 2) / more
    wrong = (share + sp - 1) / (se + sp - 1)
    centre = wrong + 2 * Z_95**2 * (wrong * var_se - (1 - wrong) * var_sp)
    half = Z_95 * sqrt(share * (1 - share) / more + wrong**2 * var_se + (1 - wrong) ** 2 * var_sp) / (se + sp - 1)
    rate = min(1.0, max(0.0, (called + seen_sp - 1) / (seen_se + seen_sp - 1)))
    return Estimate(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)), num)


def _measured(trials: Trials | None) -> tuple[float, float, float]:
    """A share as seen, with one success and one failure more, and the variance of that."""
    if trials is None:
        return 1.0, 1.0, 0.0
    hits, num = trials
    share = (hits + 1) / (num + 2)
    return hits / num, share, share * (1 - share) / (num + 2)


class FalseAccepts:
    """A running false-accept rate (:func:`corrected`). Each audit makes the older ones count for a little less.

    The interval is that for Kish's effective number of audits, (sum of weights)^2 / sum of squared weights.
    """

    def __init__(self, memory: int, sensitivity: Trials | None = None, specificity: Trials | None = None) -> None:
        self._fade, self._errors = 1.0 - 1.0 / memory, (sensitivity, specificity)
        self._weight = self._false = self._squares = 0.0
        # Replaced as a whole: another thread may read it.
        self.estimate = Estimate()

    def add(self, false: bool) -> None:
        """One more audit: whether it called the step wrongly accepted."""
        self._weight = self._weight * self._fade + 1.0
        self._false = self._false * self._fade + false
        self._squares = self._squares * self._fade**2 + 1.0
        called, num = min(1.0, self._false / self._weight), self._weight**2 / self._squares
        self.estimate = corrected(called, num, *self._errors)


@dataclass
class Book:
    """What became of the cases of one verifier.

    Attributes:
        num_right, num_false_accepts: by the auditor's answer.
        num_failed: the auditor failed, was late, or its answer was none.
        num_dropped: the line was full, or the server was going down.
        num_cleared: pairs that the verifier, asked while a budget was spent, would not have accepted: nothing to audit.
        num_requests_spent: requests that accepted equal tokens only, for all or some of their steps.
    """

    false_accepts: FalseAccepts
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
        first: asked first, off the critical path; what it does not accept is no case. None: the pair was accepted.
        done: told whether the step was rightly accepted; None: nobody could tell.
    """

    pair: StepPair
    verifier: VerifierName
    first: Verifier | None = None
    done: Callable[[bool | None], None] = lambda right: None


class AuditDesk:
    """Takes cases and has them audited, never more than ``max_in_flight`` at a time; nobody waits for it.

    Used from one event loop; ``books`` may be read from any thread.

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
        errors = (settings.sensitivity, settings.specificity)
        self.books = {name: Book(FalseAccepts(settings.memory, *errors)) for name in VerifierName}
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

    def estimate(self, verifier: VerifierName) -> Estimate:
        """The server's false-accept rate of one verifier."""
        return self.books[verifier].false_accepts.estimate

    def offer(self, case: AuditCase) -> bool:
        """Put a case in line, at once; False if it was dropped."""
        taken = not self._closed and len(self._waiting) < self._settings.max_waiting
        if taken:
            self._waiting.append(case)
            self._start()
        else:
            self.books[case.verifier].num_dropped += 1
        self.on_change()
        return taken

    def cancel(self) -> None:
        """Stop everything; what was in line or in flight is dropped, and so is whatever comes later."""
        self._closed = True
        while self._waiting:
            self.books[self._waiting.popleft().verifier].num_dropped += 1
        for task in self._running:
            task.cancel()
        if self._auditor is not None:
            self._auditor.close()

    async def drain(self) -> None:
        """Wait until nothing is in line or in flight."""
        while self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_in_flight:
            case = self._waiting.popleft()
            task = asyncio.create_task(self._work(case))
            self._running.add(task)
            task.add_done_callback(partial(self._finished, case))

    def _finished(self, case: AuditCase, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.books[case.verifier].num_dropped += task.cancelled()
        self._start()
        self.on_change()

    async def _work(self, case: AuditCase) -> None:
        book = self.books[case.verifier]
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._answer(case)
        except Exception:  # whatever it is, an audit that failed concerns no request
            answer = Reason.UNKNOWN
        if answer is None:
            book.num_cleared += 1
        elif isinstance(answer, Reason):
            book.num_failed += 1
            case.done(None)
        else:
            book.num_right += answer
            book.num_false_accepts += not answer
            book.false_accepts.add(not answer)
            case.done(answer)

    async def _answer(self, case: AuditCase) -> bool | Reason | None:
        """The auditor's answer; None where there is nothing to audit."""
        assert self._auditor is not None
        if case.first is not None and not (await case.first.verify(case.pair)).accepted:
            return None
        return await self._auditor.audit(case.pair)


PairOf = Callable[[Decision], StepPair]


class RequestAudit:
    """One request's audits, and what its risk budget allows it.

    Args:
        desk: None audits nothing and limits nothing.
        make_verifier: the request's verifier for use off the critical path: it is not metered and may outlive the request.

    Raises:
        InvalidRequest: the request asks for audits and this server can audit nothing.
    """

    def __init__(self, request: LookaheadRequest, desk: AuditDesk | None, make_verifier: Callable[[], Verifier]) -> None:
        self._name, self._seed, self._budget = request.effective_verifier, request.seed, request.risk_budget
        self._share = max(request.audit_rate, TRICKLE if request.risk_budget else 0.0)
        judges = request.mode.speculates_steps and self._name is not VerifierName.EXACT
        self._desk = desk if judges and self._share else None
        self._exact = ExactVerifier(Reason.RISK_BUDGET)
        self._verifier: Verifier | None = None
        if self._desk is not None:
            self._desk.open()
            if self._budget:
                self._verifier = make_verifier()
        # The end of an audit is a race with the answer, and a deterministic result may not depend on one.
        self._settled = self._is_spent() if request.deterministic else None
        self._was_spent = False
        self._num_taken = self._num_failed = self._num_right = self._num_false = 0

    @property
    def decides(self) -> VerifierName:
        """Whose word accepts steps as of now: the request's verifier's, or while the budget is spent that of equal tokens."""
        spent = self._is_spent() if self._settled is None else self._settled
        return VerifierName.EXACT if spent else self._name

    def allowed(self, verifier: Verifier) -> Verifier:
        """``verifier``, or while the budget is spent the exact one."""
        if self.decides is self._name:
            return verifier
        assert self._desk is not None
        self._desk.books[self._name].num_requests_spent += not self._was_spent
        self._was_spent = True
        return self._exact

    def moved(self, decision: Decision, pair_of: PairOf) -> None:
        """The root has moved: what it has accepted, or would have, may be a case."""
        verdict = decision.compared.verdict if decision.compared is not None else None
        if self._desk is None or verdict is None or audit_draw(self._seed, len(decision.position.prefix)) >= self._share:
            return
        if verdict.accepted and verdict.reason is not Reason.EXACT:
            self._num_taken += self._desk.offer(AuditCase(pair_of(decision), self._name, done=self._done))
        elif verdict.reason is Reason.RISK_BUDGET:
            self._desk.offer(AuditCase(pair_of(decision), self._name, first=self._verifier))

    def usage(self) -> dict[str, Any]:
        """The audit's fields of :class:`~lr_backend.request.Usage`, as of now."""
        if self._desk is None:
            return {}
        estimate, num_audited = self._desk.estimate(self._name), self._num_right + self._num_false
        known = estimate.rate is not None
        return {
            "num_audited": num_audited,
            "num_audits_pending": self._num_taken - num_audited - self._num_failed,
            "num_false_accepts": self._num_false,
            "false_accept_rate": estimate.rate,
            "false_accept_rate_low": estimate.low if known else None,
            "false_accept_rate_high": estimate.high if known else None,
            "risk_budget_spent": self._was_spent,
        }

    def _is_spent(self) -> bool:
        return self._desk is not None and self._budget > 0.0 and self._desk.estimate(self._name).exceeds(self._budget)

    def _done(self, right: bool | None) -> None:
        self._num_failed += right is None
        self._num_right += right is True
        self._num_false += right is False
