"""The fields of a JSON body, read by hand so that every error names the field and its limit."""

from __future__ import annotations

import json
from typing import Any

from conflux_jax.request import InvalidRequest

_MISSING = object()


class Fields:
    """A JSON object whose fields are taken one by one; `finish` refuses those that nobody took.

    A field that is null counts as absent, as clients send it. Raises InvalidRequest.
    """

    def __init__(self, body: bytes):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("body", f"is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequest("body", f"must be a JSON object, got {type(value).__name__}")
        self._left = {name: item for name, item in value.items() if item is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def required(self, name: str) -> Any:
        value = self._left.pop(name, _MISSING)
        if value is _MISSING:
            raise InvalidRequest(name, "is required")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise InvalidRequest(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(name, f"must be a string, got {value!r}")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(name, f"must be an integer, got {value!r}")
        if not low <= value <= high:
            raise InvalidRequest(name, f"must be between {low} and {high}, got {value}")
        return value

    def integers(self, name: str) -> list[int]:
        """Required; a list of integers."""
        value = self.required(name)
        if not is_integers(value):
            raise InvalidRequest(name, "must be a list of integers")
        return value

    def finish(self) -> None:
        for name in self._left:
            raise InvalidRequest(name, "no such parameter")


def is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
