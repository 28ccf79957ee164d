"""The audits of one request, and what its risk budget allows.

A request with a risk budget accepts by its verifier's word while the server's share of wrongly accepted steps is within the
budget. Where the budget is spent, only equal tokens are accepted, which is lossless. So that the share can be seen to fall again,
the verifier is then asked off the critical path, about a few pairs, and what it would have accepted is audited.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from lr_backend.audit.desk import AuditCase, AuditDesk
from lr_backend.request import LookaheadRequest, VerifierName
from lr_backend.verify import ExactVerifier, Reason, StepPair, Verdict, Verifier
from lr_backend.verify.verdict import SAME

TRICKLE = 0.1
"""Least share of a request's cases that are audited where it has a risk budget: without evidence the budget means nothing."""


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
        judges = request.mode.speculates_steps and self._name != VerifierName.EXACT
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
    def decides(self) -> str:
        """Whose word accepts steps as of now: the request's verifier's, or while the budget is spent that of equal tokens."""
        spent = self._is_spent() if self._settled is None else self._settled
        return VerifierName.EXACT if spent else self._name

    @property
    def takes_only_equal(self) -> bool:
        """The budget is spent."""
        return self.decides != self._name

    def wants_pair(self, place: int) -> bool:
        """The budget is spent, and a step that is drafted after ``place`` tokens helps to win it back."""
        return self.takes_only_equal and self._is_drawn(place)

    def allowed(self, verifier: Verifier) -> Verifier:
        """``verifier``, or while the budget is spent the exact one."""
        if not self.takes_only_equal:
            return verifier
        self._note_spent()
        return self._exact

    def decided(self, verdict: Verdict | None, place: int, pair_of: Callable[[], StepPair]) -> None:
        """The root has moved by ``verdict``: what it has accepted, or would have, may be a case.

        Args:
            verdict: None: no drafted step was compared.
            place: tokens before the step.
            pair_of: the pair that the verdict is about.
        """
        if self._desk is None or verdict is None:
            return
        if verdict.reason is Reason.RISK_BUDGET:
            self._note_spent()
        if not self._is_drawn(place):
            return
        if verdict.accepted and verdict.reason not in SAME:
            self._num_taken += self._desk.offer(AuditCase(pair_of(), self._name, share=self._share, done=self._done))
        elif verdict.reason is Reason.RISK_BUDGET:
            self._desk.offer(AuditCase(pair_of(), self._name, first=self._verifier, share=self._share))

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

    def _is_drawn(self, place: int) -> bool:
        """The step after so many tokens is one of those that are audited."""
        return audit_draw(self._seed, place) < self._share

    def _note_spent(self) -> None:
        assert self._desk is not None
        self._desk.counts_of(self._name).num_requests_spent += not self._was_spent
        self._was_spent = True

    def _is_spent(self) -> bool:
        return self._desk is not None and self._budget > 0.0 and self._desk.estimate(self._name).exceeds(self._budget)

    def _done(self, right: bool | None) -> None:
        self._num_failed += right is None
        self._num_right += right is True
        self._num_false += right is False


def audit_draw(request_seed: int, place: int) -> float:
    """A number in [0, 1) for the step after ``place`` tokens, drawn apart from everything that is written there."""
    digest = blake2b(f"{request_seed}/{place}/audit".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
