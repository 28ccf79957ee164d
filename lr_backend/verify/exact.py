"""Equal token ids, nothing else: lossless whatever the draft writes."""

from __future__ import annotations

from lr_backend.verify.verdict import Reason, StepPair, Verdict


class ExactVerifier:
    """Rejects every pair that :func:`~lr_backend.verify.verdict.settle` left open."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(False, Reason.DIFFERENT, verifier="exact")
