"""Which attention head lives where.

A device is shard `(t, g)`: rank `t` of its tensor-parallel group, group `g`. Weights are split over
`t` only; the head order inside a rank is `[group][head]`, so that the all-to-all over groups is a
plain split of the projection's columns. Where heads do not divide, they are replicated or padded
with zero weights, once, at load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conflux_jax.models.spec import ModelError, ModelSpec

ZERO = -1  # a padded head: zero weights


@dataclass(frozen=True)
class HeadLayout:
    """Heads of one model on a mesh of `groups` (sp) by `tp` devices.

    kv_per_device: KV heads that one device attends in prefill. q_per_kv: query heads of each.
    replicas: devices of a rank that hold the same KV head (1 unless KV heads are scarce).
    kv_source / q_source: the model's head at each position, in the order `[tp][group][local]`;
    ZERO where padded. The same KV head stands `replicas` times in `kv_source`.

    9 query and 3 KV heads on 2 groups: KV heads padded to 4, two a device, query heads to 12.
    8 query and 2 KV heads on 4 groups: each KV head on two devices, two query heads on each.
    """

    groups: int
    tp: int
    kv_per_device: int
    q_per_kv: int
    replicas: int
    kv_source: tuple[int, ...]
    q_source: tuple[int, ...]

    @property
    def q_per_device(self) -> int:
        return self.kv_per_device * self.q_per_kv

    @property
    def kv_per_rank(self) -> int:
        """Distinct KV heads of a tensor-parallel rank: those of a page in decode layout."""
        return self.groups * self.kv_per_device // self.replicas

    @property
    def q_per_kv_decode(self) -> int:
        """Query heads of each distinct KV head of a rank."""
        return self.q_per_kv * self.replicas

    @property
    def alone(self) -> HeadLayout:
        """Of one device that attends with its own heads, whatever the others do."""
        return replace(self, groups=1, replicas=1)

    def prefill_page_tokens(self, page_tokens: int) -> int:
        """Tokens of a page in prefill layout, where one of decode layout has `page_tokens`."""
        return page_tokens * self.kv_per_rank // self.kv_per_device

    @classmethod
    def make(cls, spec: ModelSpec, groups: int, tp: int) -> HeadLayout:
        """Raises ModelError when the model's sizes cannot be split over `tp`."""
        if spec.num_heads % spec.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({spec.num_heads}) must be a multiple of "
                f"num_key_value_heads ({spec.num_kv_heads})"
            )
        if spec.intermediate_size % tp:
            raise ModelError(
                f"tp={tp} must divide intermediate_size ({spec.intermediate_size}) of {spec.name}"
            )
        per_kv = spec.num_heads // spec.num_kv_heads
        heads = [
            (kv, list(range(kv * per_kv, (kv + 1) * per_kv))) for kv in range(spec.num_kv_heads)
        ]
        ranks, _ = _split(heads, tp)
        shards, replicas = [], 1
        for rank in ranks:
            parts, replicas = _split(rank, groups)
            shards += parts
        kv_per_device = len(shards[0])
        q_per_kv = max(len(queries) for shard in shards for _, queries in shard)
        return cls(
            groups=groups,
            tp=tp,
            kv_per_device=kv_per_device,
            q_per_kv=q_per_kv,
            replicas=replicas,
            kv_source=tuple(kv for shard in shards for kv, _ in shard),
            q_source=tuple(
                query
                for shard in shards
                for _, queries in shard
                for query in queries + [ZERO] * (q_per_kv - len(queries))
            ),
        )


_Head = tuple[int, list[int]]  # a KV head and its query heads


def _split(heads: list[_Head], parts: int) -> tuple[list[list[_Head]], int]:
    """`heads` over `parts` devices evenly: (heads of each, replicas of each KV head)."""
    count = len(heads)
    if count < parts and parts % count == 0:
        replicas = parts // count
        out = []
        for kv, queries in heads:
            share = -(-len(queries) // replicas)
            out += [[(kv, queries[i * share : (i + 1) * share])] for i in range(replicas)]
        return out, replicas
    padded = heads + [(ZERO, [])] * (-count % parts)
    each = len(padded) // parts
    return [padded[i * each : (i + 1) * each] for i in range(parts)], 1
