"""A bound on how long a client may keep us from writing, cheap where it hardly ever does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


class Patience:
    """A limit of each of many waits, one after the other, of one task.

    `asyncio.timeout` sets and cancels a timer for each wait, which costs a stream more than wording
    a token does. Here one timer stands for all of them: when it rings it looks since when there has
    been a wait, and is set anew for what is left.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._since_s: float | None = None  # when the wait began that is on
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    async def wait[T](self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises TimeoutError where it takes longer; `work` is cancelled."""
        if self._timer is None:
            self._task = asyncio.current_task()
            self._timer = self._loop.call_later(self._limit_s, self._ring)
        self._since_s = self._loop.time()
        try:
            return await work
        except asyncio.CancelledError:
            # As in asyncio.timeout: a cancellation from elsewhere is not ours to swallow.
            if self._expired and self._task is not None and not self._task.uncancel():
                raise TimeoutError from None
            raise
        finally:
            self._since_s = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._since_s is None:  # the next wait sets it
            return
        ends_s = self._since_s + self._limit_s
        if self._loop.time() < ends_s:
            self._timer = self._loop.call_at(ends_s, self._ring)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()
