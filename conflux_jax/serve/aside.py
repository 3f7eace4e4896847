"""A thread beside those that prompts are prepared on, for work that may take minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Aside:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "conflux-aside")

    async def run[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises, once its turn has come."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """What is under way goes on to its end; what waits is cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
