"""The nouns: what is asked, what comes back. Frozen, and free of any transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "deadline", "cancelled", "error"]
"""The finish reasons known today; fields that hold one are ``str``: a newer server may add to them."""


class Message(TypedDict):
    """One turn of a chat. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Question = str | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer. None leaves a field to the server's default.

    Attributes:
        raw: the question is the prompt itself, rendered by no chat template.
        temperature: 0 is greedy.
        top_k: 0 keeps every token.
        stop: strings that end the answer; they are not part of it. One string stands for itself.
        stream: False asks for one response with the whole answer.
        mode: ``ar`` (plain), ``sd`` (token speculation), ``lr`` (step speculation), ``lr_sd`` (both).
        max_depth: steps drafted ahead of the last committed one.
        depth: ``fixed``, or ``auto``: at most ``max_depth``, as far as measurements say that it pays.
        min_chance: look ahead only below drafted steps accepted with this probability at least; 0: always.
        draft_run_tokens: tokens that one call of the draft may write, step after step; 0: a call a step.
        width: candidate steps at each position.
        num_draft_tokens: token drafts in one verification, at most; ``"auto"`` says ``draft_length="auto"``.
        draft_length: ``fixed``, or ``auto``: at most ``num_draft_tokens``, as many as bring most by what was
            accepted of late.
        await_draft: whether a target step waits for the drafted step that is its token draft:
            ``never``, ``always``, or ``auto``: as what has lately been faster.
        ngram_max: longest suffix that the n-gram proposer looks up.
        verifier: who compares a drafted step with the target's: ``exact``, ``judge``,
            ``cascade``, ``embedding``, ``score``, ``likelihood`` or ``random``.
        verifier_threshold: from where on the verifier's score accepts.
        proposer: where token drafts come from: ``ngram``, ``draft_step``, ``draft_model`` or ``engine``.
        audit_rate: share of the accepted drafted steps that the server's auditor judges again; the answer
            does not wait for it.
        risk_budget: highest tolerable share of wrong ones among them; while the server measures more beyond
            doubt, it accepts equal tokens only. 0 is no limit.
        segmenter: where a step ends: ``blank_line``, ``sentence`` or ``adaptive`` (blank lines, and
            sentences in a long paragraph).
        lossless: no judged step is ever accepted; only token speculation.
        deterministic: the result does not depend on which engine answers first.
        deadline_s: seconds until the server cuts the answer, with finish reason ``deadline``.
        trace: send a record of every step, and at the end the trace of the whole request.
    """

    raw: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stream: bool | None = None
    mode: str | None = None
    max_depth: int | None = None
    depth: str | None = None
    min_chance: float | None = None
    draft_run_tokens: int | None = None
    width: int | None = None
    num_draft_tokens: int | Literal["auto"] | None = None
    draft_length: str | None = None
    await_draft: str | None = None
    ngram_max: int | None = None
    verifier: str | None = None
    verifier_threshold: float | None = None
    proposer: str | None = None
    audit_rate: float | None = None
    risk_budget: float | None = None
    segmenter: str | None = None
    lossless: bool | None = None
    deterministic: bool | None = None
    deadline_s: float | None = None
    trace: bool | None = None

    def __post_init__(self) -> None:
        if self.stop is not None:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            object.__setattr__(self, "stop", stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What became of one step of the answer. Times are seconds since the server admitted the request.

    Attributes:
        origin: ``draft`` (drafted and accepted), ``correction`` (the target's own step in place of a drafted
            one) or ``target`` (the target's step where none was drafted).
        reason: why it was accepted or not: ``exact``, ``judge``, ``late`` ...; ``none``: none was drafted.
        verifier: who decided on the drafted step, of a cascade the stage; None where nobody had to.
        score: the verifier's measure, where it has one.
        sibling: which candidate of the position was accepted.
    """

    index: int
    origin: str
    text: str
    reason: str = "none"
    verifier: str | None = None
    score: float | None = None
    num_tokens: int = 0
    sibling: int | None = None
    drafted_text: str | None = None
    target_text: str | None = None
    drafted_started_s: float | None = None
    drafted_finished_s: float | None = None
    target_started_s: float | None = None
    target_finished_s: float | None = None
    committed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts and rates of one finished request. A rate is None where nothing was counted.

    Attributes:
        num_steps_accepted_by: accepted steps, by reason.
        num_steps_rejected: drafted steps that were judged and not taken, by reason.
        step_acceptance_rate: accepted / (accepted + rejected + late) drafted steps.
        mean_accepted_length: mean number of consecutive accepted steps before each correction.
        token_acceptance_rate: accepted / verified token drafts.
        num_wasted_tokens: generated by target or draft, and not committed; without the tokens of the draft
            model that the target took over as token drafts.
        num_audited: accepted steps of this answer that were audited by its end.
        num_audits_pending: those whose audit was still to come.
        num_false_accepts: audited steps of this answer that should not have been accepted.
        false_accept_rate: the server's for the request's verifier, with its 95 % interval from
            ``false_accept_rate_low`` to ``false_accept_rate_high``; None where no audits were asked for.
        risk_budget_spent: for all or some of its steps the request accepted equal tokens only.
        first_step_s: seconds until the first committed step.
        latency_s: seconds until the end.
        degraded: roles that were down, so that the answer came without them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    num_steps: int = 0
    num_steps_drafted: int = 0
    num_steps_accepted: int = 0
    num_steps_accepted_by: Mapping[str, int] = field(default_factory=dict)
    num_steps_late: int = 0
    num_steps_rejected: Mapping[str, int] = field(default_factory=dict)
    step_acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_acceptance_rate: float | None = None
    num_target_calls: int = 0
    num_draft_calls: int = 0
    num_judge_calls: int = 0
    num_target_passes: int = 0
    num_wasted_tokens: int = 0
    num_reused_tokens: int = 0
    num_audited: int = 0
    num_audits_pending: int = 0
    num_false_accepts: int = 0
    false_accept_rate: float | None = None
    false_accept_rate_low: float | None = None
    false_accept_rate_high: float | None = None
    risk_budget_spent: bool = False
    first_step_s: float | None = None
    latency_s: float = 0.0
    mode: str = "ar"
    degraded: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens per second of the whole request, by the server's clock."""
        return self.completion_tokens / self.latency_s if self.latency_s > 0 else None


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Newly committed text; never empty, never withdrawn."""

    text: str


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One committed step; comes just before its text, and only with ``trace``."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end; exactly one, always last.

    Attributes:
        trace: with ``trace``, the request's whole trace: JSON text, which ``lookahead trace`` reads.
    """

    finish_reason: str
    usage: Usage
    trace: str | None = None


Event = TextEvent | StepEvent | FinishEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole answer.

    Attributes:
        text: everything that was committed.
        reasoning: the part before ``</think>``.
        answer: the part after ``</think>``; the whole text where the model does not reason.
        steps: one record a step with ``trace``, else empty.
        trace: with ``trace``, the request's whole trace: JSON text, which ``lookahead trace`` reads.
    """

    text: str
    reasoning: str
    answer: str
    finish_reason: str
    usage: Usage
    steps: tuple[StepRecord, ...] = ()
    trace: str | None = None
