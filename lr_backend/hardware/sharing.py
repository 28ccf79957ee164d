"""Engines that share cards: how much each slows the others down.

With CUDA MPS the kernels of all run at once, and each waits for those of the others that are on the card already. Without it
processes take turns, a slice each, and every change costs time. Both laws were measured on an H200 (``python -m bench card``).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from lr_backend.errors import ConfigError
from lr_backend.hardware.overheads import MPS_OVERLAP, TIME_SLICE_SWITCH_SHARE


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine asks of its cards in an iteration.

    Attributes:
        share: of the time that the iteration takes alone, in which the card computes; of cores that are shared, how much of them.
        kernel_s: mean time of the kernels of one layer, alone.
    """

    share: float
    kernel_s: float = 0.0


IDLE = Demand(0.0)
Law = Callable[[Demand, Sequence[Demand]], float]
"""(what an engine asks, what each other engine that is busy asks) -> how much longer it takes than alone."""


def waiting_for_kernels(own: Demand, others: Sequence[Demand]) -> float:
    """CUDA MPS: a kernel waits for the other's that runs, but never for long: blocks of both take turns on the card."""
    ratios = [(other.share, other.kernel_s / own.kernel_s) for other in others] if own.kernel_s else []
    return 1.0 + own.share * sum(share * ratio / (1.0 + MPS_OVERLAP.value * ratio) for share, ratio in ratios)


def taking_turns(own: Demand, others: Sequence[Demand]) -> float:
    """Time slices: each process has the card to itself for a while."""
    if not others:
        return 1.0
    busy = sum(other.share for other in others)
    return 1.0 + own.share * (busy + TIME_SLICE_SWITCH_SHARE.value * (1.0 + busy))


def adding_up(own: Demand, others: Sequence[Demand]) -> float:
    """Cores: each has what it asks for until there are no more, and then all slow down in proportion."""
    return max(1.0, own.share + sum(other.share for other in others))


class CardSharing(StrEnum):
    """What runs on a card that several processes use."""

    MPS = "mps"
    TIME_SLICES = "time_slices"


LAWS: Mapping[CardSharing, Law] = {CardSharing.MPS: waiting_for_kernels, CardSharing.TIME_SLICES: taking_turns}


class Board:
    """A small file on which the engines of some processes tell one another what they ask of their cards just now.

    Each writes its own place and reads all. Nobody needs a lock: what is read while it is written is wrong for one look.
    """

    _DEMAND = struct.Struct("=dd")

    def __init__(self, path: Path, own_place: int, cards: Sequence[Iterable[int]], sharing: CardSharing) -> None:
        """Args: cards: of every place, those that its engine runs on.

        Raises:
            ConfigError: the file cannot be written.
        """
        size = len(cards) * self._DEMAND.size
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(handle, size)
                self._memory = mmap.mmap(handle, size)
            finally:
                os.close(handle)
        except OSError as error:
            raise ConfigError(f"the file {path} on which engines share cards cannot be written: {error.strerror}") from error
        self._own = own_place
        self._cards = [frozenset(those) for those in cards]
        self._law = LAWS[sharing]
        self.write(IDLE)

    def write(self, demand: Demand) -> None:
        """Say what this engine asks of its cards from now on; nothing while it is idle."""
        self._DEMAND.pack_into(self._memory, self._own * self._DEMAND.size, demand.share, demand.kernel_s)

    def slowdown(self) -> float:
        """How much longer this engine takes just now: as on the busiest of its cards."""
        demands = [Demand(*numbers) for numbers in self._DEMAND.iter_unpack(self._memory[:])]
        asked = list(zip(demands, self._cards, strict=True))
        busy = [one for place, one in enumerate(asked) if place != self._own and one[0].share]
        return max(
            self._law(demands[self._own], [demand for demand, cards in busy if card in cards]) for card in self._cards[self._own]
        )

    def close(self) -> None:
        self.write(IDLE)
        self._memory.close()

    @classmethod
    def of(cls, path: Path, own: str, cards: Mapping[str, Iterable[int]], sharing: CardSharing) -> Self:
        """The board on which the engine ``own`` has a place among those of ``cards``."""
        return cls(path, list(cards).index(own), list(cards.values()), sharing)
