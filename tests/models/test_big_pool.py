"""A KV pool with more elements than 32 bits count (bug case 34): its far end holds what was put
there, and nothing else has changed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conflux_jax.config import CacheConfig, ConfigError
from conflux_jax.execution.kv_cache import plan_geometry
from conflux_jax.execution.runner import make_mesh
from conflux_jax.models.attention import (
    AttentionInputs,
    AttentionOptions,
    DecodeInputs,
    HandoffInputs,
    split_attention,
)
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.spec import ModelSpec
from pallas_kernels.pages import gather_pages, max_pages
from pallas_kernels.reference import attend

pytestmark = pytest.mark.meshes

LAYERS, HEADS, PAGE_TOKENS, HEAD_DIM = 2, 2, 8, 64
PAGE_ROWS = HEADS * PAGE_TOKENS
PAGES = 2**31 // (LAYERS * 2 * PAGE_ROWS * HEAD_DIM) + 8
DTYPE = jnp.bfloat16  # 4 GiB; of float8, XLA's CPU backend would make a wider copy for the scatter
SPEC = ModelSpec(
    name="test",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def layer_step(pool, qkv, layer, decode: DecodeInputs, handoff: HandoffInputs):
    """The attention stage of one layer on one device: decode rows, and tokens that change their
    place in the pool."""
    inputs, heads = AttentionInputs(decode, None, handoff), HeadLayout.make(SPEC, 1, 1)
    step = jax.shard_map(
        partial(split_attention, heads=heads, options=AttentionOptions()),
        mesh=make_mesh(1, 1),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return step(qkv, pool, layer, inputs)


def row_of(page: int, token: int) -> int:
    return page * PAGE_ROWS + token


@pytest.mark.timeout(600)
def test_the_far_end_of_a_pool_past_2_to_the_31_elements():
    """Tokens are written to the last page of the last layer, read by attention, and moved from
    there by the hand-off to the page before. Values are small integers: exact in bfloat16."""
    layer, last, before = jnp.int32(LAYERS - 1), PAGES - 1, PAGES - 2
    rng = np.random.default_rng(0)
    kv = rng.integers(-8, 9, (PAGE_TOKENS, 1, 2 * HEADS, HEAD_DIM)).astype(np.float32)
    q = rng.normal(size=(PAGE_TOKENS, 1, HEADS, HEAD_DIM)).astype(np.float32)
    rows = jnp.arange(PAGE_TOKENS)
    nothing = jnp.full(PAGE_TOKENS, PAGES * PAGE_ROWS)  # past the pool: dropped
    table = jnp.full((PAGE_TOKENS, 1), last)
    stay = HandoffInputs(jnp.zeros((1, PAGE_TOKENS), jnp.int32), nothing)
    fill = DecodeInputs(jnp.int32(PAGE_TOKENS), 0 * rows, table, row_of(last, 0) + rows)
    read = DecodeInputs(jnp.int32(PAGE_TOKENS), 0 * rows + PAGE_TOKENS, table, nothing)
    move = HandoffInputs(row_of(last, 0) + rows[None], row_of(before, 0) + rows)

    pool = jnp.zeros((LAYERS, 2, PAGES, PAGE_ROWS, HEAD_DIM), DTYPE)
    assert pool.size > 2**31
    args = pool, jnp.concatenate([q, kv], axis=2), layer
    step = jax.jit(layer_step, donate_argnums=0).lower(*args, fill, stay).compile()
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 20  # no copy of the pool
    _, pool = step(*args, fill, stay)
    out, pool = step(pool, *args[1:], read, move)

    keys, values = kv[:, 0, :HEADS], kv[:, 0, HEADS:]
    for page in (last, before):
        got = gather_pages(pool, layer, jnp.asarray([page]), HEADS)
        for found, put in zip(got, (keys, values), strict=True):
            np.testing.assert_array_equal(np.asarray(found, np.float32), put.swapaxes(0, 1))
    # And nothing else anywhere.
    assert int(jax.jit(jnp.count_nonzero)(pool)) == 2 * np.count_nonzero(kv)
    for row in range(PAGE_TOKENS):  # what is in the page, and the row's own token
        k, v = (np.concatenate([x, x[row : row + 1]]) for x in (keys, values))
        got = np.asarray(out[row]).reshape(HEADS, HEAD_DIM)
        np.testing.assert_allclose(got, attend(q[row, 0], k, v), atol=1e-5)


def test_a_pool_past_what_the_indices_can_name_is_refused():
    """Exactly from there on: the largest index of every use is computed in whole numbers."""
    dims = DecoderDims(SPEC, HeadLayout.make(SPEC, 1, 1), jnp.dtype(DTYPE))
    pages = max_pages(LAYERS, PAGE_ROWS, HEADS)

    def largest(pages: int) -> int:
        past_the_pool = pages * PAGE_ROWS + PAGE_ROWS - 1
        last_head = ((LAYERS - 1) * 2 + 1) * pages * HEADS + pages * HEADS - 1
        return max(past_the_pool, last_head)

    assert largest(pages) <= np.iinfo(np.int32).max < largest(pages + 1)
    mesh = make_mesh(1, 1)
    config = CacheConfig(page_tokens=PAGE_TOKENS, kv_pool_tokens=pages * PAGE_TOKENS)
    assert plan_geometry(dims, config, 1, mesh).num_pages == pages
    config = CacheConfig(page_tokens=PAGE_TOKENS, kv_pool_tokens=(pages + 1) * PAGE_TOKENS)
    with pytest.raises(ConfigError, match=f"kv_pool_tokens: .* at most {pages * PAGE_TOKENS}$"):
        plan_geometry(dims, config, 1, mesh)
