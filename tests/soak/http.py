"""HTTP/1.1 by hand: quick enough for a storm, and able to do what no client library would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # whatever state it is in


def request_bytes(body: bytes, path: str = COMPLETIONS, length: int | None = None) -> bytes:
    """length: what the header says, where that is not the truth."""
    size = len(body) if length is None else length
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def exchange(port: int, body: bytes, path: str = COMPLETIONS) -> tuple[int, bytes]:
    """Status and body of an answer that is read to its end."""
    async with connection(port) as (reader, writer):
        writer.write(request_bytes(body, path))
        return parse(await reader.read())


async def get(port: int, path: str) -> tuple[int, bytes]:
    async with connection(port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return parse(await reader.read())


def parse(answer: bytes) -> tuple[int, bytes]:
    """Raises ValueError for what is no whole answer."""
    head, separator, rest = answer.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError(f"no answer: {answer[:100]!r}")
    lines = head.decode().lower().split("\r\n")
    if "transfer-encoding: chunked" in lines:
        rest = unchunked(rest)
    return int(lines[0].split()[1]), rest


def unchunked(data: bytes) -> bytes:
    parts = []
    while True:
        size, separator, data = data.partition(b"\r\n")
        if not separator:
            raise ValueError("the answer was cut off")
        if not (count := int(size, 16)):
            return b"".join(parts)
        parts.append(data[:count])
        data = data[count + 2 :]


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Of a whole stream of server-sent events."""
    *events, done, end = stream.decode().split("\n\n")
    if (done, end) != ("data: [DONE]", ""):
        raise ValueError(f"the stream ends with {done[-100:]!r}")
    return [json.loads(event.removeprefix("data: ")) for event in events]
