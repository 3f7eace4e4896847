"""What a call is told whose message is none: INVALID_ARGUMENT, where gRPC itself would say that the
server broke."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from conflux_jax.serve.errors import abort

_MESSAGE = "body: not a message of the type that this method takes"


class _Undecodable:
    """In the place of a request."""


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        kinds = ("unary", "stream")
        kind = f"{kinds[handler.request_streaming]}_{kinds[handler.response_streaming]}"
        check = _checked_stream if handler.request_streaming else _checked
        method = _with_request(check, getattr(handler, kind))
        decode = _decoder(handler.request_deserializer)
        return handler._replace(request_deserializer=decode, **{kind: method})


def _decoder(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable()

    return decode


async def _checked(request: Any, context: Any) -> Any:
    if isinstance(request, _Undecodable):
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, _MESSAGE)
    return request


async def _checked_stream(requests: Any, context: Any) -> Any:
    async def each() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _checked(request, context)

    return each()


def _with_request(check: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, of what `check` makes of its request."""

    async def answer(request: Any, context: Any) -> Any:
        return await method(await check(request, context), context)

    async def generate(request: Any, context: Any) -> Any:
        async for response in method(await check(request, context), context):
            yield response

    return generate if inspect.isasyncgenfunction(method) else answer
