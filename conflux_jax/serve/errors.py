"""What each failure is called on the wire, and how a handler says so."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from conflux_jax.endings import ReadTooSlowly
from conflux_jax.engine import EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import DeadlineUnmet, IdInUse, InvalidRequest, OutOfRange, QueueFull
from conflux_jax.scheduler.estimate import Estimate
from conflux_jax.serve.auth import Unauthenticated

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1000  # a message quotes what was wrong; clients refuse headers past 8 KiB


class ModelNotFound(InvalidRequest):
    """Another model than the one that is served."""


class NoEstimate(RuntimeError):
    """Nothing says how fast this engine is."""


def checked_estimate(estimate: Estimate | None) -> Estimate:
    """Raises NoEstimate."""
    if estimate is None:
        raise NoEstimate(
            "estimate: needs latency_profile, or one iteration so far that prompts have filled"
        )
    return estimate


class Unsupported(RuntimeError):
    """A call of a contract that this engine has no answer to."""


# First match wins: the first four are all InvalidRequests.
STATUS_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (IdInUse, grpc.StatusCode.ALREADY_EXISTS),
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineUnmet, grpc.StatusCode.DEADLINE_EXCEEDED),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoEstimate, grpc.StatusCode.FAILED_PRECONDITION),
    (Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (ReadTooSlowly, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (EngineFailed, grpc.StatusCode.INTERNAL),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
)
EXPECTED_ERRORS = tuple(kind for kind, _ in STATUS_CODES)

Handler = Callable[..., Awaitable[Any]]  # service, request, context


def status_of(error: Exception) -> grpc.StatusCode:
    for kind, code in STATUS_CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def answering(handler: Handler) -> Handler:
    """A method of a service that may raise: its call then ends with the error's status. Of an error
    that nobody expected the client hears nothing more, since its text may be anything."""

    @functools.wraps(handler)
    async def answer(service: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(service, request, context)
        except EXPECTED_ERRORS as error:
            await refuse(context, error)
        except Exception as error:
            if context.done():
                if isinstance(error, grpc.aio.InternalError):  # what was written did not arrive
                    raise asyncio.CancelledError from error
                raise
            logger.exception("%s failed", handler.__name__)
            await abort(context, grpc.StatusCode.INTERNAL, "internal error")

    return answer


async def refuse(context: Any, error: Exception) -> NoReturn:
    code, message = status_of(error), shortened(str(error))
    if isinstance(error, QueueFull):
        status = rpc_status.to_status(retry_status(code, message, error.retry_after_s))
        await abort(context, code, message, status.trailing_metadata)
    await abort(context, code, message)


async def abort(context: Any, code: grpc.StatusCode, message: str, metadata: Any = ()) -> NoReturn:
    """Ends a call. Where its client is gone by now, nobody can be told, and the call ends as one
    that was cancelled: that is no error of the server's, and not for its log."""
    try:
        await context.abort(code, message, metadata)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


def retry_status(code: grpc.StatusCode, message: str, retry_after_s: float) -> status_pb2.Status:
    """With a google.rpc.RetryInfo."""
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(retry_after_s * 1e9))
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=message, details=[detail])


def shortened(message: str) -> str:
    """As much as a status may carry."""
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + "..."
