"""Decode attention on Hopper: one query a row against its pages, in one launch.

The work is a line of items, each a block of 64 keys of one row and KV head, rows in order. Every
program takes an equal stretch of it, so one long row fills the chip as well as many short ones do.
Where a stretch begins or ends inside a (row, head), the program leaves a partial result in memory;
whoever comes last there merges them by their log-sum-exps.

In a program one warpgroup copies keys and values into a ring of shared memory, the other multiplies
them. The queries that share a KV head are rows of one tile, so each key is read once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.building_blocks import LN_2, SMS, TILE_ROWS, check_pool
from pallas_kernels.decode_kernel import (
    BLOCK_KEYS,
    DecodeShape,
    HeadRows,
    decode_kernel,
    decode_scratch,
    merge_kernel,
)


def decode_attention(
    q: Float[Array, "rows kv_heads q_per_kv head_dim"],
    new_k: Float[Array, "rows kv_heads head_dim"],
    new_v: Float[Array, "rows kv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    context_lens: Int[Array, " rows"],
    *,
    programs: int = SMS,
    interpretable: bool = False,
) -> tuple[Float[Array, "rows kv_heads q_per_kv head_dim"], Float[Array, "rows kv_heads q_per_kv"]]:
    """One query token a row against `context_lens` tokens in the pool and its own key and value,
    which are not in the pool yet. Returns the result in bfloat16 and the natural logarithm of the
    sum of exponentials of the scaled scores, in float32.

    All arrays but the indices (int32) are bfloat16. A page is `[kv_heads, page_tokens]` rows of
    `head_dim` 64 or 128, with 16, 32 or a multiple of 64 tokens; up to 64 query heads share a KV
    head. Rows may have any context, 0 (padding) included; their pages' unused slots must be finite.
    Raises ValueError that names the argument that breaks a limit."""
    rows, kv_heads, q_per_kv, head_dim = q.shape
    check_pool(pool, kv_heads)
    for name, array in (("q", q), ("new_k", new_k), ("new_v", new_v)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name}: must be bfloat16, got {array.dtype}")
    per_kv = HeadRows(0, kv_heads, 1, inner=kv_heads)
    shape = DecodeShape(
        rows,
        kv_heads,
        1,
        q_per_kv,
        head_dim,
        pool.shape[3] // kv_heads,
        q=HeadRows(0, kv_heads * q_per_kv, q_per_kv, inner=kv_heads),
        k=per_kv,
        v=per_kv,
        programs=programs,
        interpretable=interpretable,
    )
    q, new_k, new_v = (x.reshape(-1, head_dim) for x in (q, new_k, new_v))
    plan = decode_plan(context_lens, kv_heads, programs)
    return decode_rows(shape, plan, q, new_k, new_v, pool, layer, page_table, context_lens)


def decode_plan(
    context_lens: Int[Array, " rows"], kv_heads: int, programs: int
) -> Int[Array, "programs fields"]:
    """Where each program's stretch begins: see PLAN_FIELDS. The same for all layers."""
    blocks = num_blocks(context_lens)
    ends = jnp.cumsum(blocks * kv_heads)
    share = (ends[-1] + (programs - 1)) // programs
    first = jnp.minimum(jnp.arange(programs) * share, ends[-1])
    stop = jnp.minimum(first + share, ends[-1])

    def place(item):
        row = jnp.sum(ends[None] <= item[:, None], axis=1)
        row = jnp.minimum(row, len(context_lens) - 1)
        inside = item - (ends[row] - blocks[row] * kv_heads)
        return row, inside // blocks[row], inside % blocks[row]

    row, head, block = place(first)
    last_row, last_head, _ = place(jnp.maximum(stop - 1, first))
    pieces = (last_row - row) * kv_heads + last_head - head + 1
    pieces = jnp.where(stop > first, pieces, 0)
    return jnp.stack([row, head, block, pieces, jnp.full_like(row, share)], axis=1, dtype=jnp.int32)


def decode_rows(
    shape: DecodeShape,
    plan: Int[Array, "programs fields"],
    q: Float[Array, "q_rows head_dim"],
    new_k: Float[Array, "k_rows head_dim"],
    new_v: Float[Array, "v_rows head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    context_lens: Int[Array, " rows"],
    tickets: Int[Array, " programs"] | None = None,
) -> tuple[Float[Array, "rows kv_heads q_per_kv head_dim"], Float[Array, "rows kv_heads q_per_kv"]]:
    """`decode_attention` with queries, keys and values wherever `shape` says that they stand in
    flat arrays, which may be one and the same.

    tickets: int32 zeros in memory of their own, in which the kernel counts and which it leaves as
    they were: so no operand changes, and launches one after the other may share them. With them it
    is one launch; without, a second one merges the results of what was divided among programs."""
    shape.check()
    check_pool(pool, shape.kv_heads)
    shape = replace(shape, merges=tickets is not None)
    flat_pool = pool.reshape(-1, shape.head_dim)
    operands = plan, context_lens, page_table, layer.reshape(1), q, new_k, new_v, flat_pool
    results, parts = result_types(shape)
    decode = _launch(shape)(
        partial(decode_kernel, shape, pool.shape),
        out_type=(*results, *parts),
        num_threads=2,
        kernel_name="decode_attention",
    )
    out, lse, *parts = decode(*operands, *(() if tickets is None else (tickets,)))
    if tickets is None:
        out, lse = merge_divided(shape, plan, context_lens, out, lse, *parts)
    by_head = shape.num_rows, shape.kv_heads, shape.group
    lse = lse[:, : shape.group].reshape(by_head) * LN_2
    return out.reshape(*by_head, shape.head_dim), lse


def _launch(shape: DecodeShape) -> Any:
    return partial(
        plgpu.kernel,
        scratch_types=decode_scratch(shape),
        grid=(shape.programs,),
        grid_names=("program",),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )


def merge_divided(
    shape: DecodeShape,
    plan: Int[Array, "programs fields"],
    context_lens: Int[Array, " rows"],
    out: Float[Array, "out_rows head_dim"],
    lse: Float[Array, "segments tile"],
    parts: Float[Array, "part_rows head_dim"],
    part_lse: Float[Array, "parts tile"],
) -> tuple[Float[Array, "out_rows head_dim"], Float[Array, "segments tile"]]:
    """`out` and `lse` with the results of what the kernel has divided among programs."""
    results, _ = result_types(shape)
    merge = _launch(shape)(
        partial(merge_kernel, shape), out_type=results, num_threads=1, kernel_name="decode_merge"
    )
    divided = _is_divided(plan, context_lens, shape.kv_heads)[:, None]
    merged_out, merged_lse = merge(plan, context_lens, parts, part_lse)
    out = jnp.where(jnp.repeat(divided, shape.group, axis=0), merged_out, out)
    return out, jnp.where(divided, merged_lse, lse)


def result_types(shape: DecodeShape):
    """Of the results of all (row, head), and of the programs' partial ones."""
    segments = shape.num_rows * shape.kv_heads
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    results = (
        jax.ShapeDtypeStruct((segments * shape.group, shape.head_dim), jnp.bfloat16),
        f32((segments, TILE_ROWS)),
    )
    parts = (
        f32((2 * shape.programs * shape.part_tile, shape.head_dim)),
        f32((2 * shape.programs, TILE_ROWS)),
    )
    return results, parts


def _is_divided(
    plan: Int[Array, "programs fields"], context_lens: Int[Array, " rows"], kv_heads: int
) -> Bool[Array, " segments"]:
    """Of each (row, head), whether more than one program has a part of it."""
    blocks = jnp.repeat(num_blocks(context_lens), kv_heads)
    ends, share = jnp.cumsum(blocks), plan[0, -1]
    return (ends - blocks) // share < (ends - 1) // share


def num_blocks(context_lens: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Items of a row and head; a row without context has one as well, its own key."""
    return jnp.maximum((context_lens + (BLOCK_KEYS - 1)) // BLOCK_KEYS, 1)
