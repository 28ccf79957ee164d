"""The step loop's side of :mod:`lr_backend.notice`: looks what the launcher says, and acts on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import structlog

from lr_backend.notice import Notice, drained_file, read

LOOK_S = 0.1
log = structlog.get_logger()


class Drains(Protocol):
    """Takes no new requests once told so."""

    draining: bool
    num_in_flight: int


class Mortal(Protocol):
    """An engine whose process may die."""

    def has_died(self, why: str) -> None: ...

    def is_back(self) -> None: ...


async def heed(path: Path, service: Drains, engines: Mapping[str, Mortal], look_s: float = LOOK_S) -> None:
    """Act on notices, for as long as the event loop runs."""
    seen = Notice()
    while True:
        notice = read(path)
        for model in notice.dead - seen.dead:
            log.warning("engine_died", model=model)
            if model in engines:
                engines[model].has_died(f"the process of {model} has died")
        for model in seen.dead - notice.dead:
            log.info("engine_is_back", model=model)
            if model in engines:
                engines[model].is_back()
        service.draining = notice.draining
        if notice.draining and service.num_in_flight == 0:
            drained_file(path).touch()
        seen = notice
        await asyncio.sleep(look_s)
