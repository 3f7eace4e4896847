"""What the Hopper attention kernels are made of: products, the running softmax, page loads.

All for bodies of Pallas Mosaic GPU kernels, in whose words a warpgroup is 128 threads and a tile is
an array in registers in the layout of its tensor cores (`WGMMA`: at least 64 rows). Scores live in
base 2: `log2(e) / sqrt(head_dim)` goes into one multiplication, and exponentials are `exp2`.

The interpreter runs no product whose left side is in registers. Kernels therefore take
`interpretable`: the weights then go through shared memory. It is the same kernel otherwise, slower.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -1e30  # finite: masked scores must not make NaN
SMS = 132  # of an H100
TILE_ROWS = 64  # rows that the tensor cores take at a time
ROW_GROUP = 8  # rows of one swizzled tile in shared memory: what a copy's place must divide by
HEAD_DIMS = (64, 128)
WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)  # one number for each row of a tile
COLUMNS = WGMMA.reduce(0)  # one number for each column

# Refs have no public type that says what they refer to; accumulators and transforms none that a
# type checker can make.
Ref = Any
_accumulator: Any = plgpu.WGMMAAccumulatorRef
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform


class Softmax(NamedTuple):
    """A softmax-weighted sum in the making: base-2 maximum, sum, and unnormalised values."""

    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    values: Float[Array, "rows head_dim"]


def swizzled(shape: tuple[int, ...], dtype=jnp.bfloat16) -> Any:
    """Shared memory for tiles that TMA writes and the tensor cores read: 128-byte swizzle."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = _tiling((ROW_GROUP, columns)), _swizzle(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def score_scale(head_dim: int) -> float:
    """What a product of query and key is multiplied by to be a base-2 score."""
    return LOG2_E / math.sqrt(head_dim)


def fill(shape: tuple[int, ...], value, layout: Any = WGMMA) -> jax.Array:
    """A tile, or its row or column, of one float32 number."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def empty_softmax(rows: int, head_dim: int) -> Softmax:
    """Of no keys."""
    return Softmax(
        fill((rows,), NEG_INF, ROWS), fill((rows,), 0.0, ROWS), fill((rows, head_dim), 0.0)
    )


def qk(q: Ref, k: Ref) -> Float[Array, "rows keys"]:
    """Products of all queries and keys, both `[tokens, head_dim]` in swizzled shared memory."""

    def multiply(scores):
        plgpu.wgmma(scores, q, k.transpose((1, 0)))
        return scores[...]

    return pl.run_scoped(multiply, _accumulator((q.shape[0], k.shape[0]), jnp.float32))


def pv(
    values: Float[Array, "rows head_dim"],
    weights: Float[Array, "rows keys"],
    v: Ref,
    weights_smem: Ref | None,
) -> Float[Array, "rows head_dim"]:
    """`values` plus the weighted sum of `v` `[keys, head_dim]`. weights_smem: None for weights in
    registers; else swizzled `[rows, keys]`, for the interpreter."""
    weights = weights.astype(v.dtype)
    if weights_smem is None:
        return pl.run_state(lambda sums: plgpu.wgmma(sums, weights, v))(_accumulator.init(values))
    weights_smem[...] = weights
    plgpu.commit_smem()

    def multiply(sums):
        plgpu.wgmma(sums, weights_smem, v)
        return sums[...]

    return values + pl.run_scoped(multiply, _accumulator(values.shape, jnp.float32))


def mask_keys(
    scores: Float[Array, "rows keys"], first: Int[Array, ""], num_keys: Int[Array, ""]
) -> Float[Array, "rows keys"]:
    """Scores of the keys `first`, `first + 1`, ... with those from `num_keys` on masked."""
    keys = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
    return jnp.where(keys < num_keys - first, scores, NEG_INF)


def softmax_step(
    softmax: Softmax, scores: Float[Array, "rows keys"], v: Ref, weights_smem: Ref | None
) -> Softmax:
    """With more keys, whose base-2 scores and values these are. Of every row at least one key so
    far must be unmasked."""
    maximum = jnp.maximum(softmax.maximum, scores.max(axis=1))
    keep = jnp.exp2(softmax.maximum - maximum)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(maximum, scores.shape, [0]))
    total = softmax.total * keep + weights.sum(axis=1)
    values = softmax.values * lax.broadcast_in_dim(keep, softmax.values.shape, [0])
    return Softmax(maximum, total, pv(values, weights, v, weights_smem))


def normalised(softmax: Softmax) -> tuple[Float[Array, "rows head_dim"], Float[Array, " rows"]]:
    """The weighted mean, and the base-2 logarithm of the sum of exponentials; of no keys: 0, and a
    logarithm so small that it counts for nothing."""
    total = jnp.maximum(softmax.total, 1e-30)
    mean = softmax.values / lax.broadcast_in_dim(total, softmax.values.shape, [0])
    return mean, softmax.maximum + jnp.log2(total)


def merged(softmax: Softmax, mean: Float[Array, "rows head_dim"], log2_sum) -> Softmax:
    """With the result of other keys, as `normalised` gives it."""
    maximum = jnp.maximum(softmax.maximum, log2_sum)
    keep, weight = jnp.exp2(softmax.maximum - maximum), jnp.exp2(log2_sum - maximum)
    shape = mean.shape
    values = softmax.values * lax.broadcast_in_dim(keep, shape, [0])
    values += mean * lax.broadcast_in_dim(weight, shape, [0])
    return Softmax(maximum, softmax.total * keep + weight, values)


def pages_of_block(block_keys: int, page_tokens: int) -> int:
    """Pages that a block of keys has to be put together from."""
    return max(1, block_keys // page_tokens)


def page_loads(
    pool: Ref,
    k: Ref,
    v: Ref,
    barrier: Ref,
    page_of: Any,
    block: Int[Array, ""],
    num_keys: Int[Array, ""],
    *,
    first_row: Int[Array, ""],
    values_offset: int,
    page_rows: int,
    page_tokens: int,
) -> None:
    """Starts the copies of one block of a head's keys and values out of its pages.

    pool: rows `[n, head_dim]`. k, v: swizzled `[keys, head_dim]`. barrier: of two arrivals a page
    (`pages_of_block`). page_of: from a place in the sequence's page table to the page. first_row:
    of the head in page 0 of the layer's keys; its values are `values_offset` rows on. Past the
    last page with keys, that one is read again: what lies there must be masked."""
    block_keys = k.shape[0]
    count = pages_of_block(block_keys, page_tokens)
    rows = block_keys // count
    last = lax.div(num_keys - 1, jnp.int32(page_tokens))
    for i in range(count):
        token = block * block_keys + i * rows
        place = lax.div(token, jnp.int32(page_tokens))
        inside = 0 if count > 1 else lax.rem(token, jnp.int32(page_tokens))
        row = first_row + page_of(jnp.minimum(place, last)) * page_rows + inside
        target = pl.ds(i * rows, rows)
        plgpu.copy_gmem_to_smem(pool.at[pl.ds(row, rows)], k.at[target], barrier)
        plgpu.copy_gmem_to_smem(pool.at[pl.ds(row + values_offset, rows)], v.at[target], barrier)


def check_page_tokens(page_tokens: int) -> None:
    """Raises ValueError for pages in decode layout that blocks of keys cannot be made of."""
    if page_tokens < 16 or (page_tokens % TILE_ROWS and TILE_ROWS % page_tokens):
        raise ValueError(f"page_tokens: must be 16, 32 or a multiple of 64, got {page_tokens}")


def check_pool(pool: jax.Array, num_heads: int) -> None:
    """Raises ValueError, naming argument and limit, for a pool that the kernels cannot read."""
    if pool.dtype != jnp.bfloat16:
        raise ValueError(f"pool: must be bfloat16, got {pool.dtype}")
    layers, two, pages, page_rows, head_dim = pool.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: must be 64 or 128, got {head_dim}")
    if page_rows % num_heads:
        raise ValueError(f"pool: page_rows ({page_rows}) must be a multiple of {num_heads} heads")
    check_page_tokens(page_rows // num_heads)
    if layers * two * pages * page_rows >= 2**31:
        raise ValueError(
            f"pool: {layers * two * pages * page_rows} rows; int32 can name fewer than 2**31"
        )
