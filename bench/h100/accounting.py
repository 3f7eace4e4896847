"""What one iteration costs a device: counts from a compiled program, and what its kernels do.

Collectives, launches, weight bytes and the FLOPs of matrix products are read in the program. What
attention reads and multiplies depends on lengths that only a plan has, and the program holds
stand-ins for its kernels; so that part is arithmetic: from the plan, and from the heads, sizes and
types that the program was compiled for. It is the least that any kernel can do: each token of KV is
read once (a kernel whose query tiles read it again does so from cache), keys past a query are not
multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.hlo_counts import Collective, Module, work
from bench.hlo_weights import weight_bytes
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.plan import Bucket

KEY_AND_VALUE = 2
PRODUCTS = 2  # of attention: queries by keys, weights by values


@dataclass(frozen=True)
class Iteration:
    """A chunk of one long prompt beside decodes.

    chunk_tokens: after `context_tokens` of the same prompt. decodes: for each group, how many KV
    tokens each of its decodes has in the pool.
    """

    chunk_tokens: int
    context_tokens: int
    decodes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionCost:
    """Of all layers on the busiest device. handoff_bytes: what a hand-off's gather reads; its size
    is static, so it is read whether or not anything is handed over."""

    decode_bytes: int
    prefill_bytes: int
    handoff_bytes: int
    flops: int

    @property
    def kv_bytes(self) -> int:
        return self.decode_bytes + self.prefill_bytes + self.handoff_bytes


@dataclass(frozen=True)
class Cost:
    """Of one iteration on the busiest device. rows: of its group, padding included. collectives:
    in the order of their launches, each layer's again."""

    rows: int
    collectives: tuple[Collective, ...]
    weight_bytes: int
    product_flops: int
    attention: AttentionCost
    launches: int

    def bytes_sent(self, kind: str) -> int:
        """To other devices, by all collectives of a kind."""
        return sum(c.bytes_sent for c in self.collectives if c.kind == kind)

    def flat(self) -> dict[str, int]:
        """Figure -> value, as in the JSON."""
        return {
            "rows": self.rows,
            "all_to_all_bytes": self.bytes_sent("all-to-all"),
            "all_reduce_bytes": self.bytes_sent("all-reduce"),
            "all_gather_bytes": self.bytes_sent("all-gather"),
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.attention.kv_bytes,
            "kv_decode_bytes": self.attention.decode_bytes,
            "kv_prefill_bytes": self.attention.prefill_bytes,
            "kv_handoff_bytes": self.attention.handoff_bytes,
            "flops": self.product_flops + self.attention.flops,
            "product_flops": self.product_flops,
            "attention_flops": self.attention.flops,
            "launches": self.launches,
        }


def cost(
    module: Module, dims: DecoderDims, limits: BatchLimits, bucket: Bucket, iteration: Iteration
) -> Cost:
    """`module`: the bucket's compiled step."""
    total = work(module, module.entry)
    return Cost(
        rows=bucket.rows,
        collectives=total.collectives,
        weight_bytes=weight_bytes(module),
        product_flops=total.flops,
        attention=attention_cost(dims, limits, bucket, iteration),
        launches=total.launches,
    )


def attention_cost(
    dims: DecoderDims, limits: BatchLimits, bucket: Bucket, iteration: Iteration
) -> AttentionCost:
    """Prefill: every device has its share of the heads, for all groups' rows. Decode: a group's
    own, with all heads of the rank; where decode is spread, those of all groups, with the share.

    Raises ValueError when the iteration has decodes for another number of groups."""
    heads, groups = dims.heads, limits.geometry.groups
    if len(iteration.decodes) != groups:
        raise ValueError(f"decodes of {len(iteration.decodes)} groups, the program has {groups}")
    if limits.geometry.shared:
        parts = [[context for group in iteration.decodes for context in group]]
        kv_heads, q_heads = heads.kv_per_device, heads.q_per_device
    else:
        parts = [list(group) for group in iteration.decodes]
        kv_heads, q_heads = heads.kv_per_rank, groups * heads.q_per_device
    chunk, context = iteration.chunk_tokens, iteration.context_tokens
    # Query i of the chunk sees the context, the chunk's tokens before it, and itself.
    pairs = chunk * context + chunk * (chunk + 1) // 2
    decode_pairs = max(sum(part) + len(part) for part in parts)
    moved = groups * limits.handoff_pages * limits.geometry.page_tokens if bucket.handoff else 0
    layers, head_dim = dims.spec.num_layers, dims.spec.head_dim
    head_bytes = layers * KEY_AND_VALUE * head_dim * dims.dtype.itemsize
    return AttentionCost(
        decode_bytes=head_bytes * kv_heads * max(map(sum, parts)),
        prefill_bytes=head_bytes * heads.kv_per_device * context,
        handoff_bytes=head_bytes * heads.kv_per_device * moved,
        flops=layers
        * (PRODUCTS * 2 * head_dim)
        * (q_heads * decode_pairs + heads.q_per_device * pairs),
    )


def dealt(num_decodes: int, context: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """`num_decodes` of equal context over the groups, the first of which have one more where they
    do not divide.

    >>> dealt(5, 100, 2)
    ((100, 100, 100), (100, 100))
    """
    each: Sequence[int] = [len(range(group, num_decodes, groups)) for group in range(groups)]
    return tuple((context,) * count for count in each)
