"""Commands from any thread to the one that serves them."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


class Unavailable(RuntimeError):
    """The engine takes no requests: it drains, is closed or has failed."""


@dataclass(frozen=True, slots=True)
class _Command:
    action: Callable[[], Any]
    reply: Future[Any]


class Inbox:
    """Actions to run on the serving thread, each with a reply for its poster."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant: it may be called from a __del__ in the midst of anything.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._refusal: str | None = None

    def post(self, action: Callable[[], Any]) -> Future[Any]:
        """Run `action` soon; the future gets its result or exception, or Unavailable."""
        reply: Future[Any] = Future()
        self._commands.put(_Command(action, reply))
        if self._refusal is not None:
            self._refuse_all()
        return reply

    def drop(self, action: Callable[[], Any]) -> None:
        """Run `action` soon, if anyone still serves. Safe at any point of any thread."""
        self._commands.put(_Command(action, Future()))

    def serve(self, block: bool, woken: Callable[[], None]) -> None:
        """Run all that was posted; with `block`, wait for something to be, and call `woken`."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=block)
                if block:
                    woken()
                block = False
                if not command.reply.set_running_or_notify_cancel():
                    continue  # its poster has given up
                try:
                    command.reply.set_result(command.action())
                except Exception as error:
                    command.reply.set_exception(error)

    def close(self, reason: str) -> None:
        """Wake the serving thread and refuse everything from now on. Callable from any thread."""
        self._refusal = reason
        self._refuse_all()
        self.drop(lambda: None)

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command.reply.set_running_or_notify_cancel():
                    command.reply.set_exception(Unavailable(self._refusal))
