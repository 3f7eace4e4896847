"""Weights of an Orbax checkpoint: written by Orbax, tensor by tensor, and read share by share.

A converted directory holds `conflux_jax.json` (the spec), `weights` (one Orbax checkpoint, its
arrays under Hugging Face names and layouts) and the tokenizer's files. Nothing in it depends on a
mesh: which heads a device holds is settled when it is loaded, and then only that share is read.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from conflux_jax.models.loading import ORBAX_SPEC_FILE
from conflux_jax.models.loading.huggingface_config import read_json
from conflux_jax.models.loading.tensors import check_shapes, check_spec, expected_shapes
from conflux_jax.models.spec import ModelError, ModelSpec, Part, RopeScaling, WeightSource

WEIGHTS = "weights"
_ORBAX_ITEM = "state"  # the folder in which Orbax keeps a checkpoint's arrays
_VERSION = 1
_CHUNK_BYTES = 1 << 22  # stored apart; a rank's share touches few others' chunks
_GROUP_BYTES = 1 << 28  # handed to Orbax at once, which copies what it gets


class OrbaxSource:
    """A `WeightSource` over a converted directory: `read` fetches the chunks that its part touches.

    It opens Orbax's arrays by TensorStore, the library that Orbax stores them with: Orbax's own
    restore splits an array evenly over devices, and padded or replicated heads are no even split.
    It is also free of JAX, whose devices are not counted yet when a model is opened.

    Raises ModelError, naming file and field, for what is missing, damaged or of another version.
    """

    spec: ModelSpec

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self.spec = read_spec_file(self._directory / ORBAX_SPEC_FILE)
        opening = {name: self._open(name) for name in expected_shapes(self.spec)}
        self._arrays = {name: self._opened(name, future) for name, future in opening.items()}
        shapes = {name: array.shape for name, array in self._arrays.items()}
        check_shapes(self.spec, shapes, str(self._directory))

    def names(self) -> Iterable[str]:
        return self._arrays

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        """One tensor, or part of it, as it is stored."""
        if name not in self._arrays:
            raise ModelError(f"{self._directory}: {name}: no such tensor")
        try:
            return np.asarray(self._arrays[name][part].read().result())
        except ValueError as error:
            raise self._damaged(name, error) from error

    def _open(self, name: str) -> Any:
        root = (self._directory / WEIGHTS / _ORBAX_ITEM).resolve()
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
        spec = {"driver": "zarr3", "kvstore": {**store, "path": f"{name}/"}}
        return tensorstore.open(spec, open=True, read=True)

    def _opened(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            if "NOT_FOUND" in str(error):
                path = self._directory / WEIGHTS
                raise ModelError(f"{path}: {name}: this tensor is missing") from error
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, error: Exception) -> ModelError:
        return ModelError(f"{self._directory / WEIGHTS}: {name}: cannot be read: {error}")


def write_checkpoint(source: WeightSource, directory: Path, dtype: Any = None) -> int:
    """Writes spec and weights into `directory`, which exists; returns the bytes of the weights.

    A group of tensors at a time, so that no more of a model is in memory than one of these and
    Orbax's copy of it. dtype: what tensors are rounded to; None keeps each as the source has it.
    """
    from orbax.checkpoint.experimental import v1 as ocp

    (directory / ORBAX_SPEC_FILE).write_text(_spec_text(source.spec), encoding="utf-8")
    weights = str(directory.resolve() / WEIGHTS)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.use_compression = False  # saves a quarter; reading takes far longer
    total, group = 0, {}
    with context:
        for name in source.names():
            group[name] = np.asarray(source.read(name), dtype)
            total += group[name].nbytes
            if sum(array.nbytes for array in group.values()) >= _GROUP_BYTES:
                ocp.partial.save(weights, group)
                group = {}
        if group:
            ocp.partial.save(weights, group)
        ocp.partial.finalize(weights)
    return total


def _spec_text(spec: ModelSpec) -> str:
    return json.dumps({"version": _VERSION, "spec": dataclasses.asdict(spec)}, indent=1) + "\n"


def read_spec_file(path: Path) -> ModelSpec:
    """The spec that `write_checkpoint` wrote. Raises ModelError that names file and field."""
    content = read_json(path)
    if content.get("version") != _VERSION:
        raise ModelError(
            f"{path}: version: only {_VERSION} is read, got {content.get('version')!r}; "
            "convert the model again"
        )
    values = content.get("spec")
    spec = _typed(ModelSpec, values, path, "spec")
    check_spec(spec, str(path))
    return spec


def _typed(kind: Any, values: Any, path: Path, field: str) -> Any:
    """`values` of a JSON file as the type that a field of ModelSpec is declared with."""
    if kind in (ModelSpec, RopeScaling):
        if not isinstance(values, dict):
            raise ModelError(f"{path}: {field}: must be an object, got {values!r}")
        hints = typing.get_type_hints(kind)
        if strange := sorted(set(values) ^ set(hints)):
            problem = "is missing" if strange[0] in hints else "is no field of a model"
            raise ModelError(f"{path}: {field}.{strange[0]}: {problem}")
        return kind(**{k: _typed(hints[k], v, path, f"{field}.{k}") for k, v in values.items()})
    if kind == (RopeScaling | None):
        return None if values is None else _typed(RopeScaling, values, path, field)
    if kind == tuple[int, ...]:
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ModelError(f"{path}: {field}: must be a list of integers, got {values!r}")
        return tuple(values)
    if type(values) is not kind and not (kind is float and type(values) is int):
        raise ModelError(f"{path}: {field}: must be {kind.__name__}, got {values!r}")
    return kind(values)
