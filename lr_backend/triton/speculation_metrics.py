"""Token speculation as Triton metrics of the ``lookahead`` model, under vLLM's names.

Tools that measure speculative decoding read vLLM's counters by name (AIPerf's acceptance report, for one), prefix included, so
these carry it too: drafts verified, their tokens, those accepted, and those accepted by position in the draft. Mean accepted
length is then 1 + accepted tokens / drafts, as everywhere. Counted when an answer is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from lr_backend.triton.metrics import Key, MetricSheet

PREFIX = "vllm:spec_decode_num_"
DRAFTS = f"{PREFIX}drafts_total"
DRAFT_TOKENS = f"{PREFIX}draft_tokens_total"
ACCEPTED_TOKENS = f"{PREFIX}accepted_tokens_total"
ACCEPTED_PER_POSITION = f"{PREFIX}accepted_tokens_per_pos_total"
COUNTERS = {
    DRAFTS: "Drafts (rows of draft tokens) that the target verified",
    DRAFT_TOKENS: "Draft tokens that the target verified",
    ACCEPTED_TOKENS: "Draft tokens that the target accepted",
    ACCEPTED_PER_POSITION: (
        "Accepted draft tokens by their position in the draft, from 0; an engine that drafts by itself does not say"
    ),
}


@dataclass
class DraftCounts:
    """Verifications of draft tokens, by the number of tokens accepted of each. Any thread may add and read."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=list)
    num_accepted_elsewhere: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """One draft of ``num_proposed`` tokens, the first ``num_accepted`` of which were accepted."""
        assert 0 <= num_accepted <= num_proposed, (num_accepted, num_proposed)
        with self._lock:
            self.num_drafts += 1
            self.num_draft_tokens += num_proposed
            self.num_accepted_at += [0] * (num_accepted - len(self.num_accepted_at))
            for position in range(num_accepted):
                self.num_accepted_at[position] += 1

    def drafted_by_engine(self, num_passes: int, num_proposed: int, num_accepted: int) -> None:
        """Drafts that the target's engine wrote itself: it says how many stood, not at which positions."""
        with self._lock:
            self.num_drafts += num_passes
            self.num_draft_tokens += num_proposed
            self.num_accepted_elsewhere += num_accepted

    def values(self) -> Iterator[tuple[Key, float]]:
        """Every counter as it stands."""
        with self._lock:
            totals = {
                DRAFTS: self.num_drafts,
                DRAFT_TOKENS: self.num_draft_tokens,
                ACCEPTED_TOKENS: sum(self.num_accepted_at) + self.num_accepted_elsewhere,
            }
            by_position = list(self.num_accepted_at)
        for name, count in totals.items():
            yield (name, ()), float(count)
        for position, count in enumerate(by_position):
            yield (ACCEPTED_PER_POSITION, (("position", str(position)),)), float(count)


def speculation_metrics(family: Any, model_name: str, counts: DraftCounts, loop: int = 0) -> MetricSheet:
    """``vllm:spec_decode_*`` of the counts; ``model_name`` becomes a label, and ``loop`` vLLM's ``engine``."""
    return MetricSheet(family, COUNTERS, {}, counts.values, {"model_name": model_name, "engine": str(loop)})
