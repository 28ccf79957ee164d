"""How close two steps lie in a sentence embedding (paper, table 2). Knows embedding models by protocol; no torch here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from lr_backend.errors import LookaheadError
from lr_backend.verify.verdict import Reason, StepPair


class Embedder(Protocol):
    """A sentence embedding model."""

    async def similarity(self, first: str, second: str) -> float:
        """Cosine of the two texts' embeddings, -1 to 1.

        Raises:
            LookaheadError: the model failed.
        """


@dataclass(frozen=True)
class EmbeddingScorer:
    """The cosine. ``timeout_s`` None waits."""

    embedder: Embedder
    timeout_s: float | None
    reason = Reason.EMBEDDING

    async def measure(self, pair: StepPair) -> float | Reason:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.embedder.similarity(pair.target_text.strip(), pair.drafted_text.strip())
        except TimeoutError:
            return Reason.TIMEOUT
        except LookaheadError:
            return Reason.VERIFIER_ERROR
