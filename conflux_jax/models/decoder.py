"""The decoder: parameters, each with its sharding beside it, and the linear parts of a layer.

Attention is not here: it is where the two phases part (`attention.py`), and the step
(`execution/step.py`) calls it between `Layer.qkv` and `Layer.finish`. All methods see one device's
shard and run inside `shard_map`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.layers import linear, rms_norm, rotate, silu_product
from conflux_jax.models.spec import ModelSpec

TP = "tp"


@dataclass(frozen=True)
class DecoderDims:
    """A model on a mesh: what the parameters' shapes follow from. widen_rows: see `linear`.

    products: what a layer's matrix products are returned in. float32 is faster on a CPU; on a GPU
    it would be a kernel more for each conversion, and twice the bytes.
    """

    spec: ModelSpec
    heads: HeadLayout
    dtype: jnp.dtype
    widen_rows: int | None = None
    products: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))

    @property
    def device_outputs(self) -> int:
        """Outputs of the fused projection for one device's heads: its q, k and v."""
        return (self.heads.q_per_device + 2 * self.heads.kv_per_device) * self.spec.head_dim

    @property
    def shards(self) -> int:
        return self.heads.groups * self.heads.tp

    @property
    def padded_vocab(self) -> int:
        return -(-self.spec.vocab_size // self.heads.tp) * self.heads.tp


def _parameter(shape: tuple[int, ...], dtype: jnp.dtype, *axes: str | None) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False)


class Layer(nnx.Module):
    """One decoder layer. Rows are the packed token axis of this group."""

    def __init__(self, dims: DecoderDims):
        spec, heads, dtype = dims.spec, dims.heads, dims.dtype
        hidden, ffn, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
        self.input_norm = _parameter((hidden,), dtype, None)
        # Outputs [tp][group][q | k | v]: one device's heads are one contiguous run.
        self.wqkv = _parameter((dims.shards * dims.device_outputs, hidden), dtype, TP, None)
        self.wo = _parameter((hidden, dims.shards * heads.q_per_device * width), dtype, None, TP)
        self.post_norm = _parameter((hidden,), dtype, None)
        self.w_gate_up = _parameter((2 * ffn, hidden), dtype, TP, None)  # outputs [tp][gate | up]
        self.w_down = _parameter((hidden, ffn), dtype, None, TP)
        if spec.qk_norm:
            self.q_norm = _parameter((width,), dtype, None)
            self.k_norm = _parameter((width,), dtype, None)
        self.dims = dims

    def qkv(
        self,
        x: Float[Array, "rows hidden"],
        cos: Float[Array, "rows half"],
        sin: Float[Array, "rows half"],
    ) -> Float[Array, "rows groups qkv_heads head_dim"]:
        """Rotated queries, rotated keys and values of this rank's heads, by owning group.

        Values are always finite. Kernels read rows that are another request's, or were, and give
        them weight 0; of a value that is no number 0 times would be none either, and one request's
        overflow would spoil the next. What a value was not stands in its key, so that whoever may
        see it still does.
        """
        spec, heads = self.dims.spec, self.dims.heads
        normed = rms_norm(x, self.input_norm[...], spec.rms_norm_eps)
        projected = self._linear(normed, self.wqkv[...]).astype(x.dtype)
        projected = projected.reshape(x.shape[0], heads.groups, -1, spec.head_dim)
        num_q, num_kv = heads.q_per_device, heads.kv_per_device
        qk, v = jnp.split(projected, (num_q + num_kv,), axis=2)
        is_number = jnp.isfinite(v)
        if spec.qk_norm:  # queries and keys at once: it is one kernel less
            weights = [self.q_norm[...]] * num_q + [self.k_norm[...]] * num_kv
            qk = rms_norm(qk, jnp.stack(weights), spec.rms_norm_eps)
        q, k = jnp.split(rotate(qk, cos, sin), (num_q,), axis=2)
        k, v = jnp.where(is_number, k, jnp.nan), jnp.where(is_number, v, 0)
        return jnp.concatenate([q, k, v], axis=2)

    def finish(
        self, x: Float[Array, "rows hidden"], attention: Float[Array, "rows q_width"]
    ) -> Float[Array, "rows hidden"]:
        """Output projection and feed-forward, each added to the residual."""
        x = x + self._reduced(attention, self.wo[...])
        hidden = rms_norm(x, self.post_norm[...], self.dims.spec.rms_norm_eps)
        gate_up = self._linear(hidden, self.w_gate_up[...])
        return x + self._reduced(silu_product(gate_up).astype(x.dtype), self.w_down[...])

    def _reduced(
        self, x: Float[Array, "rows inputs"], weight: Float[Array, "hidden inputs"]
    ) -> Float[Array, "rows hidden"]:
        """A product whose inputs are split over the ranks, summed over them."""
        partial = self._linear(x, weight).astype(x.dtype)
        return lax.psum(partial, TP) if self.dims.heads.tp > 1 else partial

    def _linear(
        self, x: Float[Array, "rows inputs"], weight: Float[Array, "outputs inputs"]
    ) -> Float[Array, "rows outputs"]:
        return linear(x, weight, self.dims.widen_rows, self.dims.products)


class Decoder(nnx.Module):
    """Embedding, `layers` stacked along a leading axis for `lax.scan`, final norm, output head."""

    def __init__(self, dims: DecoderDims):
        spec = dims.spec
        self.embedding = _parameter((dims.padded_vocab, spec.hidden_size), dims.dtype, TP, None)
        self.layers = nnx.vmap(
            lambda: Layer(dims),
            axis_size=spec.num_layers,
            out_axes=0,
            transform_metadata={nnx.PARTITION_NAME: None},
        )()
        self.final_norm = _parameter((spec.hidden_size,), dims.dtype, None)
        if not spec.tie_word_embeddings:
            self.head = _parameter((dims.padded_vocab, spec.hidden_size), dims.dtype, TP, None)
        self.dims = dims

    def embed(self, token_ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        table = self.embedding[...]
        if self.dims.heads.tp == 1:
            return jnp.take(table, token_ids, axis=0, mode="clip")
        local = token_ids - lax.axis_index(TP) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, local, axis=0, mode="clip")
        return lax.psum(jnp.where(mine[:, None], rows, 0), TP)

    def logits(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows shard"]:
        """Float32 logits of this rank's part of the padded vocabulary: `padded_vocab / tp` ids."""
        table = self.embedding if self.dims.spec.tie_word_embeddings else self.head
        x = rms_norm(x, self.final_norm[...], self.dims.spec.rms_norm_eps)
        # Never of a single row, for which XLA's CPU backend would widen the whole table first.
        padded = jnp.pad(x, [(0, max(0, 2 - x.shape[0])), (0, 0)])
        return linear(padded, table[...])[: x.shape[0]]


def abstract_decoder(dims: DecoderDims) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure and the shapes, types and shardings of its parameters: the one
    description that loading, sharding and the step use."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(dims)))
