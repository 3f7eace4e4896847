"""How long an iteration would take on a GPU that nobody has at hand: a roofline from its peaks.

FLOPs and bytes are counted from the model's shape, and divided by what kernels commonly reach of
the GPU's peaks. It is no measurement: launches, norms, sampling and the host are left out, and so
is what two paths that run at once take from each other. A profile of the real engine is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conflux_jax.models.spec import ModelSpec
from conflux_jax.scheduler.latency_model import IterationShape

BYTES = 2  # of a weight, an activation, a KV number: bfloat16

# Shares of the peaks that are taken as reached.
LINEAR_FRACTION = 0.65  # large bfloat16 GEMMs; the chip's power limit keeps them from the peak
ATTENTION_FRACTION = 0.5  # causal prefill attention: masked blocks and softmax beside the products
MEMORY_FRACTION = 0.8  # long streams reach about 90%; short ones of a layer's weights or KV less
LINK_FRACTION = 0.7  # all-to-all and all-reduce of a few megabytes: start-up costs show

WEIGHTS_SHARE = 0.5  # most of a group's memory for weights: the rest is KV, which decodes need
MEMORY_USED = 0.9  # of a GPU, by weights and KV; the rest is the program's temporaries


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU as its data sheet states them. flops: dense bfloat16. link_bytes_s: NVLink,
    one way."""

    name: str
    flops: float
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 312e12, 2.039e12, 80e9, 300e9),
    "h100": Gpu("H100 SXM 80 GB", 989e12, 3.35e12, 80e9, 450e9),
    "h200": Gpu("H200 SXM 141 GB", 989e12, 4.8e12, 141e9, 450e9),
}


@dataclass(frozen=True)
class ModelCosts:
    """What a model's shape says about its work. Per token unless named otherwise."""

    linear_weights: int  # of all layers
    head_weights: int
    all_weights: int  # those, and the embedding where it is not the head's
    kv_bytes: int
    query_bytes: int  # of all layers' queries, as large as the attention's outputs
    hidden_bytes: int  # of one row between layers, times the layers
    attention_flops: int  # of a query-key pair: two products over every query head

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelCosts:
        """
        Worked, Qwen3-14B's layer: queries 5120 * 5120, keys and values 5120 * 2048, output 5120 *
        5120, SwiGLU 3 * 5120 * 17408 = 330,301,440 weights, and 2 * 8 * 128 * 2 = 4,096 bytes KV.
        """
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        per_layer = spec.hidden_size * (2 * queries + 2 * keys + 3 * spec.intermediate_size)
        head = spec.vocab_size * spec.hidden_size
        return cls(
            linear_weights=spec.num_layers * per_layer,
            head_weights=head,
            all_weights=spec.num_layers * per_layer + head * (1 if spec.tie_word_embeddings else 2),
            kv_bytes=spec.num_layers * 2 * keys * BYTES,
            query_bytes=spec.num_layers * queries * BYTES,
            hidden_bytes=spec.num_layers * spec.hidden_size * BYTES,
            attention_flops=spec.num_layers * 4 * queries,
        )


@dataclass(frozen=True)
class Roofline:
    """Satisfies LatencyPredictor for `groups` groups of `tp` GPUs each. handoff is taken as hidden
    behind the linear layers, as the step is laid out to do."""

    costs: ModelCosts
    gpu: Gpu
    groups: int = 1
    tp: int = 1

    def predict_s(self, shape: IterationShape) -> float:
        """Linear layers on the fullest group, then the slower of the two attention paths."""
        samples = shape.bucket.decode_rows + shape.num_chunks
        linear = self._linear_s(shape.bucket.rows, self.costs.linear_weights)
        linear += self._linear_s(samples, self.costs.head_weights) if samples else 0.0
        return linear + self._reduce_s(shape) + max(self._prefill_s(shape), self._decode_s(shape))

    def _linear_s(self, rows: int, weights: int) -> float:
        """Either the products or reading the weights takes longer."""
        products = 2 * rows * weights / (self.gpu.flops * LINEAR_FRACTION)
        reading = weights * BYTES / (self.gpu.memory_bytes_s * MEMORY_FRACTION)
        return max(products, reading) / self.tp

    def _reduce_s(self, shape: IterationShape) -> float:
        """Two all-reduces a layer inside a group; a ring sends each row twice, less 1/tp."""
        sent = 2 * shape.bucket.rows * self.costs.hidden_bytes * 2 * (self.tp - 1) / self.tp
        return sent / (self.gpu.link_bytes_s * LINK_FRACTION)

    def _prefill_s(self, shape: IterationShape) -> float:
        """Two all-to-alls of the largest shard, and the attention of one group's heads."""
        flops = shape.prefill_work * self.costs.attention_flops / (self.groups * self.tp)
        attention = flops / (self.gpu.flops * ATTENTION_FRACTION)
        shard = -(-shape.prefill_tokens // self.groups)
        both_ways = (2 * self.costs.query_bytes + self.costs.kv_bytes) / self.tp
        sent = shard * both_ways * (self.groups - 1) / self.groups
        return attention + sent / (self.gpu.link_bytes_s * LINK_FRACTION)

    def _decode_s(self, shape: IterationShape) -> float:
        """KV is read once; its products are fewer than a GPU does meanwhile."""
        read = shape.context_tokens * self.costs.kv_bytes / self.tp
        return read / (self.gpu.memory_bytes_s * MEMORY_FRACTION)


class HasMemory(Protocol):
    """A GPU, however much else is known of it."""

    @property
    def memory_bytes(self) -> float: ...


def group_size(costs: ModelCosts, gpu: HasMemory) -> int:
    """GPUs of a group: the smallest power of two whose memory the weights fill by WEIGHTS_SHARE at
    most."""
    size = 1
    while costs.all_weights * BYTES > size * gpu.memory_bytes * WEIGHTS_SHARE:
        size *= 2
    return size


def kv_room(costs: ModelCosts, memory_bytes: float, tp: int, used: float = MEMORY_USED) -> float:
    """Bytes for KV on each of a group's `tp` GPUs beside its part of the weights; negative if not
    even those fit. memory_bytes: of a GPU. used: share of it for both.

    Worked, Qwen3-14B on one H100 (80 GB): 72 GB less 29.5 GB of weights are 42.5 GB.
    """
    return memory_bytes * used - costs.all_weights * BYTES / tp


def kv_tokens(costs: ModelCosts, gpu: HasMemory, tp: int) -> int:
    """KV tokens that a group of `tp` GPUs has memory for; 0 if not even the weights fit."""
    return max(0, int(tp * kv_room(costs, gpu.memory_bytes, tp) // costs.kv_bytes))
