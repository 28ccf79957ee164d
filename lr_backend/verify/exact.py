"""Equal token ids, nothing else: lossless whatever the draft writes."""

from __future__ import annotations

from dataclasses import dataclass

from lr_backend.verify.verdict import Reason, StepPair, Verdict


@dataclass(frozen=True)
class ExactVerifier:
    """Rejects every pair that :func:`~lr_backend.verify.verdict.settle` left open. ``reason``: why nothing more is accepted."""

    reason: Reason = Reason.DIFFERENT

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(False, self.reason, verifier="exact")
