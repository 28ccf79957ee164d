"""One engine call on behalf of a verdict, bounded in time."""

from __future__ import annotations

import asyncio

from lr_backend.engine import Engine, EngineCall, Generation
from lr_backend.errors import EngineError
from lr_backend.verify.verdict import Reason


async def ask(engine: Engine, call: EngineCall, *, timeout_s: float | None, on_error: Reason) -> Generation | Reason:
    """The engine's answer, or why there is none: :attr:`Reason.TIMEOUT` or ``on_error``. None as the limit waits."""
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.generate(call)
    except TimeoutError:
        return Reason.TIMEOUT
    except EngineError:
        return on_error
