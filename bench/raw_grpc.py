"""A gRPC client that costs next to nothing: HTTP/2 frames by hand, kept as they come, with a window
that never closes. What a client library does would be measured as the server's on a shared machine.

Frames are those of RFC 9113; headers are written as literals (RFC 7541, 6.2.2) and never read: how
a stream went, its messages say.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 4
LARGEST_WINDOW, FIRST_WINDOW = 2**31 - 1, 65_535
HEAD_BYTES = 9


class RawCalls(asyncio.Protocol):
    """Calls of one method on one connection. `ended` is done once all of them are, and fails with
    RuntimeError where one is reset or the connection goes. received: of each call, its bytes."""

    def __init__(self, path: str, requests: Sequence[bytes]):
        self._path, self._requests = path, requests
        self._buffer = bytearray()
        self._left = len(requests)
        self.received = [bytearray() for _ in requests]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        more = struct.pack(">I", LARGEST_WINDOW - FIRST_WINDOW)
        transport.write(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more)
        )
        for index, request in enumerate(self._requests):
            stream = 2 * index + 1
            message = struct.pack(">BI", 0, len(request)) + request
            transport.write(frame(HEADERS, END_HEADERS, stream, headers(self._path)))
            transport.write(frame(DATA, END_STREAM, stream, message))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= HEAD_BYTES:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self._buffer, at)
            end = at + HEAD_BYTES + (high << 16 | low)
            if end > len(self._buffer):
                break
            self._take(kind, flags, stream, self._buffer[at + HEAD_BYTES : end])
            at = end
        del self._buffer[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind == DATA:
            self.received[stream // 2] += payload
        elif kind in (SETTINGS, PING) and not flags & ACK:
            answer = bytes(payload) if kind == PING else b""
            self._transport.write(frame(kind, ACK, 0, answer))
        elif kind in (RST_STREAM, GOAWAY):
            self._end(f"the server sent a frame of type {kind}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self._left -= 1
            if not self._left:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was lost")

    def _end(self, problem: str | None) -> None:
        if self.ended.done():
            return
        if problem is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(RuntimeError(problem))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def headers(path: str) -> bytes:
    """Of a call; no name or value has more than 126 bytes."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "bench",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def messages_of(received: bytes | bytearray) -> Iterator[bytes]:
    """The messages of a stream; each has a byte of flags and its length before it."""
    at = 0
    while at < len(received):
        (size,) = struct.unpack_from(">I", received, at + 1)
        yield bytes(received[at + 5 : at + 5 + size])
        at += 5 + size
