"""Verifiers that measure a pair and compare with a threshold, and chance as a control."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from lr_backend.verify.verdict import Reason, StepPair, Verdict, Verifier


class Scorer(Protocol):
    """Measures how far a drafted step agrees with the target's; higher is closer. ``reason`` names the measure."""

    @property
    def reason(self) -> Reason: ...

    async def measure(self, pair: StepPair) -> float | Reason:
        """The score, or why there is none. Never raises but for cancellation."""


@dataclass(frozen=True)
class ThresholdVerifier:
    """Accepts a score of at least ``threshold``; no score, or one that is no number, rejects."""

    scorer: Scorer
    threshold: float

    async def verify(self, pair: StepPair) -> Verdict:
        name, score = self.scorer.reason, await self.scorer.measure(pair)
        if isinstance(score, Reason):
            return Verdict(False, score, verifier=name.value)
        return Verdict(score >= self.threshold, name, score, name.value)


@dataclass(frozen=True)
class RandomVerifier:
    """Accepts with a probability, blind to the pair: the control of every comparison of verifiers (paper, table 2).

    The draw is a hash of (seed, position, both steps), so that it does not depend on which pair was judged first.
    """

    probability: float
    seed: int

    async def verify(self, pair: StepPair) -> Verdict:
        score = self._draw(pair)
        return Verdict(score < self.probability, Reason.RANDOM, score, Reason.RANDOM.value)

    def _draw(self, pair: StepPair) -> float:
        """A number in [0, 1)."""
        digest = blake2b(f"{self.seed}/{len(pair.prefix)}/".encode(), digest_size=8)
        for step in (pair.target, pair.drafted):
            digest.update(np.asarray([len(step.ids), *step.ids], dtype=np.int64).tobytes())
        return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53


@dataclass(frozen=True)
class Disregarding:
    """Waits for one verifier and takes another's word: what verdicts cost, whatever they say."""

    asked: Verifier
    decides: Verifier

    async def verify(self, pair: StepPair) -> Verdict:
        await self.asked.verify(pair)
        return await self.decides.verify(pair)
