"""The settings that are compared, and in which order the problems meet them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lr_client import Options

from bench.evaluation.errors import EvaluationError
from bench.evaluation.records import Key
from bench.kit.turns import rotated
from lr_backend.errors import InvalidRequest
from lr_backend.request import LookaheadRequest, Mode

RESERVED = ("text_input", "messages", "seed", "stream", "trace", "mode", "max_tokens", "temperature")
"""Request fields that the evaluation sets itself, or that have options of their own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One setting: a name, and the request fields that make it."""

    name: str
    fields: Mapping[str, Any]

    def options(self, seed: int, *, trace: bool) -> Options:
        return Options(**self.fields, seed=seed, stream=False, trace=trace or None)

    def request(self, defaults: Mapping[str, Any] | None = None) -> LookaheadRequest:
        """The whole request, with a deployment's defaults where they are known."""
        return LookaheadRequest.parse({**(defaults or {}), **self.fields, "text_input": "-"})


def turns(modes: Sequence[str], verifiers: Sequence[str], common: Mapping[str, Any]) -> tuple[Turn, ...]:
    """One turn a mode; modes that speculate by steps have one for each verifier, by the name that the server knows it by.

    Raises:
        EvaluationError: an unknown mode, or a field out of its range.
    """
    found: list[Turn] = []
    for mode in modes:
        if mode not in tuple(Mode):
            raise EvaluationError(f"no mode {mode!r}: there are {', '.join(Mode)}")
        choices = verifiers if Mode(mode).speculates_steps and verifiers else ("",)
        for choice in choices:
            fields = {**common, "mode": mode, **({"verifier": choice} if choice else {})}
            found.append(Turn(f"{mode} {choice}".strip(), fields))
    names = [turn.name for turn in found]
    if not names or len(set(names)) < len(names):
        raise EvaluationError(f"modes and verifiers must be there and differ: {', '.join(names) or 'none given'}")
    for turn in found:
        try:
            turn.request()
        except InvalidRequest as error:
            raise EvaluationError(f"{turn.name}: {error.message}") from None
    return tuple(found)


def option_fields(given: Sequence[str]) -> dict[str, Any]:
    """Request fields given as ``name=value``. Raises EvaluationError for what is no field, or is set elsewhere."""
    fields: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in LookaheadRequest.model_fields:
            raise EvaluationError(f"--option {text!r}: give name=value, with a field of the request (docs/api.md)")
        if name in RESERVED:
            raise EvaluationError(f"--option {text!r}: {name} is set by the evaluation")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def seed_of(run_seed: int, key: Key) -> int:
    """The seed of one request. No two turns share one: they would write the same text and find it in each other's KV cache."""
    digest = hashlib.sha256(f"{run_seed}/{key.task}/{key.turn}/{key.sample}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def rounds(task_ids: Sequence[str], names: Sequence[str], num_samples: int, concurrency: int) -> Iterator[list[Key]]:
    """The requests that may be in flight together, in order; the next ones start when all of these have ended.

    A round is of one turn, so that no setting slows another down, and holds as many requests as may be in flight. For each group
    of requests (at concurrency 1, for each) the turns rotate.
    """
    asked = [(task, sample) for task in task_ids for sample in range(num_samples)]
    for number, start in enumerate(range(0, len(asked), concurrency)):
        group = asked[start : start + concurrency]
        for name in rotated(names, number):
            yield [Key(task, name, sample) for task, sample in group]
