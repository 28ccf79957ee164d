"""Texts by a real model: the embedded engine computes each call as fast as it can, ahead of the timeline that gives it out."""

from __future__ import annotations

from functools import partial

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.sequence import NewTokens
from lr_backend.emulated.feed import Feed, Pass
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, LookaheadError

MAX_PASSES = 8
"""Tokens are told in such pieces: the timeline must not wait for one because more of them come later."""
MAX_NICENESS = 15


class ModelSource:
    """The texts of one checkpoint."""

    def __init__(self, config: EngineConfig, token_s: float) -> None:
        """Computing gives way to whoever keeps the time, and of two engines the one whose tokens are due later to the other.

        Args:
            token_s: what a token is to take.

        Raises:
            CheckpointError, ConfigError: as :class:`~lr_backend.embedded.engine.EmbeddedEngine`.
        """
        niceness = min(MAX_NICENESS, 1 + round(1e3 * token_s))
        self.engine = EmbeddedEngine(config, max_passes=MAX_PASSES, niceness=niceness)

    def begin(self, request: EngineRequest) -> Feed:
        feed = Feed()

        def on_done(result: EngineResponse | LookaheadError) -> None:
            feed.end(result if isinstance(result, LookaheadError) else EngineError("its text has ended"))

        self.engine.submit(request, on_done, partial(_tell, feed))
        return feed

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    def close(self) -> None:
        self.engine.close()


def _tell(feed: Feed, new: NewTokens) -> None:
    """An engine that drafts, or that verifies, brings several tokens a pass; else each token is a pass of its own."""
    request = new.sequence.request
    if request.num_draft_tokens or new.num_accepted:
        feed.add([Pass(tuple(new.token_ids), tuple(new.log_probs), new.num_proposed)])
    else:
        scores = new.log_probs
        feed.add([Pass((token,), tuple(scores[index : index + 1])) for index, token in enumerate(new.token_ids)])
