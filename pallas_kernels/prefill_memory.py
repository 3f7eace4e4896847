"""What a program of prefill attention sees: static sizes, operands and results, shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.building_blocks import Ref, swizzled
from pallas_kernels.prefill_plan import BLOCK_KEYS, BLOCK_QUERIES, ITEM_FIELDS
from pallas_kernels.tickets import TICKET_WORDS

CONSUMERS = 2
HALF = BLOCK_QUERIES // CONSUMERS  # queries of a consumer
QUERY_SLOTS = 2  # units whose queries are in shared memory: the next one's arrive early


@dataclass(frozen=True)
class PrefillShape:
    """Static sizes of one launch. pages, page_rows: of the pool. max_pages: of a segment's table.
    parts: the most partial results of a head, 0 where no block's keys are divided. stages: of the
    rings of keys and of values. interpretable: weights go into their product through shared memory,
    as the interpreter needs it; else out of registers."""

    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    pages: int
    page_rows: int
    max_pages: int
    num_runs: int
    num_items: int
    parts: int
    stages: int
    interpretable: bool

    @property
    def page_tokens(self) -> int:
        return self.page_rows // self.kv_heads

    @property
    def copy_rows(self) -> int:
        """Rows of one copy: a tile comes in equal parts, none of which crosses a page."""
        return math.gcd(self.page_tokens, BLOCK_KEYS)

    @property
    def half_parts(self) -> int:
        """Partial results of a consumer's queries, of all heads."""
        return self.parts * self.q_heads * CONSUMERS

    @property
    def result_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Output and log-sum-exps; where keys are divided, both of partial results too."""
        dim, f32 = self.head_dim, jnp.float32
        types = [
            ((self.tokens, self.q_heads, dim), jnp.bfloat16),
            ((self.q_heads, self.num_items * BLOCK_QUERIES), f32),
        ]
        if self.parts:
            types += [((self.half_parts, HALF, dim), f32), ((self.half_parts, HALF), f32)]
        return tuple(jax.ShapeDtypeStruct(*one) for one in types)


@dataclass(frozen=True)
class PrefillRefs:
    """Operands in the order of the launch, the results in that of `result_types`, and the scratch
    memory by name. tickets: counters of who comes last with a part, for each partial result; None
    where another launch merges."""

    layer: Ref
    items: Ref
    num_items: Ref
    runs: Ref
    page_table: Ref
    qkv: Ref
    pool: Ref
    out: Ref
    lse: Ref
    parts: Ref | None = None
    part_lse: Ref | None = None
    scratch: dict[str, Ref] = field(default_factory=dict)
    tickets: Ref | None = None

    def item(self, index: jax.Array, field: int) -> jax.Array:
        return self.items[index * ITEM_FIELDS + field]


def prefill_scratch(shape: PrefillShape) -> dict[str, Any]:
    """Shared memory and barriers, by name. `*_full`: TMA has written. `*_free`: both consumers have
    read. turn: see `prefill_kernel`."""
    stages, dim = shape.stages, shape.head_dim
    full = plgpu.Barrier(num_arrivals=BLOCK_KEYS // shape.copy_rows, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    scratch = {
        "q": swizzled((QUERY_SLOTS, CONSUMERS, HALF, dim)),
        "k": swizzled((stages, BLOCK_KEYS, dim)),
        "v": swizzled((stages, BLOCK_KEYS, dim)),
        "q_full": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=QUERY_SLOTS),
        "q_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=QUERY_SLOTS),
        "k_full": full,
        "k_free": free,
        "v_full": full,
        "v_free": free,
        "turn": plgpu.Barrier(num_arrivals=CONSUMERS),
        **store_scratch(shape),
    }
    if shape.interpretable:
        scratch["weights"] = swizzled((CONSUMERS, HALF, BLOCK_KEYS))
    return scratch


def store_scratch(shape: PrefillShape) -> dict[str, Any]:
    """Of it, what results need on their way to memory."""
    return {
        "out": plgpu.SMEM((CONSUMERS, HALF, shape.head_dim), jnp.bfloat16),
        "ticket": plgpu.SMEM((CONSUMERS * TICKET_WORDS,), jnp.int32),
    }
