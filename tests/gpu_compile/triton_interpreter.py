# pyright: reportMissingImports=false
"""Triton's own interpreter, run on NumPy arrays in the place of those that it expects."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import triton

POINTERS = {
    np.dtype(ml_dtypes.bfloat16): triton.language.bfloat16,
    np.dtype(np.float32): triton.language.float32,
    np.dtype(np.int32): triton.language.int32,
}


class Pointer:
    """A NumPy array in the form that the interpreter takes arguments in; it works in place."""

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = POINTERS[array.dtype]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Pointer:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def cpu(self) -> Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Pointer:
        return self

    def set_(self, *_: Any) -> None:
        """Nothing to do: it is the array already."""

    def copy_(self, _: Pointer) -> None:
        """Nothing to do: results are where they belong."""


class Launch(NamedTuple):
    """A program of `pallas_kernels.triton.programs` over a grid. operands: names of arrays."""

    program: str
    grid: tuple[int, ...]
    operands: tuple[str, ...]
    sizes: dict[str, Any]


def interpret(
    launches: list[Launch], arrays: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """The arrays after the launches. In a process of its own: Triton is made for its interpreter
    or for compiling when it is first imported."""
    job = folder / "job.pickle"
    job.write_bytes(pickle.dumps((launches, arrays)))
    command = [sys.executable, "-m", __name__, str(job)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return pickle.loads(job.read_bytes())


def main(job: Path) -> None:
    from pallas_kernels.triton import programs

    launches, arrays = pickle.loads(job.read_bytes())
    pointers = {name: Pointer(np.array(array, order="C")) for name, array in arrays.items()}
    for program, grid, operands, sizes in launches:
        getattr(programs, program)[grid](*(pointers[name] for name in operands), **sizes)
    job.write_bytes(pickle.dumps({name: pointer.array for name, pointer in pointers.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
