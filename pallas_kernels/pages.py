"""Reading pages of the stacked pool by gather, without ever taking a slice of a layer.

A pool may have more elements than 32 bits count. Indices are int32 all the same, because they count
rows, never elements: `max_pages` says how far they reach.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

INDEX_LIMIT = 2**31  # of int32


def max_pages(layers: int, page_rows: int, num_heads: int) -> int:
    """The most pages of a pool `[layers, 2, pages, page_rows, head_dim]` whose rows int32 can name.

    Writes name a row of a layer, and rows of one page past the pool for what is to be dropped.
    `gather_pages` names a head of a page (`num_heads` of them) among the keys and values of all
    layers. 32 layers, 8 heads of 16 tokens: 4,194,304 pages, or 8 TiB in bfloat16 at 128 wide."""
    return min(INDEX_LIMIT // page_rows - 1, INDEX_LIMIT // (layers * 2 * num_heads))


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
