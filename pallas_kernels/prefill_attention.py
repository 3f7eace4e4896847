"""Prefill attention for Hopper GPUs: ragged chunks, causal, over a paged context (Mosaic GPU).

One persistent launch: every program takes its share of a list of units, longest first. What a unit
is and how it is worked on: `prefill_kernel.py`. What list it is: `prefill_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from pallas_kernels.prefill_kernel import consume, produce
from pallas_kernels.prefill_memory import (
    CONSUMERS,
    PrefillRefs,
    PrefillShape,
    prefill_scratch,
    store_scratch,
)
from pallas_kernels.prefill_plan import (
    BLOCK,
    BLOCK_QUERIES,
    FIRST_QUERY,
    LAST_QUERY,
    PARTS,
    QUERY_ROW,
    ROW_GRAIN,
    AnyArray,
    PrefillPlan,
)
from pallas_kernels.prefill_results import merge_parts
from pallas_kernels.work_queue import Share

# Of the 65,536 of an SM, in threes of 128 threads.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
OPERANDS = 7  # of `prefill_operands`


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
    tickets: Int[Array, " tickets"] | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads block_rows"]]:
    """Causal attention of every chunk to its own earlier tokens and to its context in the pool.

    qkv: bfloat16, for each row its query heads, then `kv_heads` keys, then as many values; query
    head h attends to KV head `h // (q_heads / kv_heads)`. The number of rows divides by 8. A row
    need not be a chunk's, but must be finite: tiles reach past the ends of runs.
    pool: bfloat16, pages `[kv_heads, page_tokens]` (prefill layout), `page_tokens` a multiple of 8.
    A used page must be finite where nothing was written; other pages are not read. int32 counts
    rows, never elements: there may be more than 2^31 of those.
    layer: of the pool. plan: from `plan_prefill`, or from `divide_keys`, which for few queries
    after long contexts gives more programs something to do. head_dim: 64 or 128, and of any number
    of heads.
    tickets: int32 zeros in memory of their own, `num_tickets` of them, in which the kernel counts
    and which it leaves as they were. With them it is one launch; without, a second one merges what
    the plan has divided.

    Returns the output, bfloat16, in which rows of no chunk are zeros, and the log-sum-exp of the
    scaled scores, float32, in the plan's blocks: `by_rows` brings it into the output's order.
    Raises ValueError that names the argument and its limit.
    """
    check_prefill(qkv, pool, kv_heads)
    tuning = tuning or PrefillTuning()
    shape = prefill_shape(qkv, pool, plan, kv_heads, tuning)
    if tickets is not None and tickets.shape[0] < shape.half_parts:
        raise ValueError(f"tickets: must be at least {shape.half_parts}, got {tickets.shape[0]}")
    operands = prefill_operands(qkv, pool, layer, plan)
    merges = shape.parts > 0 and tickets is not None
    attend = _launch(tuning.programs)(
        partial(_kernel, shape, tuning.programs, merges),
        out_type=shape.result_types,
        scratch_types=prefill_scratch(shape),
        num_threads=CONSUMERS + 1,
        kernel_name="prefill_attention",
    )
    out, lse, *parts = attend(*operands, *((tickets,) if merges else ()))
    if parts and not merges:
        out, lse = merge_divided_keys(shape, tuning.programs, plan, operands, (out, lse, *parts))
    return out, lse


def num_tickets(plan: PrefillPlan, q_heads: int) -> int:
    """That `prefill_attention` needs."""
    return 0 if plan.parts is None else plan.parts.shape[0] * q_heads * CONSUMERS


def _launch(programs: int) -> Any:
    return partial(
        plgpu.kernel,
        grid=(programs,),
        grid_names=("program",),
        thread_name="warpgroup",
        # No sum or maximum here goes across warps, which is what shared memory is kept for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )


def merge_divided_keys(
    shape: PrefillShape,
    programs: int,
    plan: PrefillPlan,
    operands: tuple[AnyArray, ...],
    results: Sequence[jax.Array],
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads block_rows"]]:
    """Output and log-sum-exps of a launch that has not merged: `results` of these operands."""
    out, lse, *parts = results
    merge = _launch(programs)(
        partial(_merge_kernel, shape, programs),
        out_type=shape.result_types[:2],
        scratch_types=store_scratch(shape),
        num_threads=1,
        kernel_name="prefill_merge",
    )
    merged_out, merged_lse = merge(*operands, plan.parts, *parts)
    row, is_query = _query_rows(plan)
    is_divided = plan.items[:, PARTS] > 1
    row = jnp.where(is_query & is_divided[:, None], row, shape.tokens).reshape(-1)
    rows = jnp.zeros(shape.tokens, bool).at[row].set(True, mode="drop")
    block = jnp.where(is_divided, plan.items[:, BLOCK], shape.num_items)
    blocks = jnp.zeros(shape.num_items, bool).at[block].set(True, mode="drop")
    out = jnp.where(rows[:, None, None], merged_out, out)
    return out, jnp.where(jnp.repeat(blocks, BLOCK_QUERIES), merged_lse, lse)


def by_rows(
    block_lse: Float[Array, "q_heads block_rows"], plan: PrefillPlan, num_rows: int
) -> Float[Array, "rows q_heads"]:
    """The kernel's log-sum-exp at the rows that the queries have in `qkv`; elsewhere -inf."""
    row, is_query = _query_rows(plan)
    at = plan.items[:, BLOCK, None] * BLOCK_QUERIES + jnp.arange(BLOCK_QUERIES)
    row = jnp.where(is_query, row, num_rows).reshape(-1)
    out = jnp.full((num_rows, block_lse.shape[0]), -jnp.inf)
    return out.at[row].set(block_lse.T[at.reshape(-1)], mode="drop")


def _query_rows(plan: PrefillPlan) -> tuple[AnyArray, AnyArray]:
    """Rows of each item's block, and which of them are its queries."""
    row = plan.items[:, QUERY_ROW, None] + jnp.arange(BLOCK_QUERIES)
    is_query = (row >= plan.items[:, FIRST_QUERY, None]) & (row < plan.items[:, LAST_QUERY, None])
    return row, is_query


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
        num_items=plan.items.shape[0],
        parts=0 if plan.parts is None else plan.parts.shape[0],
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


def _kernel(shape: PrefillShape, programs: int, merges: bool, *given: Any, **scratch: Any) -> None:
    operands, others = given[:OPERANDS], given[OPERANDS:]
    tickets, results = (others[0], others[1:]) if merges else (None, others)
    refs = PrefillRefs(*operands, *results, scratch=scratch, tickets=tickets)
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


def _merge_kernel(shape: PrefillShape, programs: int, *given: Any, **scratch: Any) -> None:
    operands, (item_of, *parts, out, lse) = given[:OPERANDS], given[OPERANDS:]
    results: tuple[Any, ...] = (out, lse, *parts)
    refs = PrefillRefs(*(*operands, *results), scratch=scratch)
    merge_parts(shape, refs, item_of, lax.axis_index("program"), programs)
