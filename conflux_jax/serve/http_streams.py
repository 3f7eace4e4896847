"""The way of a call's outputs to its HTTP client, and the end of it when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conflux_jax.endings import check_end
from conflux_jax.serve.choices import Outputs
from conflux_jax.serve.http_errors import EXPECTED_ERRORS, error_object, to_json
from conflux_jax.serve.openai_requests import Call
from conflux_jax.serve.openai_responses import Answer, Usage, envelope, joined
from conflux_jax.serve.patience import Patience
from conflux_jax.streams import OutputDelta


async def reply(call: Call, answer: Answer, outputs: Outputs) -> dict[str, Any]:
    """All choices at once. Raises EngineFailed or Unavailable where the engine ended one."""
    parts: list[list[OutputDelta]] = [[] for _ in call.requests]
    usage = Usage(call)
    try:
        async for index, delta in outputs:
            check_end(delta)
            parts[index].append(delta)
            usage.completion_tokens += len(delta.token_ids)
    finally:
        outputs.close()
    whole = [joined(deltas) for deltas in parts]

    def worded() -> dict[str, Any]:
        choices = [answer.whole(index, output) for index, output in enumerate(whole)]
        body = {**envelope(call, answer.object, choices), "usage": usage.as_json()}
        return {**body, **answer.beside(whole)}

    # A prompt may have millions of log-probabilities.
    long = any(output.prompt_logprobs is not None for output in whole)
    return await asyncio.to_thread(worded) if long else worded()


async def stream_events(call: Call, answer: Answer, outputs: Outputs) -> AsyncIterator[bytes]:
    """Server-sent events: one chunk for each delta, an error where the engine ended a request."""
    usage = Usage(call)
    # What is the same in every chunk is worded once: up to the choice, and what is behind it.
    start = to_json(envelope(call, answer.chunk_object, [])).removesuffix(b"]}")
    end = b'],"usage":null}' if call.include_usage else b"]}"

    def chunk(choice: dict[str, Any]) -> bytes:
        counts = call.continuous_usage
        rest = b'],"usage":' + to_json(usage.as_json()) + b"}" if counts else end
        return b"data: " + start + to_json(choice) + rest + b"\n\n"

    openings = map(answer.opening, range(len(call.requests)))
    if first := b"".join(chunk(choice) for choice in openings if choice is not None):
        yield first
    try:
        async for index, delta in outputs:
            usage.completion_tokens += len(delta.token_ids)
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                check_end(delta)
                yield chunk(answer.chunk(index, delta))
        if call.include_usage:
            yield _event({**envelope(call, answer.chunk_object, []), "usage": usage.as_json()})
    except EXPECTED_ERRORS as error:
        yield _event(error_object(error))
    yield b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends `events` as they come; one that a client leaves is closed at once. `close` is called
    in the end, however it comes.

    timeout_s: for a client to take what waits for it. If it does not, `abort` shall cut the
    connection: what is written to it goes nowhere, a word of farewell included."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: dict[str, str],
        timeout_s: float,
        abort: Callable[[], None],
    ):
        self.status_code, self.background = 200, None  # and no `body`, which would be counted
        self.init_headers({"Cache-Control": "no-store", **headers})
        self._events, self._close = events, close
        self._timeout_s, self._abort = timeout_s, abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        patience = Patience(self._timeout_s)
        try:
            async for event in self._events:
                body = {"type": "http.response.body", "body": event, "more_body": True}
                try:
                    await patience.wait(send(body))
                except TimeoutError:
                    self._abort()
                    return
        finally:
            patience.close()
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


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
