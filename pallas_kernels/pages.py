"""Reading pages of the stacked pool by gather, without ever taking a slice of a layer."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def gather_pages(
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    page_ids: Int[Array, "*batch blocks"],
    num_heads: int,
) -> tuple[
    Float[Array, "*batch heads keys head_dim"],
    Float[Array, "*batch heads keys head_dim"],
]:
    """(keys, values) of whole pages of one layer, by head, pages end to end. Ids past the pool are
    clamped: mask what they bring.

    One index a page and head: what it fetches is contiguous, and lands where it is used."""
    layers, two, pages, page_rows, head_dim = pool.shape
    page_tokens = page_rows // num_heads
    flat = pool.reshape(layers * two * pages * num_heads, page_tokens * head_dim)
    first = (2 * layer * pages + jnp.clip(page_ids, 0, pages - 1)) * num_heads
    heads = first[..., None, :] + jnp.arange(num_heads)[:, None]
    dims = lax.GatherDimensionNumbers(
        offset_dims=(heads.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def take(ids):
        rows = lax.gather(
            flat,
            ids[..., None],
            dims,
            slice_sizes=(1, flat.shape[1]),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        return rows.reshape(*ids.shape[:-1], ids.shape[-1] * page_tokens, head_dim)

    return take(heads), take(heads + pages * num_heads)
