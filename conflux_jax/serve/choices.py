"""A call's choices: one request of the engine for each, and the way of their outputs to its client.

Choice k of a prompt is decoded with the seed + k, so the first one is drawn as the prompt alone
would be, whatever else the engine runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from conflux_jax.engine import Engine
from conflux_jax.request import InvalidRequest, Request
from conflux_jax.streams import OutputDelta, OutputStream

MAX_N = 128


@dataclass(frozen=True)
class Choices:
    """The requests of a call, by index. id: what its client calls all of them together."""

    id: str
    requests: tuple[Request, ...]


def choices_of(request: Request, n: int) -> Choices:
    """`n` choices of one prompt: the request itself or, of several, each with its number in its id.
    Raises InvalidRequest."""
    if not 1 <= n <= MAX_N:
        raise InvalidRequest("n", f"must be between 1 and {MAX_N}, got {n}")
    if n == 1:
        return Choices(request.request_id, (request,))
    base = request.request_id
    return Choices(
        base,
        tuple(
            dataclasses.replace(request, request_id=f"{base}-{k}", seed=nth_seed(request.seed, k))
            for k in range(n)
        ),
    )


def nth_seed(seed: int, k: int) -> int:
    """seed + k, as a signed number of 64 bits."""
    return (seed + k + 2**63) % 2**64 - 2**63


class Calls:
    """The calls under way, so that one with several choices can be aborted by its own id.

    max_unread: see `Engine.submit`."""

    def __init__(self, max_unread: int | None = None) -> None:
        self._max_unread = max_unread
        self._ids: dict[str, tuple[str, ...]] = {}  # of the choices, by the call's

    @contextlib.asynccontextmanager
    async def open(self, engine: Engine, choices: Choices) -> AsyncIterator[Outputs]:
        """Queue all of a call or, where one is refused, none; in the end, cancel what is left."""
        outputs = Outputs(await submit_all(engine, choices.requests, self._max_unread))
        if len(choices.requests) > 1:
            self._ids[choices.id] = tuple(request.request_id for request in choices.requests)
        try:
            yield outputs
        finally:
            self._ids.pop(choices.id, None)
            outputs.close()

    async def abort(self, engine: Engine, request_id: str) -> bool:
        """End a call, or one of its choices; False where there is none such (any more)."""
        ids = (request_id, *self._ids.get(request_id, ()))
        found = await asyncio.gather(*(asyncio.wrap_future(engine.abort(name)) for name in ids))
        return any(found)


async def submit_all(
    engine: Engine, requests: Sequence[Request], max_unread: int | None = None
) -> list[OutputStream]:
    """Queue all of a call's requests or, where one is refused, none: those that were taken are
    cancelled, and the first refusal is raised. max_unread: see `Engine.submit`."""
    results = await asyncio.gather(
        *(engine.submit(request, max_unread) for request in requests), return_exceptions=True
    )
    streams = [result for result in results if isinstance(result, OutputStream)]
    for result in results:
        if isinstance(result, BaseException):
            for stream in streams:
                stream.close()
            raise result
    return streams


class Outputs:
    """What several requests give, as (index, delta) in the order in which it comes. Ends after the
    last of them has; `close` cancels those that have not."""

    def __init__(self, streams: Sequence[OutputStream]):
        self._streams = streams
        self._left = len(streams)
        self._queue: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue(len(streams))
        self._readers: list[asyncio.Task[None]] = []
        if len(streams) > 1:
            self._readers = [
                asyncio.create_task(self._read(index, stream))
                for index, stream in enumerate(streams)
            ]

    async def _read(self, index: int, stream: OutputStream) -> None:
        async for delta in stream:
            await self._queue.put((index, delta))

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if not self._left:
            raise StopAsyncIteration
        item = await self._queue.get() if self._readers else (0, await anext(self._streams[0]))
        self._left -= item[1].finish_reason is not None
        return item

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for stream in self._streams:
            stream.close()
