"""Notices an engine whose thread is stuck or gone.

The thread says when it begins something and when it only waits for work: idle is not stalled. How
long is too long follows from what it does: `FACTOR` times the longest iteration so far, or the
predicted one under way, but never less than a floor. There are two floors, because taking an engine
for dead costs every request that it has: past the first it is *suspect*, which health shows and
which passes if it goes on; past the second it has failed for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FACTOR = 10.0
SUSPECT_S = 5.0  # no shorter pause is held against an engine
MAX_PERIOD_S = 0.5  # between two looks


class Watchdog:
    """Calls `on_stall(message)` once, on a thread of its own.

    limit_s: the second floor; the first is SUSPECT_S or this, if it is less. is_alive: whether the
    watched thread is. is_excused: whether what it does now may take any time (a compilation).
    """

    def __init__(
        self,
        limit_s: float,
        clock: Callable[[], float],
        is_alive: Callable[[], bool],
        is_excused: Callable[[], bool],
        on_stall: Callable[[str], None],
    ):
        self._floor_s, self._clock = limit_s, clock
        self._is_alive, self._is_excused, self._on_stall = is_alive, is_excused, on_stall
        self._since_s: float | None = None
        self._longest_s = 0.0
        self._expected_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="conflux-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def join(self) -> None:
        self._thread.join()

    # The watched thread says:

    def busy(self) -> None:
        """It begins something: the time runs from now on."""
        self._since_s = self._clock()

    def woken(self) -> None:
        """It has waited for work, and there is some; what was begun before still counts."""
        if self._since_s is None:
            self._since_s = self._clock()

    def idle(self) -> None:
        self._since_s = None

    def launched(self, predicted_s: float) -> None:
        self._expected_s = predicted_s

    def collected(self, elapsed_s: float) -> None:
        self._longest_s = max(self._longest_s, elapsed_s)

    # Anyone may ask:

    @property
    def is_suspect(self) -> bool:
        """Whether the thread takes longer than it ever should."""
        likely_s = FACTOR * max(self._longest_s, self._expected_s)
        return self._stuck_s() > min(self._limit_s, max(SUSPECT_S, likely_s))

    @property
    def _limit_s(self) -> float:
        return max(self._floor_s, FACTOR * max(self._longest_s, self._expected_s))

    def _stuck_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None or self._is_excused() else self._clock() - since_s

    def _watch(self) -> None:
        while not self._over.wait(min(self._floor_s / 4, MAX_PERIOD_S)):
            if self._since_s is not None and self._is_excused():
                self.busy()
            if not self._is_alive():
                self._on_stall("its thread has ended")
            elif self._stuck_s() > self._limit_s:
                self._on_stall(f"no progress for {self._limit_s:g} s")
