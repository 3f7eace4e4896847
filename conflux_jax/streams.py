"""How tokens travel from the engine's thread to the one consumer of a request.

Two ends: the engine holds a `Mailbox`, the consumer an `OutputStream`. The engine never waits for
the consumer: what is not read is kept (at most `max_output_tokens` small events) and read at
once later. A consumer that others feed has a bound: `max_unread` events, and the request ends.
Dropping the stream, at any time and in any way, cancels the request.

Text is made where it costs least. A request with stop strings is detokenised on the engine's
thread, because the engine must end it; every other one by its consumer, off the engine's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from conflux_jax.request import FinishReason, Logprobs, PromptLogprobs, Request, TokenEvent
from conflux_jax.text import TextStream


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new since the last read: usually one token, more where the consumer is slower.

    `text` may be empty (half a character is held back). `times_s` are the moments that the tokens
    reached the host, in seconds after the request's arrival. `logprobs` has one entry a token, or
    none where the request did not ask. The first delta with a token has `prompt_logprobs`, where
    the request asked for them. The last delta has `finish_reason`. overflowed: that reason is the
    consumer, who left too much unread.
    """

    text: str
    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    message: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    overflowed: bool = False


class _Item(NamedTuple):
    event: TokenEvent
    time_s: float
    text: str | None  # None: not detokenised yet
    finish_reason: FinishReason | None


class Mailbox:
    """The engine's end of a stream. `put` and `end` are the engine's, the rest the reader's.

    max_unread: events that it holds at the most; None: as many as there are."""

    def __init__(self, request: Request, decoder: TextStream, max_unread: int | None = None):
        self.request = request
        self._decoder = decoder
        self._max_unread = max_unread
        self._overflowed = False
        self._eager = bool(request.params.stop)
        self._condition = threading.Condition()
        self._items: list[_Item] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._sync_waiter: str | None = None  # "any" item or the "end"

    def put(self, event: TokenEvent, now: float) -> FinishReason | None:
        """Add an event; returns why the request is over, if it is. A stop string that this token
        completes is such a reason, one that the scheduler does not know of yet; a reader that
        falls behind is another."""
        most = self._max_unread
        if event.finish_reason is None and most is not None and len(self._items) + 1 >= most:
            self._overflowed = True
            message = f"max_unread_tokens: {most} tokens were left unread, and no more are kept"
            event = event._replace(finish_reason=FinishReason.ABORT, message=message)
        text, reason = (None, event.finish_reason)
        if self._eager:
            text, reason = self._render(event)
        item = _Item(event, now - self.request.arrival_s, text, reason)
        with self._condition:
            if self._ended:
                return reason
            self._items.append(item)
            self._ended = reason is not None
            if self._sync_waiter == "any" or (self._sync_waiter and self._ended):
                self._condition.notify_all()
        return reason

    def end(self, reason: FinishReason, message: str, now: float) -> None:
        """The request is over without a new token."""
        event = TokenEvent(self.request.request_id, None, reason, message=message)
        self.put(event, now)

    def pop_waiter(self) -> asyncio.Future[None] | None:
        """The asyncio reader that waits for what was just put, to be woken on its own loop."""
        with self._condition:
            waiter, self._waiter = self._waiter, None
        return waiter

    def arm(self) -> asyncio.Future[None] | None:
        """A future that the next event resolves, or None where something is there already."""
        with self._condition:
            if self._items or self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            return self._waiter

    def wait(self, until: str) -> None:
        """Block until "any" event or the "end" is there."""
        with self._condition:
            self._sync_waiter = until
            try:
                self._condition.wait_for(
                    lambda: self._ended or (until == "any" and bool(self._items))
                )
            finally:
                self._sync_waiter = None

    def take(self) -> OutputDelta | None:
        """Everything that is there, as one delta; None if nothing is."""
        with self._condition:
            items, self._items = self._items, []
        if not items:
            return None
        text, reason, of_prompt = "", None, None
        token_ids: list[int] = []
        times_s: list[float] = []
        logprobs: list[Logprobs] = []
        for item in items:  # one loop, for this is done for every token
            event, piece, reason = item.event, item.text, item.finish_reason
            if piece is None:
                piece, reason = self._render(event)
            text += piece
            if event.token_id is None:
                continue
            token_ids.append(event.token_id)
            times_s.append(item.time_s)
            if event.logprobs is not None:
                logprobs.append(event.logprobs)
            if of_prompt is None:
                of_prompt = event.prompt_logprobs
        return OutputDelta(
            text=text,
            token_ids=tuple(token_ids),
            times_s=tuple(times_s),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            message=items[-1].event.message,
            overflowed=self._overflowed and reason is FinishReason.ABORT,
            prompt_logprobs=of_prompt,
        )

    def _render(self, event: TokenEvent) -> tuple[str, FinishReason | None]:
        """Text of one event. The EOS or stop token that ends a request has none."""
        reason, text = event.finish_reason, ""
        if event.token_id is not None and reason is not FinishReason.STOP:
            text, stopped = self._decoder.push(event.token_id)
            if stopped:
                return text, FinishReason.STOP
        if reason is not None:
            text += self._decoder.finish()
        return text, reason


class OutputStream:
    """One request's output, for one consumer: `async for`, `for`, or `read_all`.

    Ends after the delta that has a `finish_reason`. `close` (also at the end of a `with`, when the
    consumer's task is cancelled while it waits, and when the object is dropped) cancels a request
    that is not over.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[Mailbox], object]):
        self.request = mailbox.request
        self._mailbox = mailbox
        self._cancel = cancel
        self._over = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._cancel(self._mailbox)

    def forget(self) -> None:
        """For a request that was refused: there is nothing to cancel."""
        self._over = True

    async def aclose(self) -> None:
        self.close()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._over:
            raise StopAsyncIteration
        while (delta := self._mailbox.take()) is None:
            waiter = self._mailbox.arm()
            if waiter is None:
                continue
            try:
                await waiter
            except asyncio.CancelledError:
                self.close()
                raise
        self._over = delta.finish_reason is not None
        return delta

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> OutputDelta:
        if self._over:
            raise StopIteration
        self._mailbox.wait("any")
        return self._read()

    def read_all(self) -> OutputDelta:
        """Block until the request is over; all that was not read yet."""
        self._mailbox.wait("end")
        return self._read()

    def _read(self) -> OutputDelta:
        delta = self._mailbox.take()
        assert delta is not None, "a stream has one consumer"
        self._over = delta.finish_reason is not None
        return delta

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Only a reentrant queue is touched here: the collector may run at any point of any thread.
        self.close()


StreamMaker = Callable[[Mailbox, Callable[[Mailbox], object]], OutputStream]  # OutputStream is one


def wake(mailboxes: Iterable[Mailbox]) -> None:
    """Wake the asyncio readers of these: one call a loop, however many streams it reads."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for mailbox in mailboxes:
        if (waiter := mailbox.pop_waiter()) is not None:
            by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, waiters in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: no reader is left to wake
            loop.call_soon_threadsafe(_resolve, waiters)


def _resolve(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
