"""A text while somebody writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class GrowingText:
    """Token ids that become more, until the text is done. Read and written in one event loop."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.done = False
        self._changed = asyncio.Event()

    def extend(self, ids: Sequence[int]) -> None:
        """More of it."""
        self.ids.extend(ids)
        self._tell()

    def end(self) -> None:
        """There will be no more."""
        self.done = True
        self._tell()

    def agrees(self, written: Sequence[int]) -> bool:
        """As far as both go, they are the same."""
        num = min(len(written), len(self.ids))
        return self.ids[:num] == list(written[:num])

    async def has(self, num: int) -> None:
        """Wait until it has so many tokens, or is done."""
        while not self.done and len(self.ids) < num:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
