"""A progress bar on a terminal, a few lines in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30
LOGGED_SHARE = 0.25  # a log gets a line at each quarter


class ProgressBar:
    """Called as `bar(stage, done, total)`; a stage ends when all of it is done."""

    def __init__(self, output: TextIO = sys.stderr):
        self._output = output
        self._stage = ""
        self._started_s = 0.0
        self._next_logged = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage, self._started_s, self._next_logged = stage, time.monotonic(), 0.0
        share = done / max(total, 1)
        elapsed_s = time.monotonic() - self._started_s
        line = f"{stage:<8} {done}/{total}  {elapsed_s:.1f} s"
        if self._output.isatty():
            filled = int(WIDTH * share)
            bar = "#" * filled + "." * (WIDTH - filled)
            end = "\n" if done == total else ""
            self._output.write(f"\r{stage:<8} [{bar}] {done}/{total}  {elapsed_s:.1f} s{end}")
        elif share >= self._next_logged:
            self._next_logged = min(share + LOGGED_SHARE, 1.0) if share < 1 else 2.0
            self._output.write(line + "\n")
        self._output.flush()
