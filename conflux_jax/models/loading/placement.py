"""From a checkpoint to sharded parameters: one tensor in host memory at a time.

Each parameter starts as zeros on the devices; a layer's tensor is laid out on the host (heads
ordered, replicated or padded; outputs grouped by rank), sent already sharded, and written into its
layer in place.
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

from conflux_jax.models.decoder import DecoderDims
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
        name = path[-1]
        sharding = NamedSharding(mesh, spec)
        if path[0] != "layers":
            return jax.device_put(_cast(layouts.top[name](), leaf), sharding)
        host = getattr(layouts, name)
        stacked = _zeros(leaf.shape, leaf.dtype, sharding)
        part = NamedSharding(mesh, PartitionSpec(*spec[1:]))
        for layer in range(dims.spec.num_layers):
            row = jax.device_put(_cast(host(f"model.layers.{layer}."), leaf), part)
            stacked = _set_layer(stacked, row, layer)
        return stacked

    flat_specs = dict(nnx.to_flat_state(specs))
    flat = [
        (path, leaf.replace(load(path, leaf.get_value(), flat_specs[path].get_value())))
        for path, leaf in nnx.to_flat_state(abstract)
    ]
    return nnx.from_flat_state(flat)


def _cast(array: np.ndarray, leaf: Any) -> np.ndarray:
    shape = leaf.shape[-array.ndim :]
    if array.shape != shape:
        raise ModelError(f"a parameter has shape {array.shape}, expected {shape}")
    return array.astype(leaf.dtype, copy=False)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()


@partial(jax.jit, donate_argnums=(0,))
def _set_layer(stacked: jax.Array, row: jax.Array, layer: int | jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, row, layer, 0)


@dataclass(frozen=True)
class _Layouts:
    """How each parameter is put together from the checkpoint's tensors. Methods take the prefix of
    a layer and bear the parameter's name."""

    source: WeightSource
    dims: DecoderDims

    @property
    def top(self) -> dict[str, Callable[[], np.ndarray]]:
        return {
            "embedding": lambda: self._vocab("model.embed_tokens.weight"),
            "head": lambda: self._vocab("lm_head.weight"),
            "final_norm": lambda: self.source.read("model.norm.weight"),
        }

    def input_norm(self, prefix: str) -> np.ndarray:
        return self.source.read(prefix + "input_layernorm.weight")

    def post_norm(self, prefix: str) -> np.ndarray:
        return self.source.read(prefix + "post_attention_layernorm.weight")

    def q_norm(self, prefix: str) -> np.ndarray:
        return self.source.read(prefix + "self_attn.q_norm.weight")

    def k_norm(self, prefix: str) -> np.ndarray:
        return self.source.read(prefix + "self_attn.k_norm.weight")

    def wqkv(self, prefix: str) -> np.ndarray:
        """`[shards * (q + k + v) * head_dim, hidden]`, one device's heads after the other's."""
        heads, hidden = self.dims.heads, self.dims.spec.hidden_size
        shards = self.dims.shards
        parts = []
        for name, order in (("q", heads.q_source), ("k", heads.kv_source), ("v", heads.kv_source)):
            weight = self._heads(prefix + f"self_attn.{name}_proj.weight", order, axis=0)
            parts.append(weight.reshape(shards, -1, hidden))
        return np.concatenate(parts, axis=1).reshape(-1, hidden)

    def wo(self, prefix: str) -> np.ndarray:
        """`[hidden, shards * q * head_dim]`, inputs in the order of `wqkv`'s queries."""
        name = prefix + "self_attn.o_proj.weight"
        return self._heads(name, self.dims.heads.q_source, axis=1)

    def w_gate_up(self, prefix: str) -> np.ndarray:
        """`[2 * ffn, hidden]`, outputs `[rank][gate | up]`."""
        hidden, tp = self.dims.spec.hidden_size, self.dims.heads.tp
        parts = [
            self._read(
                prefix + f"mlp.{name}_proj.weight", (self.dims.spec.intermediate_size, hidden)
            )
            for name in ("gate", "up")
        ]
        ranks = [part.reshape(tp, -1, hidden) for part in parts]
        return np.concatenate(ranks, axis=1).reshape(-1, hidden)

    def w_down(self, prefix: str) -> np.ndarray:
        spec = self.dims.spec
        shape = (spec.hidden_size, spec.intermediate_size)
        return self._read(prefix + "mlp.down_proj.weight", shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = self.source.read(name)
        if array.shape != shape:
            raise ModelError(f"{name}: shape {array.shape}, expected {shape} from the config")
        return array

    def _vocab(self, name: str) -> np.ndarray:
        """Padded so that it divides over the ranks."""
        spec = self.dims.spec
        array = self._read(name, (spec.vocab_size, spec.hidden_size))
        return np.pad(array, [(0, self.dims.padded_vocab - spec.vocab_size), (0, 0)])

    def _heads(self, name: str, order: tuple[int, ...], axis: int) -> np.ndarray:
        """The heads of an attention weight in the order of the layout; ZERO ones are zero."""
        spec = self.dims.spec
        count = (
            spec.num_heads
            if name.endswith(("q_proj.weight", "o_proj.weight"))
            else spec.num_kv_heads
        )
        shape = [spec.hidden_size, spec.hidden_size]
        shape[axis] = count * spec.head_dim
        weight = self._read(name, tuple(shape))
        split = weight.reshape(*shape[:axis], count, spec.head_dim, *shape[axis + 1 :])
        taken = np.take(split, np.maximum(order, 0), axis=axis)
        empty = np.flatnonzero(np.array(order) == ZERO)
        taken[(slice(None),) * axis + (empty,)] = 0
        shape[axis] = len(order) * spec.head_dim
        return taken.reshape(shape)
