"""The page pool on the devices: its shape, its size, its making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conflux_jax.config import CacheConfig, ConfigError
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.plan import PoolGeometry
from pallas_kernels.pages import max_pages

POOL_SPEC = PartitionSpec(None, None, "sp", "tp", None)  # pages over groups, page rows over ranks
CPU_POOL_BYTES = 1 << 30  # all groups together, where the config says nothing


@dataclass(frozen=True)
class PoolShape:
    """`[layers, 2, pages, page_rows, head_dim]`, keys then values, over the whole mesh."""

    dims: DecoderDims
    geometry: PoolGeometry

    @property
    def shape(self) -> tuple[int, ...]:
        heads, spec = self.dims.heads, self.dims.spec
        pages = self.geometry.groups * self.geometry.num_pages
        return (spec.num_layers, 2, pages, heads.tp * self.page_rows, spec.head_dim)

    @property
    def page_rows(self) -> int:
        """Pool rows of a page on one device, the same in both layouts."""
        return self.geometry.prefill_page_tokens * self.dims.heads.kv_per_device

    def allocate(self, mesh: Mesh) -> jax.Array:
        """A pool of zeros: slots that were never written are read, then masked, so they must be
        finite."""
        sharding = NamedSharding(mesh, POOL_SPEC)
        make = jax.jit(lambda: jnp.zeros(self.shape, self.dims.dtype), out_shardings=sharding)
        return make()


def page_bytes(dims: DecoderDims, page_tokens: int) -> int:
    """Bytes of one page on one device, keys and values of all layers."""
    per_token = 2 * dims.spec.num_layers * dims.heads.kv_per_rank * dims.spec.head_dim
    return per_token * page_tokens * jnp.dtype(dims.dtype).itemsize


def plan_geometry(
    dims: DecoderDims,
    config: CacheConfig,
    max_tokens: int,
    mesh: Mesh,
    spread: bool = False,
    beside_bytes: int = 0,
) -> PoolGeometry:
    """How many pages each group gets. `max_tokens`: the most that all contexts could ever fill.
    spread: decode attention is spread over the groups, so KV stays in prefill layout.
    beside_bytes: what a device will hold beside the pool, and does not yet.

    Raises ConfigError when not a single page fits, or more than the step's indices can name."""
    heads, page_tokens = dims.heads, config.page_tokens
    if config.kv_pool_tokens is not None:
        num_pages = config.kv_pool_tokens // page_tokens
    else:
        budget = _device_budget(mesh, config.gpu_memory_fraction, beside_bytes)
        num_pages = min(budget // page_bytes(dims, page_tokens), -(-max_tokens // page_tokens))
        if num_pages < 1:
            raise ConfigError(
                "gpu_memory_fraction: the weights and what each of max_num_seqs slots needs "
                f"({beside_bytes / 1e9:.2f} GB together) leave no memory for a page of KV"
            )
    if num_pages < 1:
        raise ConfigError(f"kv_pool_tokens: the KV pool holds no page of {page_tokens} tokens")
    limit = max_pages(dims.spec.num_layers, page_tokens * heads.kv_per_rank, heads.kv_per_rank)
    if num_pages > limit:
        raise ConfigError(
            f"kv_pool_tokens: {num_pages * page_tokens} tokens a group are past what 32-bit "
            f"indices can name in this model's pool: at most {limit * page_tokens}"
        )
    prefill_page_tokens = heads.prefill_page_tokens(page_tokens)
    shared = spread and heads.groups > 1
    return PoolGeometry(
        groups=heads.groups,
        num_pages=num_pages,
        page_tokens=prefill_page_tokens if shared else page_tokens,
        prefill_page_tokens=prefill_page_tokens,
        shared=shared,
    )


def _device_budget(mesh: Mesh, fraction: float, beside_bytes: int) -> int:
    """Bytes of one device that KV may take, weights being there already. A CPU's are the same,
    whatever is beside them."""
    memory = device_memory(mesh.devices.flat[0])
    if memory is None:
        return CPU_POOL_BYTES // mesh.devices.size
    limit, in_use = memory
    return int(limit * fraction) - in_use - beside_bytes


def device_memory(device: Any) -> tuple[int, int] | None:
    """Bytes that a device has for this process, and how many are in use; None for a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats["bytes_limit"], stats["bytes_in_use"]) if stats else None
