"""What each failure is called over HTTP: a status, and OpenAI's error object that names the field.

The messages of the engine's errors begin with the field, as those over gRPC do.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from starlette.responses import Response

from conflux_jax.endings import ReadTooSlowly
from conflux_jax.engine import EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import InvalidRequest, OutOfRange, QueueFull
from conflux_jax.serve.auth import Unauthenticated
from conflux_jax.serve.errors import ModelNotFound, NoEstimate

MAX_MESSAGE_CHARS = 1000  # a message quotes what was wrong, which may be megabytes
RETRY_AFTER_S = 1


class TooLarge(InvalidRequest):
    """A body past max_message_mib."""


class WrongType(InvalidRequest):
    """A body that is not said to be JSON. A page of another origin may send a browser's other
    types to this machine without asking; JSON it may not."""


class Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


# First match wins: most of these are InvalidRequests.
KINDS: tuple[tuple[type[Exception], Kind], ...] = (
    (ModelNotFound, Kind(404, "invalid_request_error", "model_not_found")),
    (TooLarge, Kind(413, "invalid_request_error", "body_too_large")),
    (WrongType, Kind(415, "invalid_request_error")),
    (OutOfRange, Kind(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, Kind(400, "invalid_request_error")),
    (NoEstimate, Kind(409, "invalid_request_error", "no_estimate")),
    (QueueFull, Kind(429, "rate_limit_error", "queue_full")),
    (ReadTooSlowly, Kind(408, "invalid_request_error", "read_too_slowly")),
    (Unavailable, Kind(503, "service_unavailable_error")),
    (EngineFailed, Kind(500, "server_error")),
    (Unauthenticated, Kind(401, "invalid_request_error", "invalid_api_key")),
)
EXPECTED_ERRORS = tuple(kind for kind, _ in KINDS)


def kind_of(error: Exception) -> Kind:
    for kind, answer in KINDS:
        if isinstance(error, kind):
            return answer
    return Kind(500, "server_error")


def error_object(error: Exception) -> dict[str, Any]:
    """`{"error": {...}}`. `param` is the field to change, where there is one. Of an error that
    nobody expected the client hears nothing more: its text may be anything."""
    kind = kind_of(error)
    expected = isinstance(error, EXPECTED_ERRORS)
    message = _cut(str(error)) if expected else "internal error"
    param = error.field if isinstance(error, InvalidRequest) else None
    return {
        "error": {"message": message, "type": kind.type, "param": param, "code": kind.code},
    }


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."


def error_response(error: Exception) -> Response:
    status = kind_of(error).status
    headers = {"Retry-After": str(_retry_after_s(error))} if status in (429, 503) else None
    return JsonResponse(error_object(error), status, headers)


def _retry_after_s(error: Exception) -> int:
    """Whole seconds, as the header has them."""
    return math.ceil(error.retry_after_s) if isinstance(error, QueueFull) else RETRY_AFTER_S


def other_error_response(status: int, message: str, headers: Any = None) -> Response:
    """For what the router refuses: an unknown path, a wrong method."""
    kind = "invalid_request_error"
    error = {"message": _cut(message), "type": kind, "param": None, "code": None}
    return JsonResponse({"error": error}, status, headers)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(content: Any) -> bytes:
    """UTF-8. Half a surrogate pair, which a client can send and an error quote, is none; as a
    JSON escape it may be there."""
    return _ENCODER.encode(content).encode("utf-8", "backslashreplace")


def renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """The same error under the name that the client's API has for the field."""
    name = names.get(error.field)
    if name is None:
        return error
    return type(error)(name, str(error).removeprefix(f"{error.field}: "))
