"""Rows of a comparison on the demo models: settings of the request or of the server, asked in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from lr_client import Client, Result
from rich.console import Console

from bench.kit import serving
from bench.kit.measure import Sample
from bench.kit.turns import in_turns
from demo.problems import Problem
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.config import LoopConfig
from lr_backend.request import LookaheadRequest

PROBLEM_SEED = 77


@dataclass(frozen=True, slots=True)
class Change:
    """What a server has that is not as the demo's spec says.

    Attributes:
        threads: of the target; None: as it says. Such a server answers ``ar`` alone.
        own_branches: False: none are begun.
    """

    threads: int | None = None
    own_branches: bool = True

    def of(self, spec: EmbeddedDeployment) -> EmbeddedDeployment:
        """The deployment with it."""
        changed = spec if self.threads is None else serving.with_threads(spec, self.threads)
        lookahead = spec.lookahead if self.own_branches else {**spec.lookahead, "own_branches": False}
        return changed.model_copy(update={"lookahead": lookahead})

    @property
    def models(self) -> tuple[str, ...]:
        """Those that are served; none: all."""
        return () if self.threads is None else serving.ALONE

    def __str__(self) -> str:
        return f"threads-{self.threads}" if self.threads is not None else "all" if self.own_branches else "no-own-branches"


AS_IT_IS = Change()


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. ``fields`` are the request's, the rest being the deployment's defaults; ``change`` is the server's."""

    name: str
    fields: Mapping[str, Any]
    change: Change = AS_IT_IS

    def request(self, config: LoopConfig) -> LookaheadRequest:
        """The whole request, defaults filled in."""
        return LookaheadRequest.parse({**config.defaults, **self.fields, "text_input": "any"})


def ask(client: Client, row: Row, problem: Problem, index: int, *, trace: bool = False) -> tuple[Sample, Result]:
    """One answer, timed by the client."""
    # Rows with one seed would write much the same text, and those that come later find it in the KV cache.
    seed = crc32(f"{row.name}/{index}".encode())
    fields = {**row.fields, "trace": trace or None}
    return serving.ask(client, problem, fields, index, seed=seed, name=row.name)


def compare(
    clients: Mapping[Change, Client],
    rows: Sequence[Row],
    questions: Sequence[Problem],
    console: Console,
    answered: Callable[[Row], None] = lambda row: None,
) -> list[Sample]:
    """Every row on every problem, in turns whose order rotates; ``clients`` by what their servers have changed.

    ``answered`` is called behind each turn.
    """
    samples = []
    for index, problem, row in in_turns(rows, questions, "rows in turn", console):
        samples.append(ask(clients[row.change], row, problem, index)[0])
        answered(row)
    return samples
