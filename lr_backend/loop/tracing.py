"""The trace of a finished request, read from its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lr_backend.loop.answer import Outcome
from lr_backend.loop.ledger import CallSpan, Job, Ledger
from lr_backend.loop.tree import Decision
from lr_backend.trace.schema import Call, CallOutcome, Purpose, Trace
from lr_backend.verify.verdict import UNCOMPARED


def build_trace(outcome: Outcome, request_id: str, pace: str = "") -> Trace:
    """The whole story of a request that has ended and whose ledger was ``traced``; ``pace`` as in the trace."""
    ledger = outcome.ledger
    ends = list(accumulate((record.num_tokens for record in ledger.records), initial=ledger.prompt_tokens))[1:]
    return Trace(
        request_id=request_id,
        request=outcome.request,
        finish_reason=outcome.finish_reason,
        steps=tuple(ledger.records),
        calls=tuple(_call(span, ledger, ends) for span in ledger.spans),
        usage=outcome.usage,
        pace=pace,
    )


def _call(span: CallSpan, ledger: Ledger, ends: Sequence[int]) -> Call:
    assert span.finished_s is not None, "the request has not ended"
    job = span.job
    num_committed = _num_within_step(span, span.index, ends)
    if span.failed or span.cancelled:
        outcome = CallOutcome.FAILED if span.failed else CallOutcome.CANCELLED
    elif job is None:
        outcome = CallOutcome.COMMITTED if num_committed else CallOutcome.WASTED
    else:
        outcome = _outcome(job, ledger.moves.get(job.index))
    if span.drafts_tokens and not (span.failed or span.cancelled):
        dropped = job is not None and outcome is CallOutcome.WASTED
        outcome = CallOutcome.WASTED if dropped or not span.num_proposed else _verified(span)
    purpose = Purpose.DRAFT_TOKENS if span.drafts_tokens else Purpose.ALONE if job is None else job.purpose
    in_answer = outcome is CallOutcome.COMMITTED or (outcome is CallOutcome.ACCEPTED and purpose is Purpose.DRAFTED_STEP)
    if in_answer and span.num_tokens and not num_committed:  # all of them stand behind a stop string
        outcome = CallOutcome.WASTED
    return Call(
        role=span.role,
        purpose=purpose,
        outcome=outcome,
        step=span.index,
        depth=0 if job is None else job.depth,
        sibling=0 if job is None or job.purpose is Purpose.TARGET_STEP else job.node.sibling,
        start_ms=_ms(span.started_s),
        end_ms=_ms(span.finished_s),
        num_prompt_tokens=span.num_prompt_tokens,
        num_tokens=span.num_tokens,
        num_committed_tokens=num_committed if in_answer else 0,
        num_draft_tokens=span.num_proposed,
        num_accepted_tokens=span.num_accepted,
        num_reused_tokens=span.num_reused_tokens,
        queue_ms=_ms(span.queue_s),
        engine_ms=_ms(span.engine_s),
    )


def _verified(span: CallSpan) -> CallOutcome:
    """What became of draft tokens that the target has verified."""
    return CallOutcome.ACCEPTED if span.num_accepted else CallOutcome.REJECTED


def _num_within_step(span: CallSpan, index: int, ends: Sequence[int]) -> int:
    """Tokens of a call before the end of the committed step at ``index``; steps are cut, so a call may bring more.

    Args:
        ends: number of tokens up to the end of each committed step, the prompt included.
    """
    if index >= len(ends):
        return 0
    return min(max(0, ends[index] - span.num_prompt_tokens), span.num_tokens)


def _outcome(job: Job, move: Decision | None) -> CallOutcome:
    """What became of completed work in the tree.

    Args:
        move: how the root passed the step at the job's index, if it did.
    """
    node, verdict = job.node, job.node.verdict
    if job.purpose is Purpose.TARGET_STEP:
        if move is None or move.position is not node:
            return CallOutcome.WASTED
        return CallOutcome.COMMITTED if move.winner is None else CallOutcome.VERIFIED
    if job.purpose is Purpose.VERDICT:
        if move is None or node not in move.position.children or verdict is None:
            return CallOutcome.WASTED
        return CallOutcome.ACCEPTED if verdict.accepted else CallOutcome.REJECTED
    if move is not None and move.winner is not None and node.drafted is not None and move.winner.drafted is node.drafted:
        return CallOutcome.ACCEPTED
    compared = verdict is not None and verdict.reason not in UNCOMPARED
    return CallOutcome.REJECTED if compared and verdict is not None and not verdict.accepted else CallOutcome.WASTED


def _ms(seconds: float) -> float:
    # Microseconds: finer digits would only make the document longer.
    return round(1e3 * seconds, 3)
