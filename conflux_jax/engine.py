"""The engine: one thread that owns scheduler and executor, and streams for everyone else.

Other threads and event loops never touch the scheduler. They post commands (add, abort, load) to an
inbox that the engine's thread empties before each turn; with nothing to do it sleeps on the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from conflux_jax.inbox import Inbox, Unavailable
from conflux_jax.intake import Intake, Prompt
from conflux_jax.loop import InFlight, RequestScheduler, turn
from conflux_jax.measured import Measured, StepFailed
from conflux_jax.model_info import ModelInfo
from conflux_jax.observer import Observer, combined
from conflux_jax.plan import Executor, IterationPlan
from conflux_jax.request import (
    FinishReason,
    IdInUse,
    QueueFull,
    Request,
    SamplingParams,
    TokenEvent,
)
from conflux_jax.scheduler.estimate import Estimate, check_deadline
from conflux_jax.streams import Mailbox, OutputStream, StreamMaker, wake
from conflux_jax.text import TextCodec, TextStream
from conflux_jax.watchdog import Watchdog

STALL_LIMIT_S = 30.0
STOP_GRACE_S = 5.0  # longer than any turn of an engine that does not hang
MAX_FAILURES_IN_A_ROW = 3  # steps; an engine that fails so often is of no use

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """An accepted request ended because the engine failed, or failed at it."""


class _State(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


_OVER = (_State.CLOSED, _State.FAILED)


class Engine:
    """Accepts requests from any thread and streams their output.

    `on_plan(plan, elapsed_s)` is called on the engine's thread after each iteration, in order: with
    the requests' arrivals it is the record that a replay needs. `stall_limit_s`: see `Watchdog`;
    when it has passed, every stream ends with an error and the engine stays down.

    A step that fails takes what lies on the devices with it, for they were given the buffers to
    write in. Where the executor can make them anew (`reset`), only the requests of that step end
    with an error; others that had been admitted are computed again. Else the engine is down.
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
        self._executor = Measured(executor, on_plan)
        self._observers: tuple[Observer, ...] = ()
        self._observer: Observer | None = None
        self.make_stream: StreamMaker = OutputStream  # for who wants to know how each is read
        self._busy_s = 0.0
        self._close_executor = getattr(executor, "close", None)
        self._clock = clock
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
        self._failures = 0  # steps in a row
        self._empty = threading.Event()  # set once no request is left and none can come
        self._thread = threading.Thread(target=self._run, name="conflux-engine", daemon=True)
        self._watchdog = self._executor.watchdog = Watchdog(
            stall_limit_s,
            clock,
            is_alive=self._thread.is_alive,
            is_excused=lambda: self._executor.is_compiling,
            on_stall=self._fail,
        )
        self._thread.start()
        self._watchdog.start()

    # What callers use, from any thread.

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        arrival_s: float | None = None,
        deadline_s: float = math.inf,
    ) -> Request:
        """Check and tokenise a prompt; queues nothing. May take long for a huge one, so an event
        loop should call it on a thread. Raises InvalidRequest or OutOfRange.

        deadline_s: on the clock of `now_s`; a request whose first token cannot be there by then is
        refused when it is queued."""
        return self._intake.prepare(prompt, params, request_id, arrival_s, deadline_s)

    async def submit(self, request: Request, max_unread: int | None = None) -> OutputStream:
        """Queue a request. Raises QueueFull, DeadlineUnmet, Unavailable, or IdInUse.

        max_unread: tokens that may wait to be read; one more, and the request ends."""
        mailbox, stream = self._open(request, max_unread)
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
        """Tell `observer` too what becomes of iterations and requests, from now on."""
        with self._state_lock:
            self._set_observers((*self._observers, observer))

    def unobserve(self, observer: Observer) -> None:
        """Tell it no more, but for what is being told at this moment."""
        with self._state_lock:
            self._set_observers(tuple(o for o in self._observers if o is not observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        self._observer = self._executor.observer = combined(observers)

    def snapshot(self, most: int) -> Future[Any]:
        """`Scheduler.snapshot` as of the next turn."""
        return self._inbox.post(lambda: self._scheduler.snapshot(most))

    def modelled(self, plan: IterationPlan) -> Any:
        """`Scheduler.modelled`, for an observer that is told of `plan`."""
        return self._scheduler.modelled(plan)

    def load(self) -> Future[Any]:
        """The scheduler's statistics as of the next turn (`Scheduler.load`)."""
        return self._inbox.post(self._scheduler.load)

    def estimate(self, prompt_tokens: int) -> Future[Estimate | None]:
        """When a prompt of so many tokens would have its first token, as of the next turn
        (`Scheduler.estimate`). Raises as `prepare` where there can be no such prompt."""
        self._scheduler.output_limit(prompt_tokens, None)
        return self._inbox.post(lambda: self._scheduler.estimate(prompt_tokens))

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
        return self._state not in _OVER and not self._watchdog.is_suspect

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

    def _open(
        self, request: Request, max_unread: int | None = None
    ) -> tuple[Mailbox, OutputStream]:
        params = request.params
        decoder = TextStream(self.tokenizer, params.stop, params.min_tokens)
        mailbox = Mailbox(request, decoder, max_unread)
        return mailbox, self.make_stream(mailbox, self._drop)

    def _drop(self, mailbox: Mailbox) -> None:
        self._inbox.drop(lambda: self._end_one(mailbox.request.request_id, mailbox))

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._turn_until_over()
        except StepFailed as failure:
            self._fail(str(failure))
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _turn_until_over(self) -> None:
        in_flight: InFlight | None = None
        progress = True
        while True:
            waits = in_flight is None and not self._scheduler.has_work
            if waits:
                self._watchdog.idle()
            elif progress:  # otherwise work is stuck, and the watchdog's time runs on
                self._watchdog.busy()
            blocked = in_flight is None and not (self._scheduler.has_work and progress)
            self._inbox.serve(block=blocked, woken=self._watchdog.woken)
            if self._state in _OVER:
                break
            if in_flight is None and not self._scheduler.has_work:
                progress = True
                continue
            started_s = time.perf_counter()
            previous = in_flight
            try:
                in_flight, events = turn(self._scheduler, self._executor, self._clock, previous)
            except StepFailed as failure:
                in_flight, progress = None, True
                self._recover(failure, previous)
                continue
            progress = in_flight is not None or previous is not None
            self._failures = 0 if previous is not None else self._failures
            self._deliver(events)
            self._busy_s += time.perf_counter() - started_s
        if in_flight is not None:  # the device still works in buffers that are to be freed
            self._executor.collect(in_flight.ticket)

    def _recover(self, failure: StepFailed, previous: InFlight | None) -> None:
        """Go on without the failed step's requests. Raises the failure where that cannot be."""
        self._failures += 1
        reset = self._executor.reset
        if reset is None or self._failures >= MAX_FAILURES_IN_A_ROW:
            raise failure
        if failure.in_launch and previous is not None:  # that one may be through
            with contextlib.suppress(StepFailed):
                output = self._executor.collect(previous.ticket)
                self._deliver(self._scheduler.commit(previous.plan, output, self._clock()))
        lost = self._scheduler.lose_device_state()
        logger.error("a step failed, and %d requests with it: %s", len(lost), failure)
        reset()
        ended = [mailbox for name in lost if (mailbox := self._live.pop(name, None)) is not None]
        for mailbox in ended:
            message = f"request {mailbox.request.request_id}: a step of it failed: {failure}"
            self._end(mailbox, FinishReason.ERROR, message)
        wake(ended)
        self._note_empty()

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = self._clock()
        touched: list[Mailbox] = []
        ended: list[Mailbox] = []  # without a token
        reasons: list[FinishReason | None] = []
        for event in events:
            mailbox = self._live.get(event.request_id)
            if mailbox is None:  # ended here already: the token that a late stop costs
                continue
            if event.token_id is None and event.finish_reason is not None:
                self._live.pop(event.request_id, None)
                self._end(mailbox, event.finish_reason, event.message)
                ended.append(mailbox)
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
        wake([*touched, *ended])
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
                    raise IdInUse("request_id", f"{request_id!r} is in use")
                check_deadline(mailbox.request, self._clock(), self._scheduler.least_s)
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
        if self._observer is None:
            return
        try:
            self._observer.ended(mailbox.request, reason)
        except Exception:  # it may be why the engine fails, of which the others must hear
            logger.exception("the observer failed")

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
            self._watchdog.stop()
        return True

    def _fail(self, message: str) -> None:
        message = f"the engine failed: {message}"
        if self._enter(_State.FAILED, message):
            logger.error("%s", message)
            self._end_all(FinishReason.ERROR, message, release=False)
            self._inbox.close(message)
