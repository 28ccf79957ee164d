"""What TensorRT-LLM's executor does beside taking time, as far as a user can feel it. Each rule has a switch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamRules:
    """Rules of release 1.2.1, by upstream's sources. Later releases mend the first two.

    Attributes:
        charges_whole_prefix: a request that joins takes its whole prompt of ``max_num_tokens``, reused or not; where that is not
            left, a whole number of blocks of what is (microBatchScheduler.cpp; mended by PRs 11490 and 11637).
        reserves_kv_in_full: it joins only where blocks for its prompt and all tokens that it may write are free beside those that
            the others may come to need; what it could reuse is not taken off (capacityScheduler.cpp,
            GuaranteedNoEvictScheduler, and kvCacheManager.cpp, getRemainingBlocksToCompletion).
        cancels_what_has_run: a cancelled request goes when an iteration that it took part in ends; one that waits computes its
            prompt first (executorImpl.cpp, executionLoop; trtGptModelInflightBatching.cpp, forwardSync).
        cancellation_check_period_ms: how often the backend looks whether a client has gone away (model_instance_state.cc,
            WaitForCancel); a request with ``stop`` is heard at once. None: nobody looks.
        fails_as_internal: every refusal comes back as INTERNAL, in upstream's words (:mod:`lr_backend.engine.upstream_errors`).
    """

    charges_whole_prefix: bool = True
    reserves_kv_in_full: bool = True
    cancels_what_has_run: bool = True
    cancellation_check_period_ms: int | None = 100
    fails_as_internal: bool = True


OWN_RULES = UpstreamRules(
    charges_whole_prefix=False,
    reserves_kv_in_full=False,
    cancels_what_has_run=False,
    cancellation_check_period_ms=None,
    fails_as_internal=False,
)
"""Those of the embedded engine."""
