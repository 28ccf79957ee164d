"""One engine call on behalf of a verdict, bounded in time."""

from __future__ import annotations

import asyncio

from lr_backend.engine import Engine, EngineCall, Generation
from lr_backend.errors import EngineError, EngineRejected
from lr_backend.verify.verdict import Reason


async def ask(engine: Engine, call: EngineCall, *, timeout_s: float | None, on_error: Reason) -> Generation | Reason:
    """The engine's answer, or why there is none: :attr:`Reason.TIMEOUT`, :attr:`Reason.CAPPED` where the engine refuses what it
    is asked as too long, or ``on_error``. None as the limit waits."""
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.generate(call)
    except TimeoutError:
        return Reason.TIMEOUT
    except EngineRejected:
        return Reason.CAPPED
    except EngineError:
        return on_error
