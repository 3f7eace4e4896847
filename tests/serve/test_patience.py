"""One timer for many waits: each has its whole limit, and none more."""

from __future__ import annotations

import asyncio
import time

import pytest

from conflux_jax.serve.patience import Patience

LIMIT_S = 0.2


async def test_many_waits_may_take_longer_than_one():
    patience, started_s = Patience(LIMIT_S), time.monotonic()
    for number in range(8):
        assert await patience.wait(asyncio.sleep(LIMIT_S / 4, number)) == number
    assert time.monotonic() - started_s > LIMIT_S
    patience.close()


@pytest.mark.parametrize("before_s", [0.0, LIMIT_S / 2, LIMIT_S * 1.5])
async def test_a_wait_has_its_limit_from_its_own_beginning(before_s: float):
    """Wherever the timer stands then."""
    patience, never = Patience(LIMIT_S), asyncio.get_running_loop().create_future()
    await patience.wait(asyncio.sleep(0))
    await asyncio.sleep(before_s)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await patience.wait(never)
    assert LIMIT_S * 0.95 < time.monotonic() - started_s < LIMIT_S * 8
    assert never.cancelled()
    await asyncio.sleep(0)  # the task goes on, with nothing left of it
    patience.close()


async def test_who_is_cancelled_from_elsewhere_is_cancelled():
    patience = Patience(LIMIT_S)
    task = asyncio.create_task(patience.wait(asyncio.sleep(60)))
    await asyncio.sleep(LIMIT_S / 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    patience.close()
    await asyncio.sleep(LIMIT_S * 1.5)  # its timer is no more
