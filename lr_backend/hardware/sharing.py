"""Engines that share cards: how much each slows the others down.

With CUDA MPS the kernels of all run at once: what they ask of the card adds up, and beyond one card all slow down in proportion.
Without it they take turns, a slice each, and every change costs time. The two are bounds of what a real card does.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Self

from lr_backend.errors import ConfigError
from lr_backend.hardware.overheads import TIME_SLICE_SWITCH_SHARE


class CardSharing(StrEnum):
    """What runs on a card that several processes use."""

    MPS = "mps"
    TIME_SLICES = "time_slices"


def slowdown(demands: Iterable[float], sharing: CardSharing) -> float:
    """How much longer everything on a card takes than alone.

    Args:
        demands: of each engine that is busy on it, what it would use of the card alone, above 0 and at most 1.
    """
    busy = [demand for demand in demands if demand > 0.0]
    if sharing is CardSharing.MPS or len(busy) < 2:
        return max(1.0, sum(busy))
    return len(busy) * (1.0 + TIME_SLICE_SWITCH_SHARE.value)


class Board:
    """A small file on which the engines of some processes tell one another what they ask of their cards just now.

    Each writes its own place and reads all; a number is written at once, so that nobody needs a lock.
    """

    _NUMBER = struct.Struct("=d")

    def __init__(self, path: Path, own_place: int, cards: Sequence[Iterable[int]], sharing: CardSharing) -> None:
        """Args: cards: of every place, those that its engine runs on.

        Raises:
            ConfigError: the file cannot be written.
        """
        size = len(cards) * self._NUMBER.size
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
        self._sharing = sharing
        self.write(0.0)

    def write(self, demand: float) -> None:
        """Say what this engine asks of its cards from now on; 0 while it is idle."""
        self._NUMBER.pack_into(self._memory, self._own * self._NUMBER.size, demand)

    def slowdown(self) -> float:
        """How much longer this engine takes just now: as on the busiest of its cards."""
        demands = [demand for (demand,) in self._NUMBER.iter_unpack(self._memory[:])]
        return max(
            slowdown((demand for demand, cards in zip(demands, self._cards, strict=True) if card in cards), self._sharing)
            for card in self._cards[self._own]
        )

    def close(self) -> None:
        self.write(0.0)
        self._memory.close()

    @classmethod
    def of(cls, path: Path, own: str, cards: Mapping[str, Iterable[int]], sharing: CardSharing) -> Self:
        """The board on which the engine ``own`` has a place among those of ``cards``."""
        return cls(path, list(cards).index(own), list(cards.values()), sharing)
