"""How texts behave, from recorded traces: what is accepted, how long steps and answers are. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np

from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import TraceError
from lr_backend.policy.draft_length import expected_tokens
from lr_backend.request import Origin, StepRecord
from lr_backend.steps.tokens import num_equal
from lr_backend.trace.schema import Purpose, Trace
from lr_backend.verify.verdict import FAILED, UNCOMPARED, Reason

MAX_SPREAD, MAX_HIT_RATE = 0.95, 0.8
_WORDS = re.compile(r"\n\n|\S+")
"""The end of a step is a word of its own: nothing is found across it that has not stood across one before."""

BISECTIONS = 40


def fit_workload(traces: Sequence[Trace]) -> Workload:
    """How the texts of the traces behave, whatever time they took.

    Raises:
        TraceError: no trace with lookahead, or no drafted step that was compared.
    """
    ahead = [trace for trace in traces if any(call.purpose is Purpose.DRAFTED_STEP for call in trace.calls)]
    if not ahead:
        raise TraceError(
            f"no trace with lookahead among {len(traces)}: record some in mode lr or lr_sd, with max_depth of 1 or more"
        )
    accepted = acceptance(ahead)  # of a trace that ended before its first step there is nothing to fit
    lengths = [length for trace in ahead for length in _step_lengths(trace)]
    mean = fmean(lengths)
    return Workload(
        **accepted,
        token_agreement=_token_agreement(traces),
        word_agreement=_word_agreement(ahead),
        ngram_hit_rate=_ngram_hit_rate(traces),
        prompt_tokens=max(3, round(fmean(trace.usage.prompt_tokens for trace in ahead))),
        step_tokens=max(2, round(mean)),
        step_spread=_spread(lengths, mean),
        num_steps=max(1, round(fmean(_reasoning_length(trace) for trace in ahead) / mean)),
        answer_tokens=round(fmean(_answer_length(trace) for trace in ahead)),
        **_verdict_lengths(ahead, mean),
    )


def by_verifier(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    """The traces in which each verifier alone has compared steps: none whose risk budget was spent."""
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        if not trace.usage.risk_budget_spent and any(_trials(record, trace) for record in trace.steps):
            groups.setdefault(trace.request.effective_verifier, []).append(trace)
    return groups


# What the draft is worth -------------------------------------------------------------------------------------------


def acceptance(traces: Sequence[Trace]) -> dict[str, Any]:
    """The workload's fields of what is accepted.

    Raises:
        TraceError: no drafted step was compared.
    """
    # While a risk budget is spent only equal tokens are accepted, and no record says when that was.
    traces = [trace for trace in traces if not trace.usage.risk_budget_spent]
    return {
        "acceptance_rate": acceptance_rate(traces),
        "sibling_acceptance_rate": sibling_acceptance_rate(traces),
        "exact_rate": _exact_rate(traces),
        "length_bias": _length_bias(traces),
    }


def acceptance_rate(traces: Sequence[Trace]) -> float:
    """Share of the first candidates at the root that were accepted, of those that were compared.

    Late drafts are left out: how many there are follows from the times.

    Raises:
        TraceError: none was compared.
    """
    accepted, compared = _accepted_and_compared(traces)
    if not compared[0]:
        raise TraceError("no drafted step was compared in any trace")
    return accepted[0] / compared[0]


def sibling_acceptance_rate(traces: Sequence[Trace]) -> float | None:
    """Share of the further candidates at the root that were accepted, of those that were compared; None where none was."""
    accepted, compared = _accepted_and_compared(traces)
    further = compared.total() - compared[0]
    return (accepted.total() - accepted[0]) / further if further else None


def _accepted_and_compared(traces: Iterable[Trace]) -> tuple[Counter[int], Counter[int]]:
    """How many candidates of each place among their siblings.

    A position whose winner is candidate i had i + 1 of them compared, one without a winner all of its width.
    """
    accepted, compared = Counter[int](), Counter[int]()
    for trace in traces:
        for record in trace.steps:
            compared.update(range(_trials(record, trace)))
            if record.origin is Origin.DRAFT:
                accepted[record.sibling or 0] += 1
    return accepted, compared


def _first_candidates(traces: Iterable[Trace]) -> Iterator[tuple[StepRecord, bool]]:
    """Each step whose first candidate was compared, and whether that was accepted."""
    for trace in traces:
        for record in trace.steps:
            if _trials(record, trace):
                yield record, record.origin is Origin.DRAFT and not record.sibling


def _exact_rate(traces: Iterable[Trace]) -> float:
    """Share of the first candidates that were the target's own steps."""
    return fmean(accepted and record.reason == Reason.EXACT.value for record, accepted in _first_candidates(traces))


def _length_bias(traces: Iterable[Trace]) -> float:
    """Slope of acceptance over length, as a share of the mean length, downwards (least squares)."""
    lengths, accepted = np.array([(record.num_tokens, one) for record, one in _first_candidates(traces)], dtype=float).T
    longer = lengths / lengths.mean() - 1.0
    spread = float((longer * longer).sum())
    return float(np.clip(-(longer * accepted).sum() / spread, -1.0, 1.0)) if spread else 0.0


def _token_agreement(traces: Iterable[Trace]) -> float:
    """Chance that a draft token behind accepted ones is accepted, from how many were in a row; 0 where none was verified."""
    targets = (call for trace in traces for call in trace.calls if call.role is Role.TARGET)
    # One that was cancelled may have had all its draft tokens accepted.
    calls = [call for call in targets if call.num_draft_tokens and call.completed]
    by_itself = [call for call in calls if call.num_tokens - call.num_accepted_tokens > 1]
    verified = [call for call in calls if call.num_tokens - call.num_accepted_tokens <= 1]
    num_accepted = float(sum(call.num_accepted_tokens for call in verified))
    num_ended = float(sum(call.num_accepted_tokens < call.num_draft_tokens for call in verified))
    if by_itself:
        # How many were in a row is known of all passes together; a call's first pass is its prompt's, and verifies nothing.
        num_passes = sum(call.num_tokens - call.num_accepted_tokens - 1 for call in by_itself)
        num_drafts = max(1, round(sum(call.num_draft_tokens for call in by_itself) / num_passes))
        num_stood = sum(call.num_accepted_tokens for call in by_itself)
        share = acceptance_from_length(min(num_drafts, num_stood / num_passes), num_drafts)
        num_accepted += num_stood
        num_ended += num_stood * (1.0 / share - 1.0) if share else num_passes
    return num_accepted / (num_accepted + num_ended) if num_accepted else 0.0


def _word_agreement(traces: Iterable[Trace]) -> float:
    """How much of drafted steps goes on in the target's words, once they have left them."""
    same = total = 0
    for trace in traces:
        for record in trace.steps:
            drafted, target = (record.drafted_text or "").split(), (record.target_text or "").split()
            start = num_equal(drafted, target)
            if not drafted or not target or start == len(drafted):
                continue
            blocks = SequenceMatcher(None, drafted[start:], target[start:], autojunk=False).get_matching_blocks()
            same, total = same + sum(block.size for block in blocks), total + len(drafted) - start
    return same / total if total else 0.0


def _ngram_hit_rate(traces: Iterable[Trace]) -> float:
    """Share of the target's words that are found by looking up where the two before them stood last."""
    found = total = 0
    for trace in traces:
        words = _WORDS.findall("".join(record.target_text or record.text for record in trace.steps))
        followers: dict[tuple[str, str], str] = {}
        for first, second, word in zip(words, words[1:], words[2:], strict=False):
            found += followers.get((first, second)) == word
            followers[first, second] = word
        total += len(words)
    return min(MAX_HIT_RATE, found / total) if total else 0.0


def _verdict_lengths(traces: Iterable[Trace], step_tokens: float) -> dict[str, int]:
    """Of the judge's prompts what is the same each time, and what else there is beside two steps."""
    calls = [call for trace in traces for call in trace.calls if call.role is Role.JUDGE and call.completed]
    if not calls:
        return {}
    prefix = round(fmean(call.num_reused_tokens or 0 for call in calls))
    others = round(fmean(call.num_prompt_tokens for call in calls) - prefix - 2 * step_tokens)
    return {"verdict_prefix_tokens": prefix, "verdict_tokens": max(0, others)}


def _trials(record: StepRecord, trace: Trace) -> int:
    if record.origin is Origin.DRAFT:
        return 1 + (record.sibling or 0)
    compared = record.origin is Origin.CORRECTION and record.reason not in UNCOMPARED | FAILED
    width = 1 if trace.request.sampling.greedy else trace.request.width  # as older documents have it, which it asked for
    return width if compared else 0


# How long steps are ------------------------------------------------------------------------------------------------


def _step_lengths(trace: Trace) -> list[int]:
    """Tokens of the steps of the reasoning that are single ones."""
    alone = _alone(trace)
    return [record.num_tokens for record in trace.steps if record.index not in alone]


def _reasoning_length(trace: Trace) -> int:
    """Tokens of the reasoning."""
    after = _after(trace)
    return sum(record.num_tokens for record in trace.steps if record.index not in after)


def _answer_length(trace: Trace) -> int:
    """Tokens after the reasoning."""
    after = _after(trace)
    return sum(record.num_tokens for record in trace.steps if record.index in after)


def _after(trace: Trace) -> set[int]:
    """Steps that the target wrote behind the last one of the step loop's."""
    alone = _alone(trace)
    return {record.index for record in takewhile(lambda record: record.index in alone, reversed(trace.steps))}


def _alone(trace: Trace) -> set[int]:
    """Steps that the target wrote outside the step loop; where nobody watched, several of the reasoning are one here."""
    return {call.step for call in trace.calls if call.purpose is Purpose.ALONE}


def _spread(lengths: Sequence[int], mean: float) -> float:
    """Half the width, as a share of the mean, of a uniform distribution that varies as much."""
    return min(MAX_SPREAD, sqrt(3.0 * fmean((one - mean) ** 2 for one in lengths)) / mean)


def acceptance_from_length(mean_accepted: float, num_drafts: int) -> float:
    """The token acceptance at which ``mean_accepted`` of ``num_drafts`` draft tokens stand, on average."""
    if not 0.0 <= mean_accepted <= num_drafts:
        raise ValueError(f"mean_accepted={mean_accepted} is out of range")
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, num_drafts) - 1.0 < mean_accepted else (low, middle)
    return low
