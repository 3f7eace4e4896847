"""One draw a row from weights over a vocabulary, or over the part of it that a rank has.

A request's draw depends on its seed and the token's position only: one uniform number picks from
the cumulative distribution.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

CDF_BLOCK = 256  # vocabulary entries summed at once when a draw is located


def weigh(
    logits: Float[Array, "samples n"],
    best: Float[Array, " samples"],
    temperature: Float[Array, " samples"],
    min_p: Float[Array, " samples"],
) -> Float[Array, "samples n"]:
    """Tempered probabilities, over that of the row's `best` logit; 0 where min-p cuts them off."""
    # A row of temperature 0 is not drawn; it shall have numbers all the same.
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    below = logits / temperature[:, None] - (best / temperature)[:, None]
    # p >= min_p * p_max, in logs; min_p 0 keeps everything.
    return jnp.where(below >= jnp.log(min_p)[:, None], jnp.exp(below), 0.0)


def uniform(
    seed: UInt32[Array, "samples 2"], position: Int[Array, " samples"]
) -> Float[Array, " samples"]:
    """One number in [0, 1) a row, from its seed and position alone: one threefry block, whose
    first 24 bits fill a float."""
    counter = position.astype(jnp.uint32)
    bits, _ = threefry2x32_p.bind(seed[:, 0], seed[:, 1], counter, jnp.zeros_like(counter))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def total(weights: Float[Array, "samples n"]) -> Float[Array, " samples"]:
    """Of all weights of a row, summed as `locate` does."""
    return _blocks(weights).sum(axis=2).sum(axis=1)


def locate(
    weights: Float[Array, "samples n"], target: Float[Array, " samples"]
) -> Int[Array, " samples"]:
    """The index at which the running sum passes the target: first the block, then inside it. An
    index of weight 0 is not chosen, unless all are."""
    blocks = _blocks(weights)
    block, target = passed(blocks.sum(axis=2), target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index, _ = passed(inside, target)
    return block * CDF_BLOCK + index


def _blocks(weights: Float[Array, "samples n"]) -> Float[Array, "samples blocks block"]:
    padded = jnp.pad(weights, [(0, 0), (0, -weights.shape[1] % CDF_BLOCK)])
    return padded.reshape(weights.shape[0], -1, CDF_BLOCK)


def passed(
    mass: Float[Array, "samples n"], target: Float[Array, " samples"]
) -> tuple[Int[Array, " samples"], Float[Array, " samples"]]:
    """The first index at which the running sum passes the target, and how far the target is past
    the sum before it. An entry of mass 0 is never chosen, whatever rounding does to the sums."""
    ends = running_sum(mass)
    index, count = jnp.arange(mass.shape[1], dtype=jnp.int32), mass.shape[1]
    first = jnp.where((ends > target[:, None]) & (mass > 0), index, count).min(axis=1)
    last = jnp.where(mass > 0, index, 0).max(axis=1)
    chosen = jnp.where(first < count, first, last)
    before = jnp.take_along_axis(ends, jnp.maximum(chosen - 1, 0)[:, None], axis=1)[:, 0]
    return chosen, target - jnp.where(chosen > 0, before, 0.0)


def running_sum(x: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """cumsum as a product with a triangle: short rows, and far quicker to compile."""
    triangle = jnp.triu(jnp.ones((x.shape[1], x.shape[1]), x.dtype))
    return jnp.dot(x, triangle, precision=lax.Precision.HIGHEST)
