"""The step loop's side of :mod:`lr_backend.notice`: looks whose process has died, and tells its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import structlog

from lr_backend.notice import Seat, read

LOOK_S = 0.1
log = structlog.get_logger()


class Mortal(Protocol):
    """An engine whose process may die."""

    def has_died(self, why: str) -> None: ...

    def is_back(self) -> None: ...


async def heed(path: Path, engines: Mapping[str, Mortal], seat: Seat, look_s: float = LOOK_S) -> None:
    """Act on notices, for as long as the event loop runs, and have the launcher see that it does."""
    seen: frozenset[str] = frozenset()
    is_read = True
    while True:
        seat.beat()
        try:
            dead, is_read = read(path), True
        except OSError as error:  # what was said before still holds
            if is_read:
                log.warning("notices_unread", error=str(error))
            dead, is_read = seen, False
        for model in dead - seen:
            log.warning("engine_died", model=model)
            if model in engines:
                engines[model].has_died(f"the process of {model} has died")
        for model in seen - dead:
            log.info("engine_is_back", model=model)
            if model in engines:
                engines[model].is_back()
        seen = dead
        await asyncio.sleep(look_s)
