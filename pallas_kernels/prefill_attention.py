"""Prefill attention for Hopper GPUs: ragged chunks, causal, over a paged context (Mosaic GPU).

One persistent launch: every program takes its share of a list of units, longest first. What a unit
is and how it is worked on: `prefill_kernel.py`. What list it is: `prefill_plan.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.building_blocks import HEAD_DIMS, SMS
from pallas_kernels.prefill_kernel import (
    CONSUMERS,
    PrefillRefs,
    PrefillShape,
    consume,
    prefill_scratch,
    produce,
)
from pallas_kernels.prefill_plan import (
    BLOCK_QUERIES,
    FIRST_QUERY,
    LAST_QUERY,
    QUERY_ROW,
    ROW_GRAIN,
    AnyArray,
    PrefillPlan,
)
from pallas_kernels.work_queue import Share

# Of the 65,536 of an SM, in threes of 128 threads.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


@dataclass(frozen=True)
class PrefillTuning:
    """programs: of the persistent launch, one an SM. stages: of the rings of keys and of values;
    None: 128 KiB of both. interpretable: the twin that Pallas' GPU interpreter can run, in which
    the softmax's weights go through shared memory; it is slower."""

    programs: int = SMS
    stages: int | None = None
    interpretable: bool = False


def prefill_attention(
    qkv: Float[Array, "tokens qkv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    plan: PrefillPlan,
    *,
    kv_heads: int,
    tuning: PrefillTuning | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads block_rows"]]:
    """Causal attention of every chunk to its own earlier tokens and to its context in the pool.

    qkv: bfloat16, for each row its query heads, then `kv_heads` keys, then as many values; query
    head h attends to KV head `h // (q_heads / kv_heads)`. The number of rows divides by 8. A row
    need not be a chunk's, but must be finite: tiles reach past the ends of runs.
    pool: bfloat16, pages `[kv_heads, page_tokens]` (prefill layout), `page_tokens` a multiple of 8.
    A used page must be finite where nothing was written; other pages are not read. int32 counts
    rows, never elements: there may be more than 2^31 of those.
    layer: of the pool. plan: from `plan_prefill`. head_dim: 64 or 128, and of any number of heads.

    Returns the output, bfloat16, in which rows of no chunk are zeros, and the log-sum-exp of the
    scaled scores, float32, in the plan's blocks: `by_rows` brings it into the output's order.
    Raises ValueError that names the argument and its limit.
    """
    check_prefill(qkv, pool, kv_heads)
    tuning = tuning or PrefillTuning()
    shape = prefill_shape(qkv, pool, plan, kv_heads, tuning)
    results = (
        jax.ShapeDtypeStruct((shape.tokens, shape.q_heads, shape.head_dim), qkv.dtype),
        jax.ShapeDtypeStruct((shape.q_heads, plan.items.shape[0] * BLOCK_QUERIES), jnp.float32),
    )
    kernel = plgpu.kernel(
        partial(_kernel, shape, tuning.programs),
        out_type=results,
        scratch_types=prefill_scratch(shape),
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="prefill_attention",
        # No sum or maximum here goes across warps, which is what shared memory is kept for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return kernel(*prefill_operands(qkv, pool, layer, plan))


def by_rows(
    block_lse: Float[Array, "q_heads block_rows"], plan: PrefillPlan, num_rows: int
) -> Float[Array, "rows q_heads"]:
    """The kernel's log-sum-exp at the rows that the queries have in `qkv`; elsewhere -inf."""
    row = plan.items[:, QUERY_ROW, None] + jnp.arange(BLOCK_QUERIES)
    is_query = (row >= plan.items[:, FIRST_QUERY, None]) & (row < plan.items[:, LAST_QUERY, None])
    row = jnp.where(is_query, row, num_rows).reshape(-1)
    out = jnp.full((num_rows, block_lse.shape[0]), -jnp.inf)
    return out.at[row].set(block_lse.T, mode="drop")


def prefill_operands(
    qkv: jax.Array, pool: jax.Array, layer: jax.Array, plan: PrefillPlan
) -> tuple[AnyArray, ...]:
    """What a launch is given, in the order of `PrefillRefs`: nothing is moved for it."""
    return (
        layer.reshape(1),
        plan.items.reshape(-1),
        plan.num_items.reshape(1),
        plan.runs.reshape(-1),
        plan.page_table.reshape(-1),
        qkv,
        pool.reshape(-1, pool.shape[4]),
    )


def prefill_shape(
    qkv: jax.Array, pool: jax.Array, plan: PrefillPlan, kv_heads: int, tuning: PrefillTuning
) -> PrefillShape:
    tokens, qkv_heads, head_dim = qkv.shape
    return PrefillShape(
        q_heads=qkv_heads - 2 * kv_heads,
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        pages=pool.shape[2],
        page_rows=pool.shape[3],
        max_pages=plan.page_table.shape[1],
        num_runs=plan.runs.shape[0],
        stages=tuning.stages or 2 * 128 // head_dim,
        interpretable=tuning.interpretable,
    )


def check_prefill(qkv: jax.Array, pool: jax.Array, kv_heads: int) -> None:
    """Raises ValueError that names the argument and its limit."""
    tokens, qkv_heads, head_dim = qkv.shape
    page_rows, rows = pool.shape[3], math.prod(pool.shape[:4])
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"qkv: head_dim must be 64 or 128, got {head_dim}")
    if pool.shape[4] != head_dim:
        raise ValueError(f"pool: head_dim must be that of qkv ({head_dim}), got {pool.shape[4]}")
    for name, array in (("qkv", qkv), ("pool", pool)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name}: must be bfloat16, got {array.dtype}")
    q_heads = qkv_heads - 2 * kv_heads
    if kv_heads < 1 or q_heads < kv_heads or q_heads % kv_heads:
        raise ValueError(
            f"kv_heads: of the {qkv_heads} heads of qkv, those without the 2 * {kv_heads} of keys "
            "and values are the queries', which must be a multiple of kv_heads"
        )
    if tokens % ROW_GRAIN:
        raise ValueError(f"qkv: rows must be a multiple of {ROW_GRAIN}, got {tokens}")
    if page_rows % (ROW_GRAIN * kv_heads):
        raise ValueError(
            f"pool: page_rows ({page_rows}) must be a multiple of {ROW_GRAIN} tokens of each of "
            f"{kv_heads} heads"
        )
    if rows >= 2**31:
        raise ValueError(f"pool: {rows} rows; int32 can name fewer than 2^31")


def _kernel(shape: PrefillShape, programs: int, *operands: Any, **scratch: Any) -> None:
    refs = PrefillRefs(*operands, scratch=scratch)
    share = Share(lax.axis_index("program"), programs)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(shape, refs, warpgroup, share)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(shape, refs, share)
