"""The text of one call, as far as it is known: what the timeline gives out token by token."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from lr_backend.engine.request import EngineRequest
from lr_backend.errors import LookaheadError


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass of the model brings to a sequence, at least one token.

    Attributes:
        log_probs: of the tokens, where the call wants them.
        num_proposed: draft tokens that the engine itself put forward for it.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    num_proposed: int = 0


class Feed:
    """The passes of one call in order. Written by whoever computes them, read by the timeline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes: list[Pass] = []
        self._num_taken = 0
        self._end: LookaheadError | None = None

    def add(self, passes: Items[Pass]) -> None:
        with self._changed:
            self._passes += passes
            self._changed.notify_all()

    def end(self, error: LookaheadError) -> None:
        """There will be no more: ``error`` is raised to whoever wants more."""
        with self._changed:
            self._end = error
            self._changed.notify_all()

    @property
    def num_ready(self) -> int:
        """Passes that are there to be taken."""
        return len(self._passes) - self._num_taken

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to give or to raise."""
        return self.num_ready > 0 or self._end is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until :attr:`ready`; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ready, timeout_s)

    def peek(self) -> Pass:
        """The next pass, which stays the next one.

        Raises:
            LookaheadError: there is none, and will not be.
        """
        if self.num_ready:
            return self._passes[self._num_taken]
        assert self._end is not None, "the next pass is not there yet"
        raise self._end

    def take(self) -> Pass:
        """Raises: LookaheadError: as :meth:`peek`."""
        found = self.peek()
        self._num_taken += 1
        return found

    def take_up_to(self, max_tokens: int) -> Pass:
        """The first tokens of the next pass; the rest becomes the next one. Raises: LookaheadError: as :meth:`peek`."""
        found = self.peek()
        if len(found.token_ids) <= max_tokens:
            return self.take()
        num_proposed = min(found.num_proposed, max_tokens - 1)
        rest = found.token_ids[max_tokens:], found.log_probs[max_tokens:], max(0, found.num_proposed - max_tokens)
        self._passes[self._num_taken] = Pass(*rest)
        return Pass(found.token_ids[:max_tokens], found.log_probs[:max_tokens], num_proposed)


class TextSource(Protocol):
    """Who writes the texts. Both methods return at once and may be called from any thread."""

    def begin(self, request: EngineRequest) -> Feed:
        """The text of a call, which fills from now on.

        Raises:
            LookaheadError: the call is refused.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody reads the rest of a call's text."""
        ...

    def close(self) -> None: ...
