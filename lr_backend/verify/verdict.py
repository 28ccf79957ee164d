"""Verdicts, and those that need nobody's judgement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lr_backend.contract import IntArray
from lr_backend.steps.step import Step, StepEnd


class Reason(StrEnum):
    """Why a drafted step was or was not taken; the vocabulary of usage, trace and metrics."""

    EXACT = "exact"
    """Accepted: the same token ids."""
    SAME_TEXT = "same_text"
    """Accepted: other token ids, the same words."""
    JUDGE = "judge"
    """The judge's word, either way."""
    NUMBERS = "numbers"
    """Rejected: the two compute with different numbers, operators or units."""
    PLUG_IN = "plug_in"
    """The word of a verifier of the deployment's own, either way."""
    DIFFERENT = "different"
    """Rejected: other tokens, where only the same will do; or the same words with other indentation."""
    RISK_BUDGET = "risk_budget"
    """Rejected: other tokens, and the request's risk budget is spent."""
    MARKER = "marker"
    """Rejected: the two disagree on an end token, the end of reasoning, a tool marker or another special token."""
    CAPPED = "capped"
    """Rejected: one of the two was cut at the cap and the other was not, or the judge may not read one: it is too long, or closes
    a section of the judge's prompt."""
    TIMEOUT = "timeout"
    """Rejected in doubt: the verifier was too slow."""
    GARBAGE = "garbage"
    """Rejected in doubt: the verifier's answer is no verdict."""
    JUDGE_ERROR = "judge_error"
    """Rejected in doubt: the judge's engine failed."""
    VERIFIER_ERROR = "verifier_error"
    """Rejected in doubt: the model that the verifier asks, other than the judge's, failed."""
    LATE = "late"
    """Nothing drafted was ready when the target's step was."""
    DRAFT_ERROR = "draft_error"
    """The draft's engine failed."""
    DUPLICATE = "duplicate"
    """A sibling wrote the same step before."""
    THINKING_BUDGET = "thinking_budget"
    """The server has closed the reasoning; nobody wrote this step."""
    NONE = "none"
    """Nothing was drafted at this position."""


UNCOMPARED = frozenset({Reason.NONE, Reason.THINKING_BUDGET, Reason.LATE, Reason.DRAFT_ERROR, Reason.DUPLICATE})
"""Reasons of a step for which no drafted step was compared with the target's."""
SAME = frozenset({Reason.EXACT, Reason.SAME_TEXT})
"""Reasons of an acceptance that cannot be wrong: the drafted step says what the target's says, word for word."""
SETTLED = UNCOMPARED | SAME | {Reason.RISK_BUDGET}
"""Reasons that are not a plug-in's to give: the server itself finds them."""
FAILED = frozenset({Reason.DRAFT_ERROR, Reason.JUDGE_ERROR, Reason.VERIFIER_ERROR, Reason.TIMEOUT, Reason.GARBAGE})
"""Reasons that say nothing of the drafted step, as what was to write it or to judge it has failed, or was too slow."""
UNASKED = frozenset({Reason.JUDGE_ERROR, Reason.VERIFIER_ERROR, Reason.CAPPED})
"""Reasons of a rejection for which a verifier may not have looked at the pair: its model has failed, or the pair is too long."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One drafted step's fate. ``score``: the measure of the verifier or stage that decided, where it has one."""

    accepted: bool
    reason: Reason
    score: float | None = None
    verifier: str | None = None
    """Who decided; None where nobody was asked."""


@dataclass(frozen=True, slots=True)
class StepPair:
    """A target step and a drafted step after the same prefix.

    The texts are without special tokens and marks of the reasoning.

    Attributes:
        prefix: what both continue, shape [N].
        call_id: prefix of the ids of engine calls on the pair's behalf; unique among pairs.
    """

    target: Step
    drafted: Step
    target_text: str
    drafted_text: str
    call_id: str
    prefix: IntArray


class Verifier(Protocol):
    """Decides pairs that :func:`settle` left open.

    Never raises but for cancellation: whatever goes wrong is a rejection with its own reason. Doubt rejects.
    """

    async def verify(self, pair: StepPair) -> Verdict: ...


def settle(target: Step, drafted: Step) -> Verdict | None:
    """The verdict that holds under every verifier, or None if the pair needs one."""
    if target.ids == drafted.ids:
        return Verdict(True, Reason.EXACT)
    if target.markers != drafted.markers:
        return Verdict(False, Reason.MARKER)
    if (target.end is StepEnd.CAP) != (drafted.end is StepEnd.CAP):
        return Verdict(False, Reason.CAPPED)
    return None
