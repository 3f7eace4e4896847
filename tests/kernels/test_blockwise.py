"""The XLA attention path against the oracle: paged contexts, ragged segments, stale pages."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise import (
    Segments,
    decode_attention,
    max_prefill_blocks,
    prefill_attention,
    prefill_block_queries,
)
from pallas_kernels.reference import attend, causal, page_rows_of

LAYERS, LAYER = 3, 1


class PagedPool:
    """A pool in whose unwritten slots keys are NaN and values large: to count one shows."""

    def __init__(self, rng, pages, page_rows, head_dim):
        self.rng = rng
        self.array = np.full((LAYERS, 2, pages, page_rows, head_dim), 1e3, np.float32)
        self.array[:, 0] = np.nan
        self.free = list(rng.permutation(pages))

    def store(self, k, v, page_tokens):
        """Writes a sequence to scattered pages of LAYER; returns their ids."""
        pages = [page_rows_of(x.astype(np.float32), page_tokens) for x in (k, v)]
        ids = [int(self.free.pop()) for _ in range(len(pages[0]))]
        for kind in (0, 1):
            heads, tokens = k.shape[1], len(k)
            for page, page_id in enumerate(ids):
                used = min(page_tokens, tokens - page * page_tokens)
                block = pages[kind][page].reshape(heads, page_tokens, -1)
                target = self.array[LAYER, kind, page_id].reshape(heads, page_tokens, -1)
                target[:, :used] = block[:, :used]
        return ids


def _table(rows, width):
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("contexts", "page_tokens", "kv_heads", "per_kv"),
    [
        ([5], 16, 3, 3),
        ([0, 1, 15, 16, 17, 300], 16, 3, 3),
        ([0, 40, 1, 0, 7, 129, 128, 127, 64, 3, 0], 4, 1, 2),
        ([70, 2], 64, 2, 1),
    ],
)
def test_decode_equals_the_oracle(contexts, page_tokens, kv_heads, per_kv, dtype):
    rng = np.random.default_rng(0)
    head_dim, rows = 16, len(contexts)
    pool = PagedPool(rng, 200, page_tokens * kv_heads, head_dim)
    q = rng.normal(size=(rows, kv_heads, per_kv, head_dim))
    sequences = [rng.normal(size=(2, n + 1, kv_heads, head_dim)) for n in contexts]
    if dtype == jnp.bfloat16:  # the oracle sees what the kernel sees
        q = np.asarray(jnp.asarray(q, dtype), np.float64)
        sequences = [np.asarray(jnp.asarray(s, dtype), np.float64) for s in sequences]
    ids = [pool.store(s[0, :-1], s[1, :-1], page_tokens) for s in sequences]
    out = decode_attention(
        jnp.asarray(q, dtype),
        jnp.asarray(np.stack([s[0, -1] for s in sequences]), dtype),
        jnp.asarray(np.stack([s[1, -1] for s in sequences]), dtype),
        jnp.asarray(pool.array, dtype),
        jnp.int32(LAYER),
        jnp.asarray(_table(ids, 80)),
        jnp.asarray(contexts, jnp.int32),
    )
    expected = np.stack(
        [
            attend(q[i].reshape(-1, head_dim), s[0], s[1]).reshape(q[i].shape)
            for i, s in enumerate(sequences)
        ]
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("segments", "page_tokens", "kv_heads", "per_kv", "axis"),
    [
        ([(0, 1)], 8, 1, 1, 16),  # (context, chunk)
        ([(0, 16)], 8, 1, 3, 16),
        ([(7, 1), (0, 3), (33, 5)], 8, 2, 2, 16),
        ([(300, 200), (0, 1), (1, 130), (16, 64)], 16, 2, 2, 400),
        ([(513, 140)], 32, 1, 1, 140),
    ],
)
def test_prefill_equals_the_oracle(segments, page_tokens, kv_heads, per_kv, axis):
    rng = np.random.default_rng(1)
    head_dim = 16
    pool = PagedPool(rng, 64, page_tokens * kv_heads, head_dim)
    q = rng.normal(size=(axis, kv_heads, per_kv, head_dim))
    k, v = np.full((2, axis, kv_heads, head_dim), 1e3)
    starts, ids, blocks, expected, at = [], [], [], [], 0
    step = prefill_block_queries(axis)
    for index, (context, length) in enumerate(segments):
        past = rng.normal(size=(2, context, kv_heads, head_dim))
        now = rng.normal(size=(2, length, kv_heads, head_dim))
        ids.append(pool.store(past[0], past[1], page_tokens))
        k[at : at + length], v[at : at + length] = now
        starts.append(at)
        blocks += [(index, first, at + length) for first in range(at, at + length, step)]
        whole = np.concatenate([past, now], axis=1)
        queries = q[at : at + length].reshape(length, -1, head_dim)
        expected.append(causal(queries, whole[0], whole[1]).reshape(length, *q.shape[1:]))
        at += length
    padding = len(starts) + 2
    width = max_prefill_blocks(axis, padding)
    assert len(blocks) <= width
    out = prefill_attention(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(k, jnp.float32),
        jnp.asarray(v, jnp.float32),
        jnp.asarray(pool.array),
        jnp.int32(LAYER),
        Segments(
            jnp.asarray([*starts, 0, 0], jnp.int32),
            jnp.asarray([*(context for context, _ in segments), 0, 0], jnp.int32),
            jnp.asarray(_table([*ids, [], []], 40)),
            jnp.asarray(blocks + [(0, 0, 0)] * (width - len(blocks)), jnp.int32),
            jnp.int32(len(blocks)),
        ),
    )
    np.testing.assert_allclose(np.asarray(out[:at]), np.concatenate(expected), atol=1e-5)
