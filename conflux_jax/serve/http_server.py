"""The HTTP server: OpenAI's API, tokenisation, readiness and metrics, beside the gRPC service on
the same engine and event loop.

It listens before its model is loaded, and answers 503 until then. A client that goes frees what it
asked for at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
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
from conflux_jax.serve.http_errors import (
    EXPECTED_ERRORS,
    JsonResponse,
    ModelNotFound,
    TooLarge,
    WrongType,
    error_response,
    other_error_response,
)
from conflux_jax.serve.http_streams import (
    EventStream,
    Outputs,
    reply,
    stream_events,
    submit_all,
    unless_disconnected,
)
from conflux_jax.serve.metrics import Metrics, checked_prefix
from conflux_jax.serve.openai_requests import (
    Call,
    chat_call,
    completion_call,
    detokenize_request,
    tokenize_request,
)
from conflux_jax.serve.openai_responses import Answer, ChatAnswer, CompletionAnswer

MAX_REQUEST_ID_CHARS = 200  # so that with what is put around it, it is one of the engine's
KEEP_ALIVE_S = 60
CLOSE_GRACE_S = 2  # for handlers to send what is left, once every request is over
CLIENT_GONE = 499  # nobody reads it

MakeCall = Callable[[Engine, bytes, str | None], Call]
MakeAnswer = Callable[[Any, Call], Answer]
Work = Callable[[Engine, bytes], dict[str, Any]]


class HttpServer:
    """Binds, listens, takes an engine once there is one, and stops. Draining is the engine's:
    `/health` says so, and new requests are refused. Raises ConfigError for a bad metrics_prefix."""

    def __init__(self, config: Config):
        checked_prefix(config)
        self._config = config
        self._engine: Engine | None = None
        self._metrics: Metrics | None = None
        self.app = self._make_app()
        settings = uvicorn.Config(
            self.app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
        )
        self._uvicorn = _Uvicorn(settings)
        self._serving: asyncio.Task[None] | None = None

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
        self._engine = engine

    async def stop(self) -> None:
        """No new connections; those that are open get CLOSE_GRACE_S for their last words."""
        self._uvicorn.should_exit = True
        if self._serving is not None:
            await self._serving

    @property
    def connections(self) -> list[asyncio.BaseTransport]:
        """Those that are open."""
        open_ones = self._uvicorn.server_state.connections
        return [connection.transport for connection in open_ones]

    def _make_app(self) -> FastAPI:
        # No pages of documentation: they fetch scripts from elsewhere.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        for error in EXPECTED_ERRORS:
            app.add_exception_handler(error, _on_error)
        app.add_exception_handler(Exception, _on_error)
        app.add_exception_handler(HTTPException, _on_http_exception)
        app.add_exception_handler(ClientDisconnect, _on_client_gone)
        app.get("/health")(self._health)
        app.get("/metrics")(self._show_metrics)
        app.get("/v1/models")(self._models)
        app.get("/v1/models/{name:path}")(self._model)
        app.post("/v1/completions")(self._completions)
        app.post("/v1/chat/completions")(self._chat)
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

    async def _models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def _model(self, name: str) -> Response:
        card = self._card()
        if name != card["id"]:
            raise ModelNotFound("model", f"{name!r} is not served here; {card['id']!r} is")
        return JsonResponse(card)

    async def _health(self) -> Response:
        """Readiness: 200 only while new requests are taken."""
        engine = self._engine
        if engine is None:
            status, message = "loading", "the model is still loading"
        elif not engine.healthy:
            status, message = "failed", engine.state_message or "the engine makes no progress"
        elif engine.state_message:
            status, message = "draining", engine.state_message
        else:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": status, "message": message}, 503)

    async def _show_metrics(self) -> Response:
        self._ready()
        assert self._metrics is not None
        return Response(await self._metrics.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    # What they share

    async def _generate(
        self, request: Request, make_call: MakeCall, make_answer: MakeAnswer
    ) -> Response:
        engine = self._ready()
        request_id = _request_id(request)
        body = await self._body(request)

        async def begin() -> tuple[Call, Outputs]:
            call = await asyncio.to_thread(make_call, engine, body, request_id)
            return call, Outputs(await submit_all(engine, call.requests))

        begun = await unless_disconnected(request.receive, begin())
        if begun is None:
            return Response(status_code=CLIENT_GONE)
        call, outputs = begun
        headers = {"X-Request-Id": _header(call.id)}
        answer = make_answer(engine.tokenizer, call)
        if call.stream:
            return EventStream(stream_events(call, answer, outputs), outputs.close, headers)
        content = await unless_disconnected(request.receive, reply(call, answer, outputs))
        if content is None:
            return Response(status_code=CLIENT_GONE)
        return JsonResponse(content, headers=headers)

    async def _work(self, request: Request, work: Work) -> Response:
        engine = self._ready()
        body = await self._body(request)
        return JsonResponse(await asyncio.to_thread(work, engine, body))

    async def _body(self, request: Request) -> bytes:
        """Raises TooLarge before it holds more than the limit."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise WrongType("body", f"Content-Type must be application/json, got {kind!r}")
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
