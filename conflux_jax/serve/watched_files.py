"""What is made of files and made anew when they change: certificates, keys, tokens.

Files are looked at when what they hold is wanted, a `stat` each, so that nothing has to be told of
a change; a mount that swaps a link, as Kubernetes' secrets do, is one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from conflux_jax.config import ConfigError

LOGGER = logging.getLogger(__name__)
READ_TRIES = 3

_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles[T]:
    """`load()` of these files, as they are now. Safe to use from any thread.

    load: raises ConfigError or OSError, which the constructor passes on. Later the value before
    stays, and the log says why: a file that is half written must not end a service.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], T]):
        self._paths, self._load = tuple(paths), load
        self._lock = threading.Lock()
        self._stamp, self._value = self._read()

    def current(self) -> T:
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return self._value
            try:
                self._stamp, self._value = self._read()
            except (ConfigError, OSError) as error:
                self._stamp = stamp  # one line in the log for each change
                LOGGER.error("kept what was read before: %s", error)
            else:
                LOGGER.info("read again: %s", ", ".join(self._paths))
            return self._value

    def _read(self) -> tuple[_Stamp, T]:
        """The value, and the state of the files that it is of: the same before and after, so that
        it is made of one state of all of them."""
        for _ in range(READ_TRIES):
            stamp = self._look()
            value = self._load()
            if self._look() == stamp:
                return stamp, value
        raise ConfigError(f"{', '.join(self._paths)}: changed while they were read")

    def _look(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
