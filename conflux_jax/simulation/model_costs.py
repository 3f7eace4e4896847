"""A model's parts on a GPU, in seconds over all its layers: what systems are put together from.

`tp` GPUs split the weights; `ways` are the GPUs that attention heads are split over, by tensor or
by sequence parallelism. `sms`: of a GPU that the part may use; all where not said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.hardware import Hardware
from conflux_jax.simulation.operators import BYTES, Tiles, prefill_tiles

LOGIT_BYTES = 4  # logits are float32
SAMPLING_PASSES = 4  # over the logits: penalties and temperature, the largest, the cut, the draw


class Heads(NamedTuple):
    """Of one GPU."""

    queries: int
    kv: int


def heads_per_gpu(spec: ModelSpec, ways: int) -> Heads:
    """KV heads are dealt out with their queries, padded where they do not divide; where there are
    more GPUs than KV heads, those are copied and the queries dealt out.

    Worked, Qwen3-14B's 40 query and 8 KV heads: on 4 GPUs 10 and 2; on 3, padded to 9, 15 and 3; on
    16, 3 and 1.
    """
    if ways <= spec.num_kv_heads:
        kv = -(-spec.num_kv_heads // ways)
        return Heads(kv * (spec.num_heads // spec.num_kv_heads), kv)
    return Heads(-(-spec.num_heads // ways), 1)


class ModelOnGpus:
    """The building blocks. What depends on few sizes is remembered, so that an iteration's price
    costs microseconds."""

    def __init__(self, spec: ModelSpec, hardware: Hardware):
        self.spec, self.hardware = spec, hardware
        self._linear: dict[tuple[int, int, int | None], float] = {}
        self._head: dict[tuple[int, int, int], float] = {}
        self._exchange: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._heads: dict[int, Heads] = {}

    def heads(self, ways: int) -> Heads:
        if (heads := self._heads.get(ways)) is None:
            heads = self._heads[ways] = heads_per_gpu(self.spec, ways)
        return heads

    def linear_s(self, rows: int, tp: int = 1, sms: int | None = None) -> float:
        """Norms, products, rotation, SwiGLU, and the two all-reduces of tensor parallelism, of one
        batch of `rows`. 0 for none."""
        if not rows:
            return 0.0
        key = (rows, tp, sms)
        if (seconds := self._linear.get(key)) is None:
            seconds = self._linear[key] = self.spec.num_layers * self._layer_s(rows, tp, sms)
        return seconds

    def _layer_s(self, rows: int, tp: int, sms: int | None) -> float:
        spec, gpu = self.spec, self.hardware
        hidden, inner = spec.hidden_size, -(-spec.intermediate_size // tp)
        heads = self.heads(tp)
        queries = heads.queries * spec.head_dim
        qkv = queries + 2 * heads.kv * spec.head_dim
        products = (
            gpu.gemm_s(rows, qkv, hidden, sms)
            + gpu.gemm_s(rows, hidden, queries, sms)
            + gpu.gemm_s(rows, 2 * inner, hidden, sms)
            + gpu.gemm_s(rows, hidden, inner, sms)
        )
        row = rows * BYTES
        small = (
            2 * gpu.elementwise_s(4 * hidden * row, sms)  # add to the residual stream, and norm
            + gpu.elementwise_s(2 * qkv * row, sms)  # query and key norms, rotation, KV's way
            + gpu.elementwise_s(3 * inner * row, sms)  # SwiGLU
        )
        return products + small + 2 * gpu.all_reduce_s(hidden * row, tp)

    def head_s(self, rows: int, samples: int, tp: int = 1) -> float:
        """Embedding of `rows`, head and sampling of `samples` of them."""
        key = (rows, samples, tp)
        if (seconds := self._head.get(key)) is None:
            spec, gpu = self.spec, self.hardware
            vocab = -(-spec.vocab_size // tp)
            seconds = gpu.elementwise_s(2 * rows * spec.hidden_size * BYTES)
            if samples:
                seconds += gpu.gemm_s(samples, vocab, spec.hidden_size)
                passes = gpu.elementwise_s(samples * vocab * LOGIT_BYTES)
                seconds += SAMPLING_PASSES * passes
                seconds += gpu.all_gather_s(samples * LOGIT_BYTES * 2 * tp, tp)
            self._head[key] = seconds
        return seconds

    def prefill_attention_s(
        self, chunks: Sequence[tuple[int, int]], ways: int = 1, sms: int | None = None
    ) -> float:
        """chunks: (start, length), whole sequences with 1 / ways of the heads."""
        return self.tiles_s(self.prefill_tiles(chunks, ways), sms)

    def prefill_tiles(self, chunks: Sequence[tuple[int, int]], ways: int = 1) -> Tiles:
        return prefill_tiles(chunks, self.heads(ways).queries)

    def tiles_s(self, tiles: Tiles, sms: int | None = None) -> float:
        """`prefill_attention_s` of tiles that were counted before."""
        return self.spec.num_layers * self.hardware.tiles_s(tiles, sms, self.spec.head_dim)

    def decode_attention_s(
        self, rows: int, context_tokens: int, ways: int = 1, sms: int | None = None
    ) -> float:
        """context_tokens: KV tokens that the rows read in all, each where its head is."""
        spec = self.spec
        kv_heads = self.heads(ways).kv
        seconds = self.hardware.decode_attention_s(
            rows, context_tokens, kv_heads, sms, spec.head_dim
        )
        return spec.num_layers * seconds

    def exchange_s(self, tokens: int, groups: int, tp: int = 1) -> tuple[float, float]:
        """The all-to-alls before and after attention, of the group that has most tokens: queries,
        keys and values of a part of the sequence go out as whole sequences of fewer heads, and the
        attention's outputs come back. KV heads that several GPUs copy are sent to each."""
        if groups == 1 or not tokens:
            return 0.0, 0.0
        key = (tokens, groups, tp)
        if (seconds := self._exchange.get(key)) is None:
            heads, layers = self.heads(groups * tp), self.spec.num_layers
            head_bytes = tokens * groups * self.spec.head_dim * BYTES
            out = self.hardware.all_to_all_s(head_bytes * (heads.queries + 2 * heads.kv), groups)
            back = self.hardware.all_to_all_s(head_bytes * heads.queries, groups)
            seconds = self._exchange[key] = (layers * out, layers * back)
        return seconds

    def ring_prefill_s(self, chunks: Sequence[tuple[int, int]], degree: int, tp: int = 1) -> float:
        """Striped ring attention over `degree` groups: each has 1 / degree of every sequence's
        queries, with all heads of its tensor-parallel share, and passes KV on `degree - 1` times,
        while it computes with what it has."""
        spec, gpu = self.spec, self.hardware
        heads = self.heads(tp)
        whole = gpu.prefill_attention_s(chunks, heads.queries, None, spec.head_dim)
        if degree == 1 or not whole:
            return spec.num_layers * whole
        start_s = gpu.prefill.start_s
        step = start_s + (whole - start_s) / degree**2
        tokens = sum(start + length for start, length in chunks)
        sent = gpu.send_s(-(-tokens // degree) * heads.kv * 2 * spec.head_dim * BYTES)
        return spec.num_layers * (step + (degree - 1) * max(step, sent))

    def kv_transfer_s(self, tokens: int, tp: int = 1) -> float:
        """KV of `tokens` from one group to another, each GPU's share over its own link."""
        if not tokens:
            return 0.0
        kv_bytes = tokens * self.heads(tp).kv * 2 * self.spec.head_dim * BYTES
        return self.spec.num_layers * self.hardware.send_s(kv_bytes)
