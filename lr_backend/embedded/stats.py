"""What an embedded engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and gauges (queue, running, KV blocks) at the time of the snapshot.

    Attributes:
        busy_s: time spent in iterations.
        num_batch_rows: sum of the sequences of all iterations.
        num_tokens_prefilled: prompt tokens and draft tokens that were computed, not reused.
        num_tokens_decoded: tokens given out.
        paced_s: time that the iterations of an engine with a pace were to take.
        late_s: time that they took beyond that.
    """

    num_iterations: int = 0
    busy_s: float = 0.0
    num_batch_rows: int = 0
    num_tokens_prefilled: int = 0
    num_tokens_decoded: int = 0
    num_tokens_reused: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_integrity_failures: int = 0
    paced_s: float = 0.0
    late_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_blocks_free: int = 0

    @property
    def mean_batch_size(self) -> float:
        return self.num_batch_rows / self.num_iterations if self.num_iterations else 0.0


@dataclass(slots=True)
class Counters:
    """Running totals, kept by the engine's thread."""

    num_iterations: int = 0
    busy_s: float = 0.0
    num_batch_rows: int = 0
    num_tokens_prefilled: int = 0
    num_tokens_decoded: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_integrity_failures: int = 0
