"""From a checkpoint to sharded parameters: one tensor in host memory at a time.

Each device gets its share and no more is read: for each rank of a tensor-parallel group its rows or
columns are read, laid out on the host (heads ordered, replicated or padded) and sent to the rank's
devices. A layer's parameter is then written into the stacked one in place, which starts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conflux_jax.models.decoder import TP, DecoderDims
from conflux_jax.models.heads import ZERO
from conflux_jax.models.spec import ModelError, WeightSource


def load_parameters(
    source: WeightSource, dims: DecoderDims, abstract: nnx.State, mesh: Mesh
) -> nnx.State:
    """The decoder's parameters on the mesh, in `dims.dtype`.

    Raises ModelError naming the tensor whose shape does not fit the model's numbers."""
    layouts = _Layouts(source, dims)
    specs = nnx.get_partition_spec(abstract)

    def load(path, leaf, spec):
        build = getattr(layouts, path[-1])
        if path[0] != "layers":
            return _place(partial(build, ""), leaf.shape, leaf.dtype, NamedSharding(mesh, spec))
        stacked = _zeros(leaf.shape, leaf.dtype, NamedSharding(mesh, spec))
        part = NamedSharding(mesh, PartitionSpec(*spec[1:]))
        for layer in range(dims.spec.num_layers):
            build_layer = partial(build, f"model.layers.{layer}.")
            row = _place(build_layer, leaf.shape[1:], leaf.dtype, part)
            stacked = _set_layer(stacked, row, layer)
        return stacked

    flat_specs = dict(nnx.to_flat_state(specs))
    flat = [
        (path, leaf.replace(load(path, leaf.get_value(), flat_specs[path].get_value())))
        for path, leaf in nnx.to_flat_state(abstract)
    ]
    return nnx.from_flat_state(flat)


def _place(
    build: Callable[[int], np.ndarray], shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """`build(rank)` on the devices of each rank. Built once, however many groups hold a copy."""
    local_shape = sharding.shard_shape(shape)
    axis = next((i for i, name in enumerate(sharding.spec) if name == TP), None)
    built: dict[int, np.ndarray] = {}

    def share(index: Any) -> np.ndarray:
        rank = 0 if axis is None else (index[axis].start or 0) // local_shape[axis]
        if rank not in built:
            array = build(rank)
            if array.shape != local_shape:
                raise ModelError(f"a parameter has shape {array.shape}, expected {local_shape}")
            built[rank] = array.astype(dtype, copy=False)
        return built[rank]

    return jax.make_array_from_callback(shape, sharding, share)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()


@partial(jax.jit, donate_argnums=(0,))
def _set_layer(stacked: jax.Array, row: jax.Array, layer: int | jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, row, layer, 0)


@dataclass(frozen=True)
class _Layouts:
    """How each parameter is put together from the checkpoint's tensors. Methods bear the
    parameter's name, take the prefix of a layer and a rank, and return that rank's share: an array
    of its own, never a view of a file that may change."""

    source: WeightSource
    dims: DecoderDims

    def embedding(self, _: str, rank: int) -> np.ndarray:
        return self._vocab("model.embed_tokens.weight", rank)

    def head(self, _: str, rank: int) -> np.ndarray:
        return self._vocab("lm_head.weight", rank)

    def final_norm(self, _: str, rank: int) -> np.ndarray:
        return np.array(self.source.read("model.norm.weight"))

    def input_norm(self, prefix: str, rank: int) -> np.ndarray:
        return np.array(self.source.read(prefix + "input_layernorm.weight"))

    def post_norm(self, prefix: str, rank: int) -> np.ndarray:
        return np.array(self.source.read(prefix + "post_attention_layernorm.weight"))

    def q_norm(self, prefix: str, rank: int) -> np.ndarray:
        return np.array(self.source.read(prefix + "self_attn.q_norm.weight"))

    def k_norm(self, prefix: str, rank: int) -> np.ndarray:
        return np.array(self.source.read(prefix + "self_attn.k_norm.weight"))

    def wqkv(self, prefix: str, rank: int) -> np.ndarray:
        """`[groups * (q + k + v) * head_dim, hidden]`, one device's heads after the other's."""
        heads, spec = self.dims.heads, self.dims.spec
        parts = []
        for name, order, count in (
            ("q", heads.q_source, spec.num_heads),
            ("k", heads.kv_source, spec.num_kv_heads),
            ("v", heads.kv_source, spec.num_kv_heads),
        ):
            name = prefix + f"self_attn.{name}_proj.weight"
            weight = self._heads(name, self._own(order, rank), count, axis=0)
            parts.append(weight.reshape(heads.groups, -1, spec.hidden_size))
        return np.concatenate(parts, axis=1).reshape(-1, spec.hidden_size)

    def wo(self, prefix: str, rank: int) -> np.ndarray:
        """`[hidden, groups * q * head_dim]`, inputs in the order of `wqkv`'s queries."""
        name = prefix + "self_attn.o_proj.weight"
        order = self._own(self.dims.heads.q_source, rank)
        return self._heads(name, order, self.dims.spec.num_heads, axis=1)

    def w_gate_up(self, prefix: str, rank: int) -> np.ndarray:
        """`[gate | up, hidden]`."""
        spec = self.dims.spec
        shape = (spec.intermediate_size, spec.hidden_size)
        parts = [
            self._read(prefix + f"mlp.{name}_proj.weight", shape, 0, self._features(rank))
            for name in ("gate", "up")
        ]
        return np.concatenate(parts, dtype=self.dims.dtype)

    def w_down(self, prefix: str, rank: int) -> np.ndarray:
        spec = self.dims.spec
        shape = (spec.hidden_size, spec.intermediate_size)
        share = self._read(prefix + "mlp.down_proj.weight", shape, 1, self._features(rank))
        return np.array(share, self.dims.dtype)

    def _own[T](self, order: tuple[T, ...], rank: int) -> tuple[T, ...]:
        size = len(order) // self.dims.heads.tp
        return order[rank * size : (rank + 1) * size]

    def _features(self, rank: int) -> range:
        size = self.dims.spec.intermediate_size // self.dims.heads.tp
        return range(rank * size, (rank + 1) * size)

    def _read(self, name: str, shape: tuple[int, ...], axis: int, where: range) -> np.ndarray:
        """A tensor of that shape, of which only `where` along `axis`."""
        part = (slice(None),) * axis + (slice(where.start, where.stop),)
        array = self.source.read(name, part)
        expected = [*shape]
        expected[axis] = len(where)
        if array.shape != tuple(expected):
            raise ModelError(
                f"{name}: {where} of axis {axis} have shape {array.shape}, "
                f"expected {tuple(expected)} from the config"
            )
        return array

    def _vocab(self, name: str, rank: int) -> np.ndarray:
        """Padded so that it divides over the ranks."""
        spec, size = self.dims.spec, self.dims.padded_vocab // self.dims.heads.tp
        stop = min((rank + 1) * size, spec.vocab_size)
        rows = range(min(rank * size, stop), stop)
        share = np.zeros((size, spec.hidden_size), self.dims.dtype)
        share[: len(rows)] = self._read(name, (spec.vocab_size, spec.hidden_size), 0, rows)
        return share

    def _heads(self, name: str, order: tuple[int, ...], count: int, axis: int) -> np.ndarray:
        """Heads of an attention weight with `count` of them, in that order; ZERO ones are zero.

        Those of a rank lie side by side in the model, so what is read is one span of them."""
        width, hidden = self.dims.spec.head_dim, self.dims.spec.hidden_size
        before, after = (hidden,) * axis, (hidden,) * (1 - axis)
        sources = np.array(order)
        real = np.flatnonzero(sources != ZERO)
        laid_out = np.zeros((*before, len(order), width, *after), self.dims.dtype)
        if len(real):
            first, last = sources[real].min(), sources[real].max()
            where = range(first * width, (last + 1) * width)
            span = self._read(name, (*before, count * width, *after), axis, where)
            heads = span.reshape(*before, -1, width, *after)
            at = (slice(None),) * axis
            laid_out[(*at, real)] = heads[(*at, sources[real] - first)]
        return laid_out.reshape(*before, -1, *after)
