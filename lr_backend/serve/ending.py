"""Whether a server of single roles, told to end, has answered all that it had.

Triton lets the calls in flight finish and ends by itself, but for two things. It waits for calls whose process died. And it
cannot unload a compiled engine that was ever asked to cancel: upstream's backend answers that by a response factory that it
never deletes, and each keeps the model. Then the engines' own counts tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lr_backend.engine import Role
from lr_backend.serve.server import ServerError, by_label, by_role

COUNTS_AGE_S = 1.0
"""Of our engines' counts in Triton's metrics, at most: twice as long as they take to be refreshed."""
STILL_S = 15.0
"""A compiled engine that makes no iteration for so long is idle, or will answer nothing more. The longest, full of prompts, takes
some seconds, and upstream counts them every second."""


ITERATIONS = 'nv_trt_llm_general_metrics{general_type="iteration_counter",model="([^"]*)"[^}]*}'
"""Of a compiled engine since it was loaded. Its model has the name of its role."""


class Metrics(Protocol):
    """A server's. Raises :class:`ServerError` where they do not answer."""

    def metrics(self) -> str: ...


@dataclass
class Idleness:
    """Whether a server's engines have stopped computing; to be looked at again and again.

    Attributes:
        roles: the engines that it has, but for those that have died.
        still_since_s: when it was told to end; later, when something moved last.
        iterations: of its compiled engines, as counted last.
        known: roles that were counted. What Triton has unloaded is counted no more, and has nothing in flight.
    """

    roles: Collection[Role]
    still_since_s: float
    iterations: Mapping[str, float] = field(default_factory=dict, init=False)
    known: set[str] = field(default_factory=set, init=False)

    def lasts(self, server: Metrics, now_s: float) -> bool:
        """Whether nothing has moved for so long that nothing is in flight."""
        if self._moves(server):
            self.still_since_s = now_s
        return now_s - self.still_since_s > (STILL_S if self.iterations else COUNTS_AGE_S)

    def _moves(self, server: Metrics) -> bool:
        """What is not known may move."""
        try:
            metrics = server.metrics()
        except ServerError:
            return True
        running, waiting = by_role(metrics, "lr_engine_running"), by_role(metrics, "lr_engine_waiting")
        before, self.iterations = self.iterations, by_label(metrics, ITERATIONS)
        self.known |= (running.keys() & waiting.keys()) | self.iterations.keys()
        busy = any(running.get(role) or waiting.get(role) for role in self.roles)
        return busy or not self.known >= set(self.roles) or self.iterations != before
