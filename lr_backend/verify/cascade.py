"""Cheap stages first: each accepts, rejects or passes the pair on; a verifier decides what is left.

same text -> accept    numbers differ -> reject    else -> judge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lr_backend.verify.numeric import veto
from lr_backend.verify.verdict import Reason, StepPair, Verdict, Verifier

Stage = Callable[[StepPair], Verdict | None]
"""One look at a pair: its verdict, or None where it is undecided."""
_UNREADABLE = "\ufffd"
"""What a tokenizer writes for bytes that are no character, as where a step was cut inside one."""
_QUOTES = frozenset("\"'`")


def same_text(pair: StepPair) -> Verdict | None:
    """Accepts the same words with other white space: tokens can cut one text in several ways. Rejects them where a line is
    indented in another way, which is another program, and where a part cannot be read, whose bytes may be any. White space
    within quotes may be what a program is about, so there it is not decided."""
    target, drafted = _lines(pair.target_text), _lines(pair.drafted_text)
    if [words for _, words in target] != [words for _, words in drafted]:
        return None
    accepted = target == drafted and _UNREADABLE not in pair.target_text
    if accepted and not _QUOTES.isdisjoint(pair.target_text) and _inner(pair.target_text) != _inner(pair.drafted_text):
        return None
    return Verdict(accepted, Reason.SAME_TEXT if accepted else Reason.DIFFERENT, verifier="same_text")


def _lines(text: str) -> list[tuple[str, list[str]]]:
    """Of each line that is not blank: how it is indented, and its words. A single blank before all is none: tokens begin so."""
    lines = [line for line in text.splitlines() if line.strip()]
    indented = [line[: len(line) - len(line.lstrip())] for line in lines]
    if indented[:1] == [" "]:
        indented[0] = ""
    return [(indent, line.split()) for indent, line in zip(indented, lines, strict=True)]


def _inner(text: str) -> list[str]:
    """Its lines, without white space around them or around all."""
    return [line.strip() for line in text.strip().splitlines()]


def numeric_veto(pair: StepPair) -> Verdict | None:
    """Rejects what :func:`~lr_backend.verify.numeric.veto` rejects; never accepts."""
    differs = veto(pair.target_text, pair.drafted_text)
    return None if differs is None else Verdict(False, Reason.NUMBERS, verifier="numbers")


@dataclass(frozen=True)
class CascadeVerifier:
    """The first stage that decides gives the verdict. ``last`` decides what no stage did."""

    stages: Sequence[Stage]
    last: Verifier

    async def verify(self, pair: StepPair) -> Verdict:
        for stage in self.stages:
            if (verdict := stage(pair)) is not None:
                return verdict
        return await self.last.verify(pair)
