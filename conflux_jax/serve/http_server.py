"""The HTTP server: OpenAI's API, tokenisation, readiness and metrics, beside the gRPC service on
the same engine and event loop.

It listens before its model is loaded, and answers 503 until then. A client that goes frees what it
asked for at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from conflux_jax.config import Config
from conflux_jax.engine import Engine
from conflux_jax.inbox import Unavailable
from conflux_jax.request import InvalidRequest
from conflux_jax.serve.aside import Aside
from conflux_jax.serve.choices import Outputs, submit_all
from conflux_jax.serve.dashboard import Dashboard, page
from conflux_jax.serve.dashboard_data import status_of
from conflux_jax.serve.errors import checked_estimate
from conflux_jax.serve.gate import Gate
from conflux_jax.serve.http_connections import connections
from conflux_jax.serve.http_errors import (
    EXPECTED_ERRORS,
    JsonResponse,
    ModelNotFound,
    TooLarge,
    WrongType,
    error_response,
    other_error_response,
)
from conflux_jax.serve.http_gate import HttpGate
from conflux_jax.serve.http_streams import (
    EventStream,
    reply,
    stream_events,
    unless_disconnected,
)
from conflux_jax.serve.metrics import Metrics, checked_prefix
from conflux_jax.serve.openai_requests import (
    Call,
    chat_call,
    completion_call,
    detokenize_request,
    estimate_request,
    tokenize_request,
)
from conflux_jax.serve.openai_responses import Answer, ChatAnswer, CompletionAnswer
from conflux_jax.serve.tls import Tls

MAX_REQUEST_ID_CHARS = 200  # so that with what is put around it, it is one of the engine's
KEEP_ALIVE_S = 60
CLOSE_GRACE_S = 2  # for handlers to send what is left, once every request is over
CLIENT_GONE = 499  # nobody reads it

MakeCall = Callable[[Engine, bytes, str | None], Call]
MakeAnswer = Callable[[Any, Call], Answer]
Work = Callable[[Engine, bytes], dict[str, Any]]


class HttpServer:
    """Binds, listens, takes an engine once there is one, and stops. Draining is the engine's:
    `/health` says so, and new requests are refused. Raises ConfigError for a bad metrics_prefix,
    certificate or file of tokens. gate: shared with the other server of the process, if any."""

    def __init__(self, config: Config, gate: Gate | None = None):
        checked_prefix(config)
        self._config = config
        self._engine: Engine | None = None
        self._metrics: Metrics | None = None
        self._dashboard: Dashboard | None = None
        tls = Tls.of(config.server)
        self.app = self._make_app()
        self.app.add_middleware(HttpGate, gate=gate or Gate(config.server))
        settings = uvicorn.Config(
            self.app,
            http=connections(config.server.read_timeout_s),  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
            ssl_context_factory=None if tls is None else lambda *_: tls.http_context(),
        )
        self._uvicorn = _Uvicorn(settings)
        self._serving: asyncio.Task[None] | None = None
        self._aside = Aside()

    async def start(self) -> int:
        """Bind and listen; returns the port. Raises OSError when the address cannot be had."""
        server = self._config.server
        bound = _bind(server.host, server.http_port or 0)
        port = bound.getsockname()[1]
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[bound]))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()
        return port

    def use(self, engine: Engine) -> None:
        """Serve with this engine, which stays its caller's to close, and observe it."""
        self._metrics = Metrics(self._config, engine)
        self._dashboard = Dashboard(self._config, engine, self._metrics.tallies)
        self._engine = engine

    async def stop(self) -> None:
        """No new connections; those that are open get CLOSE_GRACE_S for their last words."""
        if self._dashboard is not None:
            self._dashboard.close()
        self._uvicorn.should_exit = True
        if self._serving is not None:
            await self._serving
        self._aside.close()

    @property
    def connections(self) -> list[asyncio.BaseTransport]:
        """Those that are open."""
        open_ones = self._uvicorn.server_state.connections
        return [connection.transport for connection in open_ones]

    def _make_app(self) -> FastAPI:
        # No pages of documentation: they fetch scripts from elsewhere.
        # And no redirections, whose address would be what a client calls this host.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        for error in EXPECTED_ERRORS:
            app.add_exception_handler(error, _on_error)
        app.add_exception_handler(Exception, _on_error)
        app.add_exception_handler(HTTPException, _on_http_exception)
        app.add_exception_handler(ClientDisconnect, _on_client_gone)
        look = functools.partial(app.api_route, methods=["GET", "HEAD"])  # as load balancers do
        look("/health")(self._health)
        look("/live")(self._live)
        look("/metrics")(self._show_metrics)
        look("/dashboard")(self._show_dashboard)
        app.get("/dashboard/events")(self._dashboard_events)
        app.get("/dashboard/timeline")(self._dashboard_timeline)
        app.post("/dashboard/cancel")(self._dashboard_cancel)
        look("/v1/models")(self._models)
        look("/v1/models/{name:path}")(self._model)
        app.post("/v1/completions")(self._completions)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/estimate")(self._estimate)
        app.post("/tokenize")(self._tokenize)
        app.post("/detokenize")(self._detokenize)
        return app

    # Endpoints

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, completion_call, CompletionAnswer)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, chat_call, ChatAnswer)

    async def _tokenize(self, request: Request) -> Response:
        return await self._work(request, tokenize_request)

    async def _detokenize(self, request: Request) -> Response:
        return await self._work(request, detokenize_request)

    async def _estimate(self, request: Request) -> Response:
        """When a prompt would have its first token if it came now."""
        engine = self._ready()
        body = await self._body(request)
        tokens = await asyncio.to_thread(estimate_request, engine, body)
        estimate = checked_estimate(await asyncio.wrap_future(engine.estimate(tokens)))
        content = {
            "prompt_tokens": tokens,
            "ttft_s": estimate.ttft_s,
            "queued_s": estimate.queued_s,
            "alone_s": None if estimate.measured else estimate.alone_s,
            "basis": "pace" if estimate.measured else "profile",
        }
        return JsonResponse(content)

    async def _models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def _model(self, name: str) -> Response:
        card = self._card()
        if name != card["id"]:
            raise ModelNotFound("model", f"{name!r} is not served here; {card['id']!r} is")
        return JsonResponse(card)

    async def _health(self) -> Response:
        """Readiness: 200 only while new requests are taken."""
        status, message = status_of(self._engine)
        if status == "ok":
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": status, "message": message}, 503)

    async def _live(self) -> Response:
        """Liveness: 503 only where a restart would help."""
        if self._engine is None or self._engine.healthy:
            return JsonResponse({"status": "ok"})
        message = self._engine.state_message or "the engine makes no progress"
        return JsonResponse({"status": "failed", "message": message}, 503)

    async def _show_metrics(self) -> Response:
        self._ready()
        assert self._metrics is not None
        return Response(await self._metrics.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_dashboard(self) -> Response:
        content, headers = page()
        return Response(content, headers=headers)

    async def _dashboard_events(self, request: Request) -> Response:
        events, close = self._watched().events()
        return self._event_stream(request, events, close, {})

    async def _dashboard_timeline(self) -> Response:
        return await self._watched().timeline()

    async def _dashboard_cancel(self, request: Request) -> Response:
        dashboard = self._watched()
        return await dashboard.cancel(await self._body(request))

    # What they share

    def _watched(self) -> Dashboard:
        self._ready()
        assert self._dashboard is not None
        return self._dashboard

    async def _generate(
        self, request: Request, make_call: MakeCall, make_answer: MakeAnswer
    ) -> Response:
        engine = self._ready()
        request_id = _request_id(request)
        body = await self._body(request)

        async def begin() -> tuple[Call, Outputs]:
            call = await asyncio.to_thread(make_call, engine, body, request_id)
            most = self._config.server.max_unread_tokens
            return call, Outputs(await submit_all(engine, call.requests, most))

        begun = await unless_disconnected(request.receive, begin())
        if begun is None:
            return Response(status_code=CLIENT_GONE)
        call, outputs = begun
        headers = {"X-Request-Id": _header(call.id)}
        answer = make_answer(engine.tokenizer, call)
        if call.stream:
            events = stream_events(call, answer, outputs)
            return self._event_stream(request, events, outputs.close, headers)
        content = await unless_disconnected(request.receive, reply(call, answer, outputs))
        if content is None:
            return Response(status_code=CLIENT_GONE)
        return JsonResponse(content, headers=headers)

    def _event_stream(
        self,
        request: Request,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: dict[str, str],
    ) -> EventStream:
        timeout_s = self._config.server.write_timeout_s
        return EventStream(events, close, headers, timeout_s, functools.partial(self._cut, request))

    def _cut(self, request: Request) -> None:
        """Ends the connection of a request without waiting for anything."""
        client = request.scope["client"]
        for connection in list(self._uvicorn.server_state.connections):
            if getattr(connection, "client", None) == client:
                connection.transport.abort()

    async def _work(self, request: Request, work: Work) -> Response:
        """One after the other, for each may take minutes: prompts are prepared on other threads."""
        engine = self._ready()
        body = await self._body(request)
        return JsonResponse(await self._aside.run(work, engine, body))

    async def _body(self, request: Request) -> bytes:
        """Raises TooLarge before it holds more than the limit."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise WrongType("body", f"Content-Type must be application/json, got {kind!r}")
        packed = request.headers.get("content-encoding", "identity").strip().lower()
        if packed not in ("", "identity"):
            raise WrongType("body", f"Content-Encoding is not supported, got {packed!r}")
        limit = self._config.server.max_message_mib * 2**20
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                mib = self._config.server.max_message_mib
                raise TooLarge("body", f"more than max_message_mib: {mib} MiB")
            parts.append(part)
        return b"".join(parts)

    def _card(self) -> dict[str, Any]:
        info = self._ready().info
        return {
            "id": info.name,
            "object": "model",
            "created": 0,
            "owned_by": "conflux_jax",
            "max_model_len": info.max_model_len,
        }

    def _ready(self) -> Engine:
        if self._engine is None:
            raise Unavailable("the model is still loading")
        return self._engine


class _Uvicorn(uvicorn.Server):
    """Signals are the process's, not this server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return other_error_response(error.status_code, message, error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


def _bind(host: str, port: int) -> socket.socket:
    """With its protocol named: only then does asyncio send what is written at once, instead of
    holding the second write of an answer until the first is acknowledged, for 40 ms."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _request_id(request: Request) -> str | None:
    """What the client calls this request, if it says so."""
    given = request.headers.get("x-request-id")
    if not given:
        return None
    if len(given) > MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest(
            "X-Request-Id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return given


def _header(text: str) -> str:
    """As a header may carry it: printable ASCII."""
    return text.encode("ascii", "backslashreplace").decode()
