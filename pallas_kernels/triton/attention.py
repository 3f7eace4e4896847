# pyright: reportMissingImports=false
"""Decode and prefill attention in Triton: the Hopper kernels' arguments and results.

Importing this needs `jax-triton`. Tiles are plain: 128 queries (or a KV head's group of them)
against 64 keys, whose copies the compiler overlaps with the products (`num_stages`). Prefill takes
the Hopper kernel's plan, whose longest units begin first; decode splits each row evenly.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
from jaxtyping import Array, Float, Int

from pallas_kernels.building_blocks import SMS, check_pool, score_scale
from pallas_kernels.prefill_attention import check_prefill
from pallas_kernels.prefill_plan import BLOCK_QUERIES, ITEM_FIELDS, PrefillPlan
from pallas_kernels.triton import programs

KEYS = 64  # of a tile
LEAST_GROUP = 16  # rows of the smallest product
MAX_SPLITS = 64


def prefill_attention(
    qkv: Float[Array, "tokens qkv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    plan: PrefillPlan,
    *,
    kv_heads: int,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads block_rows"]]:
    """As `pallas_kernels.prefill_attention.prefill_attention`, limits and results alike, but that
    the plan must not have its keys divided."""
    check_prefill(qkv, pool, kv_heads)
    if plan.parts is not None:
        raise ValueError("plan: must not be of divide_keys, whose parts nothing merges here")
    tokens, qkv_heads, head_dim = qkv.shape
    q_heads, max_items = qkv_heads - 2 * kv_heads, plan.items.shape[0]
    return jax_triton.triton_call(
        layer.reshape(1),
        plan.items.reshape(-1),
        plan.num_items.reshape(1),
        plan.runs.reshape(-1),
        plan.page_table.reshape(-1),
        qkv,
        pool,
        kernel=programs.prefill_program,
        out_type=(
            jax.ShapeDtypeStruct((tokens, q_heads, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct((q_heads, max_items * BLOCK_QUERIES), jnp.float32),
        ),
        grid=prefill_grid(qkv, plan, kv_heads),
        name="prefill_attention",
        num_warps=8,
        num_stages=2,
        **prefill_sizes(qkv, pool, plan, kv_heads),
    )


def prefill_grid(qkv: jax.Array, plan: PrefillPlan, kv_heads: int) -> tuple[int]:
    """A program for each unit that there may be, then those that clear rows of no chunk."""
    units = plan.items.shape[0] * (qkv.shape[1] - 2 * kv_heads)
    return (units + -(-qkv.shape[0] // BLOCK_QUERIES),)


def prefill_sizes(
    qkv: jax.Array, pool: jax.Array, plan: PrefillPlan, kv_heads: int
) -> dict[str, Any]:
    """Of `programs.prefill_program`."""
    tokens, qkv_heads, head_dim = qkv.shape
    return {
        "TOKENS": tokens,
        "Q_HEADS": qkv_heads - 2 * kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGES": pool.shape[2],
        "PAGE_ROWS": pool.shape[3],
        "MAX_PAGES": plan.page_table.shape[1],
        "MAX_ITEMS": plan.items.shape[0],
        "ITEM_FIELDS": ITEM_FIELDS,
        "NUM_RUNS": plan.runs.shape[0],
        "QUERIES": BLOCK_QUERIES,
        "KEYS": KEYS,
        "SCALE": score_scale(head_dim),
        "UPCAST": False,
    }


def decode_attention(
    q: Float[Array, "rows kv_heads q_per_kv head_dim"],
    new_k: Float[Array, "rows kv_heads head_dim"],
    new_v: Float[Array, "rows kv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    context_lens: Int[Array, " rows"],
) -> tuple[Float[Array, "rows kv_heads q_per_kv head_dim"], Float[Array, "rows kv_heads q_per_kv"]]:
    """As `pallas_kernels.decode_attention.decode_attention`, limits and results alike. Two
    launches: the parts of all rows, and their sums."""
    check_pool(pool, q.shape[1])
    for name, array in (("q", q), ("new_k", new_k), ("new_v", new_v)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name}: must be bfloat16, got {array.dtype}")
    sizes = decode_sizes(q, pool, page_table)
    rows, kv_heads, group, head_dim = q.shape
    splits = sizes["SPLITS"]
    parts = jax_triton.triton_call(
        q,
        new_k,
        new_v,
        pool,
        layer.reshape(1),
        page_table,
        context_lens,
        kernel=programs.decode_program,
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], splits, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*q.shape[:3], splits), jnp.float32),
        ),
        grid=(rows, kv_heads, splits),
        name="decode_attention",
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    return jax_triton.triton_call(
        *parts,
        kernel=programs.merge_program,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ),
        grid=(rows * kv_heads * group,),
        name="decode_merge",
        num_warps=4,
        **merge_sizes(head_dim, splits),
    )


def decode_sizes(q: jax.Array, pool: jax.Array, page_table: jax.Array) -> dict[str, Any]:
    """Of `programs.decode_program`. Parts of a row: enough for two programs an SM, if its longest
    context has as many tiles."""
    rows, kv_heads, group, head_dim = q.shape
    tiles = math.ceil(page_table.shape[1] * (pool.shape[3] // kv_heads) / KEYS)
    splits = min(MAX_SPLITS, math.ceil(2 * SMS / (rows * kv_heads)), max(tiles, 1))
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "PADDED_GROUP": max(LEAST_GROUP, _power_of_two(group)),
        "HEAD_DIM": head_dim,
        "PAGES": pool.shape[2],
        "PAGE_ROWS": pool.shape[3],
        "MAX_PAGES": page_table.shape[1],
        "SPLITS": splits,
        "KEYS": KEYS,
        "SCALE": score_scale(head_dim),
        "UPCAST": False,
    }


def merge_sizes(head_dim: int, splits: int) -> dict[str, int]:
    """Of `programs.merge_program`."""
    return {"HEAD_DIM": head_dim, "SPLITS": splits, "PADDED": _power_of_two(splits)}


def _power_of_two(number: int) -> int:
    """The next one, itself included."""
    return 1 << (number - 1).bit_length()
