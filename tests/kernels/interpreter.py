"""Running Mosaic GPU kernels on a CPU, with their data races looked for, and pools to run them on.

Pallas' GPU interpreter executes one program after the other, the warpgroups of a program at once,
and follows which access is ordered before which. It reports a race and goes on, so `interpreted`
asserts that there was none. What it cannot see: a missing wait for a store from shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.reference import page_rows_of

QUICK = pytest.mark.kernels_quick  # for one case of each kernel
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
MAX_ERROR, MAX_RELATIVE_NORM = 2e-2, 4e-3  # of bfloat16 kernels, against float64


def interpreted(run: Callable, *operands):
    """`run(*operands)` with its kernels interpreted, as NumPy arrays.

    What a kernel has not written, in global or shared memory, is NaN. Fails where accesses race.
    """
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    mesh = AbstractMesh((), (), abstract_device=H100)
    try:
        with use_abstract_mesh(mesh), plgpu.force_gpu_interpret_mode(params):
            results = jax.tree.map(np.asarray, jax.jit(run)(*operands))
        races = interpret_pallas_call.get_races()
        assert races is not None and not races.races_found, "data race: see the output"
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return results


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """As close as bfloat16 with float32 sums must be: the largest error, and that of the whole."""
    error = np.asarray(actual, np.float64) - expected
    assert np.isfinite(error).all()
    assert np.abs(error).max() <= MAX_ERROR
    assert np.linalg.norm(error) <= MAX_RELATIVE_NORM * np.linalg.norm(expected)


def bfloat16_normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers that bfloat16 has, in float64: the oracle sees what the kernel sees."""
    return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float64)


class PagedPool:
    """A pool in which only one layer's pages in use are numbers; the rest is NaN. Slots of a used
    page past its sequence may be read, but must not count: NaN as keys, large as values."""

    layers, layer = 3, 1

    def __init__(self, rng: np.random.Generator, pages: int, page_rows: int, head_dim: int):
        self.array = np.full((self.layers, 2, pages, page_rows, head_dim), np.nan, np.float32)
        self._free = [int(page) for page in rng.permutation(pages)]

    def store(self, k: np.ndarray, v: np.ndarray, page_tokens: int) -> list[int]:
        """Writes `[tokens, heads, head_dim]` to scattered pages; returns their ids."""
        tokens, heads, head_dim = k.shape
        ids = [self._free.pop() for _ in range(-(-tokens // page_tokens))]
        unused = np.arange(len(ids) * page_tokens).reshape(len(ids), 1, page_tokens, 1) >= tokens
        for kind, sequence in enumerate((k, v)):
            pages = page_rows_of(sequence, page_tokens).reshape(-1, heads, page_tokens, head_dim)
            pages = np.where(unused, 100.0 if kind else np.nan, pages)
            pages = pages.reshape(-1, heads * page_tokens, head_dim)
            self.array[self.layer, kind, ids] = pages
        return ids

    @property
    def operands(self) -> tuple[jax.Array, jax.Array]:
        """The pool in bfloat16, and the index of its layer in use."""
        return jnp.asarray(self.array, jnp.bfloat16), jnp.int32(self.layer)


def page_table(rows: list[list[int]], width: int) -> jax.Array:
    """Ids of the pages of each row; what a row does not use is a page that no pool has."""
    table = np.full((len(rows), width), 2**30, np.int32)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = ids
    return jnp.asarray(table)
