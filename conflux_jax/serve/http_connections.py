"""A connection of the HTTP server: for how long it may keep a request unfinished.

A client that sends a byte now and then, or none at all, would otherwise hold a connection, and once
its head is there a place among `max_streams`, for ever, at no cost of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes itself where a request is not whole, head and body, `read_timeout_s` after the
    connection was made or after the request's first byte came."""

    def __init__(self, read_timeout_s: float, **given: Any):
        super().__init__(**given)
        self._read_timeout_s = read_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(self._is_unfinished)

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no request. Nothing else can be said after it: a call that these bytes
        belong to, as a chunk of its body, hears that its client is gone."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """What came behind the request is looked at now."""
        super().on_response_complete()
        self._watch(self._is_unfinished and not self.transport.is_closing())

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        super().connection_lost(exc)

    @property
    def _is_unfinished(self) -> bool:
        state = self.conn.their_state
        head_has_begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        return head_has_begun or state is h11.SEND_BODY

    def _watch(self, unfinished: bool) -> None:
        if unfinished and self._timer is None:
            self._timer = self.loop.call_later(self._read_timeout_s, self._cut)
        elif not unfinished and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        """A call that waits for its body hears that its client is gone."""
        self.transport.abort()


def connections(read_timeout_s: float) -> Callable[..., Connection]:
    """What makes them, for uvicorn."""

    def make(**given: Any) -> Connection:
        return Connection(read_timeout_s, **given)

    return make
