"""Weights of a Hugging Face directory: config.json and safetensors, one file or sharded."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from conflux_jax.models.loading.huggingface_config import read_json, read_spec
from conflux_jax.models.loading.tensors import Shape, check_shapes
from conflux_jax.models.spec import ModelError, ModelSpec, Part

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_PIECE_BYTES = 1 << 24  # of two tensors that are compared
_HEAD = "lm_head.weight"
_OLD_BUFFERS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: Shape
    start: int  # bytes from the start of the file
    end: int

    def data(self) -> np.ndarray:
        """The bytes, mapped and not yet read."""
        return np.asarray(np.memmap(self.file, np.uint8, "r", self.start, (self.end - self.start,)))

    def pieces(self) -> Iterator[np.ndarray]:
        data = self.data()
        return (data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES))


class HuggingFaceSource:
    """A `WeightSource` over memory-mapped safetensors: `read` copies nothing.

    Raises ModelError, naming file and field, for whatever this engine would compute differently
    and for files that are missing, cut short or do not fit config.json.
    """

    spec: ModelSpec

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self.spec = read_spec(self._directory)
        self._tensors = _find_tensors(self._directory)
        if self.spec.tie_word_embeddings and self._has_own_head():
            self.spec = dataclasses.replace(self.spec, tie_word_embeddings=False)
        found = {name: t.shape for name, t in self._tensors.items() if self._is_used(name)}
        self._shapes = check_shapes(self.spec, found, str(self._directory))
        for name in self._shapes:
            dtype = self._tensors[name].dtype
            if dtype not in _DTYPES:
                raise ModelError(
                    f"{self._tensors[name].file}: {name}: type {dtype} is not read; "
                    f"{', '.join(_DTYPES)} are"
                )

    def names(self) -> Iterable[str]:
        return self._shapes

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        """One tensor, or part of it, as it is stored: a read-only view of the file."""
        if name not in self._shapes:
            raise ModelError(f"{self._directory}: {name}: no such tensor")
        tensor = self._tensors[name]
        return tensor.data().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)[part]

    def _has_own_head(self) -> bool:
        """Whether a model that says its head is tied stores another one, as some fine-tuned ones
        do. That head counts, as in transformers 5; a mere copy of the embedding does not."""
        head = self._tensors.get(_HEAD)
        embedding = self._tensors.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return False
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
            return True
        pieces = zip(head.pieces(), embedding.pieces(), strict=True)
        return not all(np.array_equal(a, b) for a, b in pieces)

    def _is_used(self, name: str) -> bool:
        """False for what checkpoints hold beside the weights: buffers that old versions saved, and
        a copy of the embedding as the head of a tied model."""
        if name == _HEAD and self.spec.tie_word_embeddings:
            return False
        return not name.endswith(_OLD_BUFFERS)


def _find_tensors(directory: Path) -> dict[str, _Tensor]:
    """Name -> place of every tensor of the checkpoint. A single file wins over an index, as in
    transformers."""
    if (directory / _WEIGHTS).is_file():
        return _read_header(directory / _WEIGHTS)
    index = directory / _INDEX
    if not index.is_file():
        raise ModelError(f"{directory}: neither {_WEIGHTS} nor {_INDEX} is there")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ModelError(f"{index}: weight_map: must say which file holds each tensor")
    headers: dict[str, dict[str, _Tensor]] = {}
    tensors = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{index}: weight_map: {name}: {file_name!r} is no file name")
        if file_name not in headers:
            headers[file_name] = _read_header(directory / file_name)
        if name not in headers[file_name]:
            raise ModelError(f"{directory / file_name}: {name}: this tensor is missing")
        tensors[name] = headers[file_name][name]
    return tensors


def _read_header(path: Path) -> dict[str, _Tensor]:
    """The table of one safetensors file: a length, a JSON header, then the bytes. Read here, and
    not by the safetensors package, because numpy's side of that knows no bfloat16.
    https://github.com/huggingface/safetensors#format
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path}: is truncated or no safetensors file ({size:,} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is damaged: no table of tensors")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, base: int, size: int) -> _Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (base + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {name}: its entry in the header is damaged") from error
    if end > size:
        raise ModelError(f"{path}: is truncated: {name} ends at byte {end:,} of {size:,}")
    itemsize = np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else None
    if start < base or (itemsize and end - start != math.prod(shape) * itemsize):
        raise ModelError(f"{path}: {name}: {end - start} bytes do not hold {dtype} {shape}")
    return _Tensor(path, dtype, shape, start, end)
