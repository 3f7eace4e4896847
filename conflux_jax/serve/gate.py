"""The door of both servers: a token where one is needed, a bound on what is in progress at once,
and the trace that a call belongs to. HTTP's side of it is http_gate.py."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from conflux_jax.config import ServerConfig
from conflux_jax.request import QueueFull
from conflux_jax.serve.auth import Tokens, Unauthenticated
from conflux_jax.serve.errors import refuse
from conflux_jax.serve.trace_context import CURRENT_TRACE, HEADER, parse_traceparent

# Whoever watches over the server has no token, and must not be turned away where it is busy.
OPEN_SERVICE = "/grpc.health.v1.Health/"


class Gate:
    """One for all servers of a process, on one event loop. Raises ConfigError for a bad file of
    tokens."""

    def __init__(self, config: ServerConfig):
        self._tokens = Tokens.of(config)
        self._limit = config.max_streams
        self.num_open = 0

    def check(self, authorization: str | None) -> None:
        """Raises Unauthenticated."""
        if self._tokens is not None:
            self._tokens.check(authorization)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """While a call is in progress. Raises QueueFull where there are max_streams already."""
        if self.num_open >= self._limit:
            raise QueueFull(f"max_streams: {self._limit} calls are in progress; try again later")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class GrpcGate(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate):
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        fields = {key: value for key, value in metadata if isinstance(value, str)}
        CURRENT_TRACE.set(parse_traceparent(fields.get(HEADER)))
        if method.startswith(OPEN_SERVICE):
            return await continuation(handler_call_details)
        try:
            self._gate.check(fields.get("authorization"))
        except Unauthenticated as error:
            return _refusal(error)
        handler = await continuation(handler_call_details)
        return None if handler is None else _counted(handler, self._gate)


def _refusal(error: Exception) -> grpc.RpcMethodHandler:
    """A handler of streams, which a call of any kind may have: no message is read for it."""

    async def answer(messages: Any, context: Any) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(answer)


_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., grpc.RpcMethodHandler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _counted(handler: Any, gate: Gate) -> grpc.RpcMethodHandler:
    """The same handler, within the gate's count. It is called once the first message is here."""
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behaviour = getattr(handler, name)

    async def call(request: Any, context: Any) -> Any:
        try:
            with gate.counted():
                return await behaviour(request, context)
        except QueueFull as error:
            await refuse(context, error)

    async def generate(request: Any, context: Any) -> Any:
        try:
            with gate.counted():
                async for message in behaviour(request, context):
                    yield message
        except QueueFull as error:
            await refuse(context, error)

    counted = generate if inspect.isasyncgenfunction(behaviour) else call
    return make(counted, handler.request_deserializer, handler.response_serializer)
