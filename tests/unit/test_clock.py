"""Time limits: what runs within one and is cancelled knows whether that is why."""

from __future__ import annotations

import asyncio

import pytest

from lr_backend.clock import is_late, time_limit
from lr_backend.testing import run_virtual


async def wait(told: list[bool]) -> None:
    try:
        await asyncio.sleep(100.0)
    except asyncio.CancelledError:
        told.append(is_late())
        raise


def test_what_a_time_limit_ends_is_late_with_all_that_it_has_started() -> None:
    told: list[bool] = []

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with time_limit(1.0):
                await asyncio.gather(wait(told), wait(told))
        assert not is_late()

    run_virtual(main())
    assert told == [True, True]


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_what_is_cancelled_before_its_time_is_up_is_not_late(seconds: float | None) -> None:
    told: list[bool] = []

    async def limited() -> None:
        async with time_limit(seconds):
            await wait(told)

    async def main() -> None:
        task = asyncio.create_task(limited())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert told == [False]
