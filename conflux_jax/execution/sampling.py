"""Choosing tokens on the device: greedy, temperature, top-k, top-p, min-p, log-probabilities.

A request's draw depends on its seed and the token's position only. One uniform number picks from
the cumulative distribution, and the cut-offs are found by bisection over the bits of the logits:
no sort over the vocabulary, whose cost would be paid by every row of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from conflux_jax.request import MAX_LOGPROBS

CDF_BLOCK = 256  # vocabulary entries summed at once when a draw is located


class SamplingInputs(NamedTuple):
    """Per sampled row. temperature 0: greedy. top_k 0, top_p 1, min_p 0: off. position: of the
    token to draw. seed: two words. wants_logprobs: whether any row asked (scalar)."""

    temperature: Float[Array, " samples"]
    top_k: Int[Array, " samples"]
    top_p: Float[Array, " samples"]
    min_p: Float[Array, " samples"]
    seed: UInt32[Array, "samples 2"]
    position: Int[Array, " samples"]
    wants_logprobs: Bool[Array, ""]


class Sampled(NamedTuple):
    """Chosen ids; their log-probability under the model (temperature 1, no cut-off) and the
    likeliest alternatives, zeros unless asked for."""

    token_ids: Int[Array, " samples"]
    logprobs: Float[Array, " samples"]
    top_ids: Int[Array, "samples top"]
    top_logprobs: Float[Array, "samples top"]


def sample(logits: Float[Array, "samples vocab"], inputs: SamplingInputs) -> Sampled:
    """One token a row. The costly parts run only when some row needs them."""
    greedy = _argmax(logits)
    random = jnp.any(inputs.temperature > 0)
    drawn = lax.cond(random, _draw, lambda *_: greedy, logits, inputs)
    token_ids = jnp.where(inputs.temperature > 0, drawn, greedy)
    reported = lax.cond(inputs.wants_logprobs, _logprobs, _no_logprobs, logits, token_ids)
    return Sampled(token_ids, *reported)


def _argmax(logits: Float[Array, "samples vocab"]) -> Int[Array, " samples"]:
    """The first of the largest. Two plain reductions, which vectorise where argmax does not."""
    vocab = logits.shape[1]
    best = logits.max(axis=1, keepdims=True)
    ids = jnp.where(logits == best, jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return ids.min(axis=1)


def _draw(logits, inputs: SamplingInputs) -> Int[Array, " samples"]:
    """A draw from the tempered distribution, cut by min-p, then top-k, then top-p as in vLLM."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    # p >= min_p * p_max, in logs; min_p 0 keeps everything.
    kept = scaled >= jnp.log(inputs.min_p)[:, None]
    cut = jnp.any((inputs.top_k > 0) | (inputs.top_p < 1.0))
    kept = lax.cond(cut, _cut, lambda _, kept, *__: kept, scaled, kept, inputs.top_k, inputs.top_p)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    return _locate(weights, _uniform(inputs.seed, inputs.position))


def _cut(scaled, kept, top_k, top_p) -> Bool[Array, "samples vocab"]:
    """Keeps the `top_k` largest (and their ties), then the smallest set of largest ones whose
    probability reaches `top_p`."""
    keys = jnp.where(kept, _ordered(scaled), 0)
    wanted = jnp.where(top_k > 0, top_k, scaled.shape[1])
    keys = jnp.where(keys >= _threshold(keys, jnp.ones_like(scaled), wanted), keys, 0)
    mass = jnp.where(keys > 0, jnp.exp(scaled), 0.0)
    # Rounding must not push the goal past what the whole set sums to.
    goal = jnp.where(top_p < 1.0, top_p, 2.0) * mass.sum(axis=1)
    return (keys > 0) & (keys >= _threshold(keys, mass, goal))


def _ordered(x: Float[Array, "samples vocab"]) -> UInt32[Array, "samples vocab"]:
    """Unsigned integers in the order of the floats, all above 0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys, weight, goal) -> UInt32[Array, "samples 1"]:
    """The largest key t for which the weight of keys >= t reaches the goal; 0 if none does."""

    def body(i, low):
        probe = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.where(keys >= probe[:, None], weight, 0.0).sum(axis=1) >= goal
        return jnp.where(reached, probe, low)

    low = lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))
    return low[:, None]


def _uniform(seed: UInt32[Array, "samples 2"], position) -> Float[Array, " samples"]:
    """One number in [0, 1) a row, from its seed and position alone: one threefry block, whose
    first 24 bits fill a float."""
    counter = position.astype(jnp.uint32)
    bits, _ = threefry2x32_p.bind(seed[:, 0], seed[:, 1], counter, jnp.zeros_like(counter))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _locate(weights, uniform) -> Int[Array, " samples"]:
    """The index at which the running sum passes uniform * total: first the block, then inside."""
    rows, vocab = weights.shape
    padded = jnp.pad(weights, [(0, 0), (0, -vocab % CDF_BLOCK)])
    blocks = padded.reshape(rows, -1, CDF_BLOCK)
    ends = _running_sum(blocks.sum(axis=2))
    target = uniform * ends[:, -1]
    block = _first(ends > target[:, None], ends.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, (block - 1)[:, None], 1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    # An entry of weight 0 is never chosen, whatever rounding does to the sums.
    passed = (_running_sum(inside) + before[:, None] > target[:, None]) & (inside > 0)
    last = jnp.where(inside > 0, jnp.arange(CDF_BLOCK), 0).max(axis=1)
    return (block * CDF_BLOCK + _first(passed, last)).astype(jnp.int32)


def _running_sum(x: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """cumsum as a product with a triangle: short rows, and far quicker to compile."""
    triangle = jnp.triu(jnp.ones((x.shape[1], x.shape[1]), x.dtype))
    return jnp.dot(x, triangle, precision=lax.Precision.HIGHEST)


def _first(mask: Bool[Array, "rows n"], otherwise) -> Int[Array, " rows"]:
    """The first true index of each row."""
    index = jnp.where(mask, jnp.arange(mask.shape[1]), mask.shape[1]).min(axis=1)
    return jnp.where(index < mask.shape[1], index, otherwise)


def _logprobs(logits, token_ids):
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1) - normaliser
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return chosen[:, 0], ids.astype(jnp.int32), top - normaliser


def _no_logprobs(logits, token_ids):
    shape = (logits.shape[0], min(MAX_LOGPROBS, logits.shape[1]))
    return jnp.zeros(shape[0]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
