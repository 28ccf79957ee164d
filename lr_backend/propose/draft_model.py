"""Draft-target speculation (arXiv 2211.17192): the draft model goes on from the target's prefix, the target verifies its tokens.

Whatever the draft writes, the answer's distribution stays the target's: the target accepts a drafted token x with probability
p(x) and else draws from the rest, as it does with tokens that were looked up. That asks nothing of
the draft but noise of its own, so the draft may guess its best, and may stop where it is not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from math import log

from lr_backend.engine import Engine, EngineCall, Sampling
from lr_backend.errors import EngineError
from lr_backend.propose.proposal import Position, Proposal


@dataclass
class DraftModel:
    """Asks the draft's engine for token drafts; ``None`` where it has said nothing, so that somebody else may propose.

    A draft that failed is not asked again: ``failed`` is told, and ``available`` is expected to be False from then on.

    Attributes:
        sampling: how the draft's tokens are drawn.
        seed: (token offset, sibling) -> seed of the call; must differ from every other call's.
        min_confidence: drafts end before the first token that the draft gave less probability, in [0, 1]; 0 keeps them all.
            An engine that gives no log-probabilities keeps them all too.
    """

    engine: Engine
    sampling: Sampling
    request_id: str
    seed: Callable[[int, int], int]
    available: Callable[[], bool]
    failed: Callable[[], None]
    min_confidence: float = 0.0
    _calls: count[int] = field(default_factory=count)

    async def __call__(self, position: Position) -> Proposal | None:
        if position.max_tokens <= 0 or not self.available():
            return None
        call = EngineCall(
            request_id=f"{self.request_id}/token_draft/{next(self._calls)}",
            input_ids=position.context,
            max_new_tokens=position.max_tokens,
            sampling=self.sampling,
            seed=self.seed(len(position.context), position.sibling),
            stop_words=position.stop_words,
            return_log_probs=self.min_confidence > 0.0,
        )
        try:
            generation = await self.engine.generate(call)
        except EngineError:
            self.failed()
            return None
        drafted = generation.token_ids[: position.max_tokens]
        if not drafted:
            return None
        return Proposal(confident(drafted, generation.log_probs, self.min_confidence), len(drafted), call.request_id)


def confident(token_ids: tuple[int, ...], log_probs: Sequence[float], min_confidence: float) -> tuple[int, ...]:
    """The tokens before the first whose probability is below ``min_confidence`` (arXiv 2405.04304, by a threshold).

    Args:
        log_probs: of each token, in nats; where there are fewer than tokens, nothing is known and nothing is cut.
    """
    if min_confidence <= 0.0 or len(log_probs) < len(token_ids):
        return token_ids
    least = log(min_confidence)
    return token_ids[: sum(1 for _ in takewhile(lambda log_prob: log_prob >= least, log_probs[: len(token_ids)]))]
