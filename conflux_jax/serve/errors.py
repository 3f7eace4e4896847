"""What each failure is called on the wire."""

from __future__ import annotations

import grpc

from conflux_jax.engine import EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import InvalidRequest, OutOfRange, QueueFull

# First match wins: OutOfRange is an InvalidRequest.
STATUS_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (EngineFailed, grpc.StatusCode.INTERNAL),
)
EXPECTED_ERRORS = tuple(kind for kind, _ in STATUS_CODES)


def status_of(error: Exception) -> grpc.StatusCode:
    for kind, code in STATUS_CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL
