"""The HTTP server's door (see gate.py), as ASGI around the whole application."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from conflux_jax.request import QueueFull
from conflux_jax.serve.auth import Unauthenticated
from conflux_jax.serve.gate import Gate
from conflux_jax.serve.http_errors import error_response
from conflux_jax.serve.trace_context import CURRENT_TRACE, HEADER, parse_traceparent

# As in gate.py: those who watch over the server. The metrics are for them too, but not for others.
OPEN_PATHS = ("/health", "/live", "/dashboard")  # the page has no data, and asks for a token
UNCOUNTED_PATHS = (*OPEN_PATHS, "/metrics")
CHALLENGE = 'Bearer, Basic realm="conflux_jax"'


class HttpGate:
    """ASGI around the whole of `app`."""

    def __init__(self, app: ASGIApp, gate: Gate):
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        fields = {key: value.decode("latin-1") for key, value in scope["headers"]}
        CURRENT_TRACE.set(parse_traceparent(fields.get(HEADER.encode())))
        path = scope["path"]
        try:
            if path not in OPEN_PATHS:
                self._gate.check(fields.get(b"authorization"))
            if path in UNCOUNTED_PATHS:
                return await self._app(scope, receive, send)
            with self._gate.counted():
                return await self._app(scope, receive, send)
        except (Unauthenticated, QueueFull) as error:  # of the gate: the app answers its own
            response = error_response(error)
            if isinstance(error, Unauthenticated):
                response.headers["WWW-Authenticate"] = CHALLENGE
            await response(scope, receive, send)
