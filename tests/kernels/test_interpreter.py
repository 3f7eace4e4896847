"""What the kernels' tests rest on: races are found, and what nobody wrote is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.interpreter import interpreted

ROWS, WIDTH = 8, 64


def doubling_kernel(waits: bool):
    """Doubles its operand into the first half of its result, by way of shared memory."""

    def body(x, out, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        if waits:
            plgpu.barrier_wait(barrier)
        tile[...] = tile[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(0, ROWS)])
        plgpu.wait_smem_to_gmem(0)
        if not waits:
            plgpu.barrier_wait(barrier)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32),
        scratch_types=[plgpu.SMEM((ROWS, WIDTH), jnp.float32), plgpu.Barrier()],
        grid=(1,),
        grid_names=("program",),
    )


def test_a_kernel_is_interpreted():
    x = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    out = interpreted(doubling_kernel(waits=True), jnp.asarray(x))
    np.testing.assert_array_equal(out[:ROWS], 2 * x)
    assert np.isnan(out[ROWS:]).all()


def test_a_race_is_found():
    with pytest.raises(AssertionError, match="data race"):
        interpreted(doubling_kernel(waits=False), jnp.ones((ROWS, WIDTH)))
    interpreted(doubling_kernel(waits=True), jnp.ones((ROWS, WIDTH)))  # and is forgotten
