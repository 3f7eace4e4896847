"""Choosing tokens on the device: greedy, temperature, top-k, top-p, min-p, log-probabilities.

A request's draw depends on its seed and the token's position only. One uniform number picks from
the cumulative distribution, and the cut-offs are found by bisection over the bits of the logits:
no sort over the vocabulary, whose cost would be paid by every row of the batch.

The vocabulary may be split over the ranks of a tensor-parallel group. Logits never leave their
rank: ranks agree on a few numbers a row (`VocabShard`), and all of them choose the same token. On
one rank there is nothing to agree on, and no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

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


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary whose logits this rank has, and what the ranks find together.

    size: entries of each rank; rank r has those from r * size on. axis: the ranks' mesh axis.
    Reductions are over the ranks, of whatever each has reduced over its own entries, and every
    rank gets the same result. They run inside `lax.cond` and loops too: the ranks of a group hold
    the same `SamplingInputs`, so that all of them take the same way.
    """

    size: int
    ranks: int = 1
    axis: str = "tp"

    @property
    def total(self) -> int:
        return self.size * self.ranks

    @property
    def offset(self) -> int | Int[Array, ""]:
        """The id of this rank's first entry."""
        return lax.axis_index(self.axis) * self.size if self.ranks > 1 else 0

    @property
    def ids(self) -> Int[Array, " shard"]:
        """The id of each entry of this rank."""
        return self.offset + jnp.arange(self.size, dtype=jnp.int32)

    def max(self, x: Array) -> Array:
        return lax.pmax(x, self.axis) if self.ranks > 1 else x

    def min(self, x: Array) -> Array:
        return lax.pmin(x, self.axis) if self.ranks > 1 else x

    def sum(self, x: Array) -> Array:
        return lax.psum(x, self.axis) if self.ranks > 1 else x

    def join(self, x: Shaped[Array, "samples n"]) -> Shaped[Array, "samples all"]:
        """What each rank has of a row, side by side. For a few columns, never for logits."""
        return lax.all_gather(x, self.axis, axis=1, tiled=True) if self.ranks > 1 else x


def sample(
    logits: Float[Array, "samples shard"], inputs: SamplingInputs, vocab: VocabShard
) -> Sampled:
    """One token a row. The costly parts run only when some row needs them."""
    greedy = _argmax(vocab, logits)
    random = jnp.any(inputs.temperature > 0)
    drawn = lax.cond(random, partial(_draw, vocab), lambda *_: greedy, logits, inputs)
    token_ids = jnp.where(inputs.temperature > 0, drawn, greedy)
    report, zeros = partial(_logprobs, vocab), partial(_no_logprobs, vocab)
    return Sampled(token_ids, *lax.cond(inputs.wants_logprobs, report, zeros, logits, token_ids))


def _argmax(vocab: VocabShard, logits: Float[Array, "samples shard"]) -> Int[Array, " samples"]:
    """The first of the largest. Two plain reductions, which vectorise where argmax does not."""
    best = vocab.max(logits.max(axis=1, keepdims=True))
    ids = jnp.where(logits == best, vocab.ids, vocab.total - 1)
    return vocab.min(ids.min(axis=1))


def _draw(vocab: VocabShard, logits, inputs: SamplingInputs) -> Int[Array, " samples"]:
    """A draw from the tempered distribution, cut by min-p, then top-k, then top-p as in vLLM."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
    scaled = logits / temperature
    scaled = scaled - vocab.max(scaled.max(axis=1, keepdims=True))
    # p >= min_p * p_max, in logs; min_p 0 keeps everything.
    kept = scaled >= jnp.log(inputs.min_p)[:, None]
    cut = jnp.any((inputs.top_k > 0) | (inputs.top_p < 1.0))
    limits = inputs.top_k, inputs.top_p
    kept = lax.cond(cut, partial(_cut, vocab), lambda _, kept, *__: kept, scaled, kept, *limits)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    return _locate(vocab, weights, _uniform(inputs.seed, inputs.position))


def _cut(vocab: VocabShard, scaled, kept, top_k, top_p) -> Bool[Array, "samples shard"]:
    """Keeps the `top_k` largest (and their ties), then the smallest set of largest ones whose
    probability reaches `top_p`."""
    keys = jnp.where(kept, _ordered(scaled), 0)
    wanted = jnp.where(top_k > 0, top_k, vocab.total)
    keys = jnp.where(keys >= _threshold(vocab, keys, jnp.ones_like(scaled), wanted), keys, 0)
    mass = jnp.where(keys > 0, jnp.exp(scaled), 0.0)
    # Rounding must not push the goal past what the whole set sums to.
    goal = jnp.where(top_p < 1.0, top_p, 2.0) * vocab.sum(mass.sum(axis=1))
    return (keys > 0) & (keys >= _threshold(vocab, keys, mass, goal))


def _ordered(x: Float[Array, "samples shard"]) -> UInt32[Array, "samples shard"]:
    """Unsigned integers in the order of the floats, all above 0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(vocab: VocabShard, keys, weight, goal) -> UInt32[Array, "samples 1"]:
    """The largest key t for which the weight of keys >= t reaches the goal; 0 if none does."""

    def body(i, low):
        probe = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        found = vocab.sum(jnp.where(keys >= probe[:, None], weight, 0.0).sum(axis=1))
        return jnp.where(found >= goal, probe, low)

    low = lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))
    return low[:, None]


def _uniform(seed: UInt32[Array, "samples 2"], position) -> Float[Array, " samples"]:
    """One number in [0, 1) a row, from its seed and position alone: one threefry block, whose
    first 24 bits fill a float."""
    counter = position.astype(jnp.uint32)
    bits, _ = threefry2x32_p.bind(seed[:, 0], seed[:, 1], counter, jnp.zeros_like(counter))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _locate(vocab: VocabShard, weights, uniform) -> Int[Array, " samples"]:
    """The id at which the running sum passes uniform * total: first the rank, then the block, then
    inside it. Ranks that are not it search in vain; their result is not looked at."""
    rows = weights.shape[0]
    padded = jnp.pad(weights, [(0, 0), (0, -vocab.size % CDF_BLOCK)])
    blocks = padded.reshape(rows, -1, CDF_BLOCK)
    block_mass = blocks.sum(axis=2)
    rank_mass = vocab.join(block_mass.sum(axis=1, keepdims=True))
    target = uniform * rank_mass.sum(axis=1)
    rank, target = _pass(rank_mass, target)
    block, target = _pass(block_mass, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index, _ = _pass(inside, target)
    ids = vocab.offset + block * CDF_BLOCK + index
    return vocab.min(jnp.where(vocab.offset == rank * vocab.size, ids, vocab.total - 1))


def _pass(
    mass: Float[Array, "samples n"], target: Float[Array, " samples"]
) -> tuple[Int[Array, " samples"], Float[Array, " samples"]]:
    """The first index at which the running sum passes the target, and how far the target is past
    the sum before it. An entry of mass 0 is never chosen, whatever rounding does to the sums."""
    ends = _running_sum(mass)
    index, count = jnp.arange(mass.shape[1], dtype=jnp.int32), mass.shape[1]
    first = jnp.where((ends > target[:, None]) & (mass > 0), index, count).min(axis=1)
    last = jnp.where(mass > 0, index, 0).max(axis=1)
    chosen = jnp.where(first < count, first, last)
    before = jnp.take_along_axis(ends, jnp.maximum(chosen - 1, 0)[:, None], axis=1)[:, 0]
    return chosen, target - jnp.where(chosen > 0, before, 0.0)


def _running_sum(x: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """cumsum as a product with a triangle: short rows, and far quicker to compile."""
    triangle = jnp.triu(jnp.ones((x.shape[1], x.shape[1]), x.dtype))
    return jnp.dot(x, triangle, precision=lax.Precision.HIGHEST)


def _logprobs(vocab: VocabShard, logits, token_ids):
    best = vocab.max(logits.max(axis=1, keepdims=True))
    normaliser = best + jnp.log(vocab.sum(jnp.exp(logits - best).sum(axis=1, keepdims=True)))
    local = token_ids - vocab.offset
    own = jnp.take_along_axis(logits, local[:, None], axis=1, mode="clip")[:, 0]
    chosen = vocab.sum(jnp.where((local >= 0) & (local < vocab.size), own, 0.0))
    # Of equals the lower id comes first: so does each rank's own list, and so do the ranks.
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, vocab.size))
    candidates, ids = vocab.join(top), vocab.join(vocab.offset + ids.astype(jnp.int32))
    top, at = lax.top_k(candidates, _num_alternatives(vocab))
    return chosen - normaliser[:, 0], jnp.take_along_axis(ids, at, axis=1), top - normaliser


def _no_logprobs(vocab: VocabShard, logits, token_ids):
    shape = (logits.shape[0], _num_alternatives(vocab))
    return jnp.zeros(shape[0]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)


def _num_alternatives(vocab: VocabShard) -> int:
    return min(MAX_LOGPROBS, vocab.total)
