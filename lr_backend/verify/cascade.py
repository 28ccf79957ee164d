"""Cheap stages first: each accepts, rejects or passes the pair on; a verifier decides what is left.

same text -> accept    numbers differ -> reject    else -> judge
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lr_backend.verify.numeric import veto
from lr_backend.verify.verdict import Reason, StepPair, Verdict, Verifier


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one stage makes of a pair. ``accepted`` None: undecided."""

    accepted: bool | None
    reason: Reason


class Stage(Protocol):
    """One look at a pair. Never raises but for cancellation; a failure is undecided, never accepted."""

    @property
    def name(self) -> str: ...

    async def consider(self, pair: StepPair) -> Opinion: ...


class SameText:
    """Accepts the same words with other white space: tokens can cut one text in several ways. Rejects them where a line is
    indented in another way: that is another program."""

    name = "same_text"

    async def consider(self, pair: StepPair) -> Opinion:
        target, drafted = _lines(pair.target_text), _lines(pair.drafted_text)
        if [words for _, words in target] != [words for _, words in drafted]:
            return Opinion(None, Reason.SAME_TEXT)
        return Opinion(True, Reason.SAME_TEXT) if target == drafted else Opinion(False, Reason.DIFFERENT)


def _lines(text: str) -> list[tuple[str, list[str]]]:
    """Of each line that is not blank: how it is indented, and its words. A single blank is none: tokens may begin with it."""
    lines = [line for line in text.splitlines() if line.strip()]
    indented = [line[: len(line) - len(line.lstrip())] for line in lines]
    return [("" if indent == " " else indent, line.split()) for indent, line in zip(indented, lines, strict=True)]


class NumericVeto:
    """Rejects what :func:`~lr_backend.verify.numeric.veto` rejects; never accepts."""

    name = "numbers"

    async def consider(self, pair: StepPair) -> Opinion:
        differs = veto(pair.target_text, pair.drafted_text)
        return Opinion(None if differs is None else False, Reason.NUMBERS)


@dataclass(frozen=True)
class CascadeVerifier:
    """The first stage that decides is the verdict; its name goes with it. ``last`` decides what no stage did."""

    stages: Sequence[Stage]
    last: Verifier

    async def verify(self, pair: StepPair) -> Verdict:
        for stage in self.stages:
            opinion = await stage.consider(pair)
            if opinion.accepted is not None:
                return Verdict(opinion.accepted, opinion.reason, verifier=stage.name)
        return await self.last.verify(pair)
