"""The engine: one thread that owns scheduler and executor, and streams for everyone else.

Other threads and event loops never touch the scheduler. They post commands (add, abort, load) to an
inbox that the engine's thread empties before each turn; with nothing to do it sleeps on the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from conflux_jax.inbox import Inbox, Unavailable
from conflux_jax.intake import Intake, Prompt
from conflux_jax.loop import InFlight, Planner, turn
from conflux_jax.observer import Observer
from conflux_jax.plan import Executor, IterationPlan, StepOutput
from conflux_jax.request import (
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    TokenEvent,
)
from conflux_jax.streams import Mailbox, OutputStream, wake
from conflux_jax.text import TextCodec, TextStream

STALL_LIMIT_S = 60.0  # no turn after warm-up takes this long; one that does hangs
STOP_GRACE_S = 5.0  # longer than any turn of an engine that does not hang


class EngineFailed(RuntimeError):
    """An accepted request ended because the engine failed, not because of the request."""


@runtime_checkable
class RequestScheduler(Planner, Protocol):
    """What the engine needs of `scheduler.Scheduler`."""

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> bool: ...

    def finish(self, request_id: str, reason: FinishReason) -> Any: ...

    @property
    def has_work(self) -> bool: ...

    def load(self) -> Any: ...

    def output_limit(self, prompt_tokens: int, max_tokens: int | None) -> int: ...


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the model, and of the mesh and the KV pool that it runs in."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    sp: int = 1
    tp: int = 1
    page_tokens: int = 0
    num_pages: int = 0  # per group


class _State(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


_OVER = (_State.CLOSED, _State.FAILED)


class Engine:
    """Accepts requests from any thread and streams their output.

    `on_plan(plan, elapsed_s)` is called on the engine's thread after each iteration, in order: with
    the requests' arrivals it is the record that a replay needs. `stall_limit_s`: a turn that takes
    longer makes the engine unhealthy and ends every stream with an error; idle is not stalled.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        executor: Executor,
        tokenizer: TextCodec,
        info: ModelInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        stall_limit_s: float = STALL_LIMIT_S,
        on_plan: Callable[[IterationPlan, float], None] | None = None,
    ):
        self.info = info
        self.tokenizer = tokenizer
        self._scheduler = scheduler
        self._executor = _Measured(executor, on_plan)
        self._observer: Observer | None = None
        self._busy_s = 0.0
        self._close_executor = getattr(executor, "close", None)
        self._clock = clock
        self._stall_limit_s = stall_limit_s
        self._intake = Intake(
            tokenizer=tokenizer,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            output_limit=scheduler.output_limit,
            clock=clock,
        )
        self._inbox = Inbox()
        self._live: dict[str, Mailbox] = {}
        self._state = _State.RUNNING
        self._message = ""
        self._state_lock = threading.Lock()
        self._turn_started_s: float | None = None
        self._empty = threading.Event()  # set once no request is left and none can come
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conflux-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="conflux-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    # What callers use, from any thread.

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        arrival_s: float | None = None,
    ) -> Request:
        """Check and tokenise a prompt; queues nothing. May take long for a huge one, so an event
        loop should call it on a thread. Raises InvalidRequest or OutOfRange."""
        return self._intake.prepare(prompt, params, request_id, arrival_s)

    async def submit(self, request: Request) -> OutputStream:
        """Queue a request. Raises QueueFull, Unavailable, or InvalidRequest for an id in use."""
        mailbox, stream = self._open(request)
        reply = self._inbox.post(lambda: self._admit([mailbox]))
        try:
            await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception:
            stream.forget()
            raise
        return stream

    def submit_many(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Queue requests in order, in one go, until the queue is full: the streams of those taken.

        Raises what `submit` does: QueueFull when not even one was taken, the others with none kept.
        """
        opened = [self._open(request) for request in requests]
        mailboxes = [mailbox for mailbox, _ in opened]
        try:
            taken = self._inbox.post(lambda: self._admit(mailboxes)).result()
        except BaseException as error:  # an interrupt may come before or after they were taken
            for _, stream in opened:
                stream.forget() if isinstance(error, Exception) else stream.close()
            raise
        for _, stream in opened[taken:]:
            stream.forget()
        return [stream for _, stream in opened[:taken]]

    def abort(self, request_id: str) -> Future[bool]:
        """End a request with FinishReason.ABORT; False where no such request is known."""
        return self._inbox.post(lambda: self._end_one(request_id))

    def observe(self, observer: Observer) -> None:
        """Tell `observer` what becomes of iterations and requests from now on."""
        self._observer = self._executor.observer = observer

    def load(self) -> Future[Any]:
        """The scheduler's statistics as of the next turn (`Scheduler.load`)."""
        return self._inbox.post(self._scheduler.load)

    def stats(self) -> dict[str, float]:
        """Sums since the start, in seconds: `step_s`, the iterations' wall time on the engine's
        thread, and `host_s`, the part of it that did not wait for the device. `iterations`."""
        waited_s = self._executor.waited_s
        return {
            "host_s": max(0.0, self._busy_s - waited_s),
            "step_s": self._busy_s,
            "iterations": float(self._executor.num_collected),
        }

    @property
    def now_s(self) -> float:
        """The engine's clock, which arrivals are on."""
        return self._clock()

    @property
    def num_live(self) -> int:
        """Requests accepted and not over."""
        return len(self._live)

    @property
    def healthy(self) -> bool:
        return self._state not in _OVER and not self._stalled()

    @property
    def state_message(self) -> str:
        """Why no requests are taken; empty while they are."""
        return self._message

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let the accepted ones finish, and after `timeout_s` end those that
        have not, each with FinishReason.ABORT. True if none had to be ended so. Blocks."""
        self._enter(_State.DRAINING, "the engine is shutting down and takes no new requests")
        self._inbox.post(self._note_empty)
        if self._empty.wait(timeout_s):
            return True
        message = f"ended by the engine's shutdown after {timeout_s:g} s of draining"
        ending = self._inbox.post(lambda: self._end_all(FinishReason.ABORT, message))
        with contextlib.suppress(TimeoutError, Unavailable):
            ending.result(STOP_GRACE_S)
        self._end_all(FinishReason.ABORT, message, release=False)
        return False

    def close(self) -> None:
        """End every request with FinishReason.ABORT, stop the threads and close the executor,
        unless it hangs."""
        if self._enter(_State.CLOSED, "the engine is closed"):
            self._inbox.close(self._message)
        self._thread.join(2 * STOP_GRACE_S)
        self._end_all(FinishReason.ABORT, "the engine was closed", release=False)
        self._watchdog.join()
        if self._close_executor is not None and not self._thread.is_alive():
            self._close_executor()
            self._close_executor = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, request: Request) -> tuple[Mailbox, OutputStream]:
        mailbox = Mailbox(request, TextStream(self.tokenizer, request.params.stop))
        return mailbox, OutputStream(mailbox, self._drop)

    def _drop(self, mailbox: Mailbox) -> None:
        self._inbox.drop(lambda: self._end_one(mailbox.request.request_id, mailbox))

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._turn_until_over()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _turn_until_over(self) -> None:
        in_flight: InFlight | None = None
        progress = True
        while True:
            idle = in_flight is None and not (self._scheduler.has_work and progress)
            self._inbox.serve(block=idle)
            if self._state in _OVER:
                break
            if in_flight is None and not self._scheduler.has_work:
                progress, self._turn_started_s = True, None
                continue
            if progress:  # otherwise work is stuck, and the watchdog's time runs on
                self._turn_started_s = self._clock()
            started_s = time.perf_counter()
            previous = in_flight
            in_flight, events = turn(self._scheduler, self._executor, self._clock, previous)
            progress = in_flight is not None or previous is not None
            if progress:
                self._turn_started_s = None
            self._deliver(events)
            self._busy_s += time.perf_counter() - started_s
        if in_flight is not None:  # the device still works in buffers that are to be freed
            self._executor.collect(in_flight.ticket)

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = self._clock()
        touched: list[Mailbox] = []
        reasons: list[FinishReason | None] = []
        for event in events:
            mailbox = self._live.get(event.request_id)
            if mailbox is None:  # ended here already: the token that a late stop costs
                continue
            touched.append(mailbox)
            reason = mailbox.put(event, now)
            reasons.append(reason)
            if reason is None:
                continue
            self._live.pop(event.request_id, None)
            if event.finish_reason is None:
                self._scheduler.finish(event.request_id, reason)
        if self._observer is not None:
            self._observer.delivered([mailbox.request for mailbox in touched], reasons, now)
        wake(touched)
        self._note_empty()

    def _admit(self, mailboxes: list[Mailbox]) -> int:
        """Add until the queue is full; how many were. Any other refusal takes back all of them."""
        taken: list[Mailbox] = []
        try:
            for mailbox in mailboxes:
                request_id = mailbox.request.request_id
                if self._state is not _State.RUNNING:
                    raise Unavailable(self._message)
                if request_id in self._live:
                    raise InvalidRequest("request_id", f"{request_id!r} is in use")
                self._scheduler.add(mailbox.request)
                self._live[request_id] = mailbox
                taken.append(mailbox)
        except QueueFull:
            if not taken:
                raise
        except Exception:
            for mailbox in taken:
                self._end_one(mailbox.request.request_id)
            raise
        return len(taken)

    def _end_one(self, request_id: str, mailbox: Mailbox | None = None) -> bool:
        """Abort a request; with `mailbox`, only the one that it belongs to."""
        found = self._live.get(request_id)
        if found is None or (mailbox is not None and mailbox is not found):
            return False
        self._live.pop(request_id, None)
        self._scheduler.cancel(request_id)
        self._end(found, FinishReason.ABORT, "")
        wake([found])
        self._note_empty()
        return True

    def _end_all(self, reason: FinishReason, message: str, release: bool = True) -> None:
        """End every request. From another thread only without `release`, which leaves the
        scheduler alone."""
        ended: list[Mailbox] = []
        with contextlib.suppress(KeyError):
            while True:
                request_id, mailbox = self._live.popitem()
                if release:
                    self._scheduler.cancel(request_id)
                self._end(mailbox, reason, message)
                ended.append(mailbox)
        wake(ended)
        self._note_empty()

    def _end(self, mailbox: Mailbox, reason: FinishReason, message: str) -> None:
        mailbox.end(reason, message, self._clock())
        if self._observer is not None:
            self._observer.ended(mailbox.request, reason)

    def _note_empty(self) -> None:
        if self._state is not _State.RUNNING and not self._live:
            self._empty.set()

    # Life and death.

    def _enter(self, state: _State, message: str) -> bool:
        """Change the state; an engine that is over stays as it is. True if it changed."""
        with self._state_lock:
            if self._state in _OVER:
                return False
            self._state, self._message = state, message
        if state in _OVER:
            self._over.set()
        return True

    def _fail(self, message: str) -> None:
        message = f"the engine failed: {message}"
        if self._enter(_State.FAILED, message):
            self._end_all(FinishReason.ERROR, message, release=False)
            self._inbox.close(message)

    def _stalled(self) -> bool:
        started_s = self._turn_started_s
        return started_s is not None and self._clock() - started_s > self._stall_limit_s

    def _watch(self) -> None:
        while not self._over.wait(self._stall_limit_s / 4):
            if self._stalled():
                self._fail(f"no progress for {self._stall_limit_s:g} s")


class _Measured:
    """An executor that times the waits for the device and reports each plan's measured seconds."""

    def __init__(self, executor: Executor, on_plan: Callable[[IterationPlan, float], None] | None):
        self._executor = executor
        self._on_plan = on_plan
        self.observer: Observer | None = None
        self.waited_s = 0.0
        self.num_collected = 0

    def launch(self, plan: IterationPlan) -> Any:
        if self.observer is not None:
            self.observer.launched(plan)
        return plan, self._executor.launch(plan)

    def collect(self, ticket: Any) -> StepOutput:
        plan, inner = ticket
        started_s = time.perf_counter()
        output = self._executor.collect(inner)
        self.waited_s += time.perf_counter() - started_s
        self.num_collected += 1
        if self._on_plan is not None:
            self._on_plan(plan, output.elapsed_s)
        if self.observer is not None:
            self.observer.collected(plan, output.elapsed_s)
        return output
