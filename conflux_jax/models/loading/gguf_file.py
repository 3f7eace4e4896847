"""The GGUF container: metadata and the table of tensors, without reading any tensor.

The `gguf` package's own reader turns every string of a vocabulary into several numpy arrays, which
takes 4 s for SmolLM2's 49,152 tokens; one pass with `struct` takes 0.1 s. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conflux_jax.models.spec import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """`shape` is row-major (the file's own order is the reverse), `offset` absolute in bytes."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GGUFFile:
    """An open GGUF file: `metadata` (arrays of numbers as numpy, of strings as lists), `tensors`,
    and `data`, the file's bytes as a read-only memory map.

    Raises ModelError, naming the file, when it is absent, no GGUF, or ends before its header does.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.data = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{self.path}: cannot be read: {error}") from error
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError) as error:
            raise ModelError(f"{self.path}: is truncated or damaged: {error}") from error

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string field. Raises ModelError, naming file and field, where it is something else."""
        return self._typed(key, default, str, "text")

    def integer(self, key: str, default: int | None = None) -> int | None:
        return self._typed(key, default, int, "an integer")

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self._typed(key, default, int | float, "a number")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        return self._typed(key, default, bool, "true or false")

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: end of sequence, of turn, of message, as far as the file says."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.integer(f"tokenizer.ggml.{key}") for key in keys]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def fail(self, field: str, message: str) -> ModelError:
        return ModelError(f"{self.path}: {field}: {message}")

    def _typed(self, key: str, default: Any, kind: Any, what: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise self.fail(key, f"must be {what}, got {shown!r}")
        return value

    def _parse(self) -> None:
        cursor = _Cursor(memoryview(self.data))
        if cursor.take(4) != _MAGIC:
            raise ModelError(
                f"{self.path}: is not a GGUF file (magic is {self.data[:4].tobytes()!r})"
            )
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        table = [self._tensor(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", _DEFAULT_ALIGNMENT) or _DEFAULT_ALIGNMENT
        start = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: TensorInfo(shape, ggml_type, start + offset)
            for name, shape, ggml_type, offset in table
        }

    def _tensor(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = cursor.string(), cursor.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self.fail(name, f"has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
        return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Reads little-endian values one after another. Raises struct.error past the end."""

    def __init__(self, buffer: memoryview):
        self.buffer = buffer
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.buffer):
            raise struct.error(f"{count} bytes at {self.position} of {len(self.buffer)}")
        taken = self.buffer[self.position : end]
        self.position = end
        return bytes(taken)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} at {self.position}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return [self.value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop of the whole header: 98,052 strings in SmolLM2."""
        unpack, buffer, position = struct.Struct("<Q").unpack_from, self.buffer, self.position
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > len(buffer):
                raise struct.error(f"a string ends at {position} of {len(buffer)}")
            strings.append(str(buffer[start:position], "utf-8"))
        self.position = position
        return strings
