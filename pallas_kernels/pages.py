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
    Float[Array, "*batch blocks heads page_tokens head_dim"],
    Float[Array, "*batch blocks heads page_tokens head_dim"],
]:
    """(keys, values) of whole pages of one layer. Ids past the pool are clamped: mask what they
    bring."""
    layers, two, pages, page_rows, head_dim = pool.shape
    flat = pool.reshape(layers * two * pages, page_rows * head_dim)
    first = 2 * layer * pages + jnp.clip(page_ids, 0, pages - 1)
    shape = (*page_ids.shape, num_heads, page_rows // num_heads, head_dim)
    dims = lax.GatherDimensionNumbers(
        offset_dims=(page_ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def take(ids):
        rows = lax.gather(
            flat,
            ids[..., None],
            dims,
            slice_sizes=(1, flat.shape[1]),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        return rows.reshape(shape)

    return take(first), take(first + pages)
