"""What an LLM API engine counts by itself; upstream's own statistics stay upstream's."""

from __future__ import annotations

from dataclasses import dataclass

GAUGES = ("num_waiting", "num_running")
DRAFT_COUNTERS = ("num_draft_tokens", "num_accepted_tokens")
"""Of an engine that drafts by itself alone: what nobody counts is not shown as zero."""


@dataclass(frozen=True, slots=True)
class LlmApiStats:
    """Totals since the start, and gauges.

    Attributes:
        num_tokens_decoded: tokens given out.
        num_tokens_dropped: tokens that came together with a stop that only the stream showed, behind it.
        num_draft_tokens: drafted by the engine itself; an upper bound where n-grams are looked up.
        num_waiting: requests beyond ``max_batch_size``; which ones wait, the engine decides.
    """

    num_requests: int = 0
    num_tokens_decoded: int = 0
    num_tokens_dropped: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_waiting: int = 0
    num_running: int = 0
