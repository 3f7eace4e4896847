"""The way of a call's outputs to its HTTP client, and the end of it when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conflux_jax.engine import Engine, EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import FinishReason, Request
from conflux_jax.serve.http_errors import EXPECTED_ERRORS, error_object, to_json
from conflux_jax.serve.openai_requests import Call
from conflux_jax.serve.openai_responses import Answer, Usage, envelope, joined
from conflux_jax.streams import OutputDelta, OutputStream


async def submit_all(engine: Engine, requests: Sequence[Request]) -> list[OutputStream]:
    """Queue all of a call's requests or, where one is refused, none: those that were taken are
    cancelled, and the first refusal is raised."""
    results = await asyncio.gather(
        *(engine.submit(request) for request in requests), return_exceptions=True
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


async def reply(call: Call, answer: Answer, outputs: Outputs) -> dict[str, Any]:
    """All choices at once. Raises EngineFailed or Unavailable where the engine ended one."""
    parts: list[list[OutputDelta]] = [[] for _ in call.requests]
    usage = Usage(call)
    try:
        async for index, delta in outputs:
            _check(delta)
            parts[index].append(delta)
            usage.completion_tokens += len(delta.token_ids)
    finally:
        outputs.close()
    choices = [answer.whole(index, joined(deltas)) for index, deltas in enumerate(parts)]
    return {**envelope(call, answer.object, choices), "usage": usage.as_json()}


async def stream_events(call: Call, answer: Answer, outputs: Outputs) -> AsyncIterator[bytes]:
    """Server-sent events: one chunk for each delta, an error where the engine ended a request."""
    usage = Usage(call)
    counted = {"usage": None} if call.include_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        extra = {"usage": usage.as_json()} if call.continuous_usage else counted
        return _event({**envelope(call, answer.chunk_object, [choice]), **extra})

    openings = map(answer.opening, range(len(call.requests)))
    if first := b"".join(chunk(choice) for choice in openings if choice is not None):
        yield first
    try:
        async for index, delta in outputs:
            usage.completion_tokens += len(delta.token_ids)
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                _check(delta)
                yield chunk(answer.chunk(index, delta))
        if call.include_usage:
            yield _event({**envelope(call, answer.chunk_object, []), "usage": usage.as_json()})
    except EXPECTED_ERRORS as error:
        yield _event(error_object(error))
    yield b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends `events` as they come; one that a client leaves is closed at once. `close` is called
    in the end, however it comes."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]
    ):
        self.status_code, self.background = 200, None  # and no `body`, which would be counted
        self.init_headers({"Cache-Control": "no-store", **headers})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected[T](receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`; None, and `work` is cancelled, where the client goes before. The body
    must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check(delta: OutputDelta) -> None:
    """An end that was the engine's doing, not the request's or the client's, is an error."""
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineFailed(delta.message)
    if delta.finish_reason is FinishReason.ABORT and delta.message:
        raise Unavailable(delta.message)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
