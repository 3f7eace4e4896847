"""The XLA path: plain `jnp` attention over pages, block by block with a running maximum and sum.

Trip counts follow the real lengths, so padding costs next to nothing, and no `[tokens, context]`
score matrix exists. Scores and sums are float32 whatever the inputs. Any device runs it; the GPU
kernels are checked against it.

What is masked has weight 0, whatever its keys are, but its values must be finite: 0 times what is
no number is none either.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import gather_pages

NEG_INF = -1e30  # finite: a block that is masked whole must not make NaN
DECODE_BLOCK_ROWS = 32  # requests that share a trip count
DECODE_BLOCK_KEYS = 128
PREFILL_BLOCK_QUERIES = 128
PREFILL_BLOCK_KEYS = 256


class Softmax(NamedTuple):
    """A softmax-weighted sum in the making: its maximum, its sum, and the unnormalised values."""

    maximum: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    values: Float[Array, "*rows head_dim"]

    def add(
        self, scores: Float[Array, "*rows keys"], values: Float[Array, "*batch keys head_dim"]
    ) -> Softmax:
        """With more keys: `scores` [..., queries, keys], NEG_INF where masked."""
        maximum = jnp.maximum(self.maximum, scores.max(axis=-1))
        weights = jnp.exp(scores - maximum[..., None])
        keep = jnp.exp(self.maximum - maximum)
        added = _einsum("...qt,...td->...qd", weights, values)
        return Softmax(
            maximum, self.total * keep + weights.sum(axis=-1), self.values * keep[..., None] + added
        )

    def result(self) -> Float[Array, "*rows head_dim"]:
        return self.values / jnp.maximum(self.total, 1e-30)[..., None]


def decode_attention(
    q: Float[Array, "rows kv_heads q_per_kv head_dim"],
    new_k: Float[Array, "rows kv_heads head_dim"],
    new_v: Float[Array, "rows kv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    context_lens: Int[Array, " rows"],
) -> Float[Array, "rows kv_heads q_per_kv head_dim"]:
    """One query token a row against `context_lens` tokens in the pool and its own key and value,
    which are not in the pool yet and seed the sum. Padded rows: context 0."""
    rows = q.shape[0]
    block = min(DECODE_BLOCK_ROWS, rows)
    padding = -rows % block

    def blocked(x):
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, block, *x.shape[1:])

    def one_block(args):
        return _decode_block(*args, pool=pool, layer=layer)

    inputs = tuple(map(blocked, (q, new_k, new_v, page_table, context_lens)))
    if rows <= block:
        return one_block(tuple(x[0] for x in inputs))
    out = lax.map(one_block, inputs)
    return out.reshape(-1, *q.shape[1:])[:rows]


def _decode_block(q, new_k, new_v, page_table, context_lens, *, pool, layer):
    """`decode_attention` for a few rows, as long as the longest of them needs."""
    kv_heads, head_dim = new_k.shape[1:]
    page_tokens = pool.shape[3] // kv_heads
    pages = max(1, min(DECODE_BLOCK_KEYS // page_tokens, page_table.shape[1]))
    page_table = jnp.pad(page_table, [(0, 0), (0, -page_table.shape[1] % pages)])
    q32 = q.astype(jnp.float32) / math.sqrt(head_dim)
    own = _einsum("bkgd,bkd->bkg", q32, new_k.astype(jnp.float32))
    seed = jnp.broadcast_to(new_v.astype(jnp.float32)[:, :, None], q.shape)
    offsets = jnp.arange(pages * page_tokens)

    def body(state):
        i, softmax = state
        ids = lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
        k, v = _widened(gather_pages(pool, layer, ids, kv_heads))
        scores = _einsum("bkgd,bktd->bkgt", q32, k)
        seen = i * pages * page_tokens + offsets[None] < context_lens[:, None]
        scores = jnp.where(seen[:, None, None], scores, NEG_INF)
        return i + 1, softmax.add(scores, v)

    trips = _ceil_div(context_lens.max(), pages * page_tokens)
    start = Softmax(own, jnp.ones_like(own), seed)
    _, softmax = lax.while_loop(lambda s: s[0] < trips, body, (jnp.int32(0), start))
    return softmax.result().astype(q.dtype)


class Segments(NamedTuple):
    """The prompts' chunks of one iteration, laid end to end on one token axis.

    starts: where a chunk begins on the axis. context_lens: tokens of it already in the pool.
    page_table: its pages in the pool. blocks: (segment, first token, end of the segment) of each
    block of queries in rising order, of which the first `num_blocks` are real.
    """

    starts: Int[Array, " segments"]
    context_lens: Int[Array, " segments"]
    page_table: Int[Array, "segments max_pages"]
    blocks: Int[Array, "blocks 3"]
    num_blocks: Int[Array, ""]


def prefill_block_queries(num_tokens: int) -> int:
    """Queries of one block on a token axis of that length."""
    return min(PREFILL_BLOCK_QUERIES, num_tokens)


def max_prefill_blocks(num_tokens: int, num_segments: int) -> int:
    """The most query blocks that that many segments on a token axis can make."""
    return num_tokens // prefill_block_queries(num_tokens) + num_segments


def prefill_attention(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    segments: Segments,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """Causal attention of every chunk to its own earlier tokens and to its context in the pool.
    Rows outside all segments come back as zeros or as leftovers of a block: do not use them."""
    tokens, kv_heads, q_per_kv, head_dim = q.shape
    block = prefill_block_queries(tokens)
    block_keys = min(PREFILL_BLOCK_KEYS, tokens)
    scale = 1.0 / math.sqrt(head_dim)
    # Head-major, padded so that a block that starts on the axis never runs past its end.
    q_heads = _padded_heads(q.transpose(1, 0, 2, 3).astype(jnp.float32) * scale, block)
    k_heads = _padded_heads(k.transpose(1, 0, 2).astype(jnp.float32), block_keys)
    v_heads = _padded_heads(v.transpose(1, 0, 2).astype(jnp.float32), block_keys)

    def one_block(i, out):
        segment, first, end = segments.blocks[i]
        start, context = segments.starts[segment], segments.context_lens[segment]
        q_block = lax.dynamic_slice_in_dim(q_heads, first, block, axis=1)
        q_block = q_block.reshape(kv_heads, block * q_per_kv, head_dim)
        softmax = Softmax(
            jnp.full(q_block.shape[:2], NEG_INF),
            jnp.zeros(q_block.shape[:2]),
            jnp.zeros(q_block.shape),
        )
        softmax = _attend_context(
            softmax, q_block, pool, layer, segments.page_table[segment], context
        )
        last = jnp.minimum(first + block, end)

        def own(j, softmax):
            at = start + j * block_keys
            keys = lax.dynamic_slice_in_dim(k_heads, at, block_keys, axis=1)
            values = lax.dynamic_slice_in_dim(v_heads, at, block_keys, axis=1)
            scores = _einsum("kqd,ktd->kqt", q_block, keys)
            query = jnp.repeat(first + jnp.arange(block), q_per_kv)
            key = at + jnp.arange(block_keys)
            return softmax.add(jnp.where(key <= query[:, None], scores, NEG_INF), values)

        softmax = lax.fori_loop(0, _ceil_div(last - start, block_keys), own, softmax)
        result = softmax.result().reshape(kv_heads, block, q_per_kv, head_dim)
        # A block's tail may lie on the next segment's rows, whose own block comes later.
        return lax.dynamic_update_slice_in_dim(out, result.astype(q.dtype), first, axis=1)

    out = jnp.zeros(q_heads.shape, q.dtype)
    out = lax.fori_loop(0, segments.num_blocks, one_block, out)
    return out[:, :tokens].transpose(1, 0, 2, 3)


def _attend_context(softmax, q_block, pool, layer, pages, context):
    """Adds the tokens of a chunk's context, which all its queries see."""
    kv_heads = q_block.shape[0]
    page_tokens = pool.shape[3] // kv_heads
    count = max(1, min(PREFILL_BLOCK_KEYS // page_tokens, pages.shape[0]))
    pages = jnp.pad(pages, (0, -pages.shape[0] % count))
    keys = count * page_tokens

    def body(j, softmax):
        ids = lax.dynamic_slice_in_dim(pages, j * count, count)
        k, v = _widened(gather_pages(pool, layer, ids, kv_heads))
        scores = _einsum("kqd,ktd->kqt", q_block, k)
        seen = j * keys + jnp.arange(keys) < context
        return softmax.add(jnp.where(seen, scores, NEG_INF), v)

    return lax.fori_loop(0, _ceil_div(context, keys), body, softmax)


def _einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)


def _widened(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)


def _padded_heads(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, rows)] + [(0, 0)] * (x.ndim - 2))


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + (b - 1)) // b
