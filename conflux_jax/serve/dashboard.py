"""The dashboard: a static page, and the events that it shows.

The engine is looked at only while somebody watches, however many do: a look is a short command to
its thread between two iterations, some times a second. A watcher that reads slowly gets fewer
events, never a longer queue of them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

from starlette.responses import Response

from conflux_jax.config import Config
from conflux_jax.engine import Engine
from conflux_jax.inbox import Unavailable
from conflux_jax.recorder import Recorder
from conflux_jax.request import InvalidRequest, QueueFull
from conflux_jax.scheduler.outlook import Load
from conflux_jax.serve.dashboard_data import (
    MOST_ROWS,
    Details,
    Event,
    Hello,
    Now,
    Points,
    as_event,
    status_of,
)
from conflux_jax.serve.http_errors import JsonResponse
from conflux_jax.serve.json_fields import Fields
from conflux_jax.serve.latency_series import LatencySeries
from conflux_jax.serve.tallies import Tallies
from conflux_jax.timeline import write_timeline

PAGE = Path(__file__).with_name("dashboard.html")
MOST_WATCHERS = 16
PERIOD_S = 0.1  # between looks
DETAILS_EVERY = 5  # looks
ANSWER_S = 2.0  # an engine that takes longer is shown as stalled
MOST_ITERATIONS = 32  # in one event


class Dashboard:
    """Of one engine, on one event loop. `close` ends every watcher's stream."""

    def __init__(self, config: Config, engine: Engine, tallies: Tallies):
        self._config, self._engine, self._tallies = config, engine, tallies
        self._series = LatencySeries(tallies)
        self._recorder = Recorder(
            config.server.timeline_iterations, lambda: engine.now_s, engine.modelled
        )
        self._load: Load | None = None
        self._shown = -1  # number of the last iteration in an event
        self._looks = 0
        self._latest: dict[type[Event], bytes] = {}
        self._tick = asyncio.Event()  # replaced at the next look, and then set
        self._poller: asyncio.Task[None] | None = None
        self._closed = False
        self.num_watchers = 0

    def events(self) -> tuple[AsyncIterator[bytes], Callable[[], None]]:
        """Server-sent events, and what must be called when nobody reads them any more. Raises
        QueueFull where MOST_WATCHERS watch already, Unavailable once closed."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        if self.num_watchers >= MOST_WATCHERS:
            raise QueueFull(f"dashboard: {MOST_WATCHERS} pages watch already, which is the limit")
        self._enter()
        return self._watch(), self._leave

    async def cancel(self, body: bytes) -> Response:
        fields = Fields(body)
        request_id = fields.required("request_id")
        if not isinstance(request_id, str):
            raise InvalidRequest("request_id", f"must be a string, got {request_id!r}")
        fields.finish()
        cancelled = await asyncio.wrap_future(self._engine.abort(request_id))
        return JsonResponse({"cancelled": cancelled})

    async def timeline(self) -> Response:
        """The iterations of while somebody watched, as a Chrome trace."""
        content = await asyncio.to_thread(self._trace)
        headers = {
            "Cache-Control": "no-store",
            "Content-Disposition": 'attachment; filename="timeline.json"',
        }
        return Response(content, media_type="application/json", headers=headers)

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _trace(self) -> str:
        text = io.StringIO()
        write_timeline(text, self._recorder.records(), self._engine.info.name)
        return text.getvalue()

    # Watchers

    def _enter(self) -> None:
        self.num_watchers += 1
        if self.num_watchers == 1:
            self._latest.clear()
            self._looks = 0
            self._series.begin(self._engine.now_s)
            self._engine.observe(self._recorder)
            self._poller = asyncio.create_task(self._poll())

    def _leave(self) -> None:
        self.num_watchers -= 1
        if not self.num_watchers:
            self._stop()

    def _stop(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
            self._engine.unobserve(self._recorder)

    async def _watch(self) -> AsyncIterator[bytes]:
        yield as_event(Hello.of(self._config, self._engine))
        sent: dict[type[Event], bytes] = {}
        seen = 0
        while self._poller is not None and not self._poller.done():
            tick = self._tick
            for kind, event in list(self._latest.items()):
                if sent.get(kind) is not event:
                    sent[kind] = event
                    yield event
            if self._series.num_points > seen:
                points = Points.of(self._series, seen)
                seen = self._series.num_points
                yield as_event(points)
            await tick.wait()

    # Looks

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + PERIOD_S
                await self._look()
                self._looks += 1
                self._series.advance(self._engine.now_s)
                self._wake()
                await asyncio.sleep(max(due - loop.time(), 0.0))
        finally:  # however it ends, nobody waits for the next look
            self._wake()

    def _wake(self) -> None:
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    async def _look(self) -> None:
        status, _ = status_of(self._engine)
        try:
            async with asyncio.timeout(ANSWER_S):
                self._load = await asyncio.wrap_future(self._engine.load())
                if self._looks % DETAILS_EVERY == 0:
                    self._latest[Details] = as_event(await self._details())
        except TimeoutError:
            status = "stalled"
        except Unavailable:
            status = "failed"
        records = self._recorder.records(after=self._shown)[-MOST_ITERATIONS:]
        if records:
            self._shown = records[-1].number
        self._latest[Now] = as_event(Now.of(self._engine, self._load, status, records))

    async def _details(self) -> Details:
        snapshot = await asyncio.wrap_future(self._engine.snapshot(MOST_ROWS))
        ids = [view.request_id for view in snapshot.running]
        return Details.of(snapshot, self._engine.now_s, self._tallies.first_token_s(ids))


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers: it may run its own script and style, and talk to this server; that
    is all. It holds no data, so it needs no token."""
    content = PAGE.read_bytes()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script', content)}",
            f"style-src {_hash_of('style', content)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return content, {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hash_of(tag: str, content: bytes) -> str:
    """Of the one element of that name, as a policy names it."""
    (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), content, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner).digest()).decode()}'"
