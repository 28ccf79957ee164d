"""What upstream's ``CompletionOutput`` says beyond token ids. Field names as of 1.2; what a version leaves out is not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


def log_probs_of(completion: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of ``tokens``, the first ones that ``completion`` holds: as many as are known without a gap.

    Upstream has one entry a token: a map from candidate to its log-probability, or (up to about 1.0) the number itself.
    """
    found = []
    for token, entry in zip(tokens, completion.logprobs or (), strict=False):
        value: Any = entry.get(token) if isinstance(entry, dict) else entry
        if value is None:
            break
        # Rounding can lift the logarithm of a sure thing above 0.
        found.append(min(0.0, float(getattr(value, "logprob", value))))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Perf:
    """Upstream's ``request_perf_metrics`` of one request.

    Attributes:
        num_draft_tokens: that were verified. 0 in the PyTorch flow of 1.2.1, whatever was drafted.
    """

    num_reused_blocks: int
    num_allocated_blocks: int
    queue_ns: int
    num_draft_tokens: int


def perf_of(completion: Any) -> Perf | None:
    """Upstream sends them with the last response only, hence not for runs that were cut short here: None."""
    metrics = getattr(completion, "request_perf_metrics", None)
    if metrics is None:
        return None
    cache, times = metrics.kv_cache_metrics, metrics.timing_metrics
    waited = times.first_scheduled_time - times.arrival_time
    queue_ns = waited // timedelta(microseconds=1) * 1000 if isinstance(waited, timedelta) else int(waited * 1e9)
    found = getattr(metrics, "speculative_decoding", None)
    num_drafts = found.total_draft_tokens if found is not None else 0
    return Perf(cache.num_reused_blocks, cache.num_new_allocated_blocks, max(0, queue_ns), num_drafts)


def passes_of(output: Any) -> int:
    """Passes of the model that a request has taken so far, its prompt's included; 0 where upstream does not say."""
    return int(getattr(output, "decoding_iter", 0) or 0)
