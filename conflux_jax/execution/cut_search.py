"""Where top-k and top-p cut a distribution whose vocabulary is split over ranks, in few exchanges.

A cut is the largest threshold for which the logits from it up, counted or weighed, reach a goal.
Each rank sorts its logits into blocks. Together the ranks look up the first logit of every block of
every rank (`Table`), which leaves one block of each rank in question. These are exchanged, and say
the threshold exactly.

Nothing here talks to other ranks: the caller exchanges between the steps, outside all branches, so
that a GPU can skip the steps without asking the host. Logits are compared, and sorted, as integers
in their order (`key`): exactly, as on one rank, and on a CPU several times faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from conflux_jax.execution.draw import running_sum

_Blocks = UInt32[Array, "samples blocks block"]
_PerRank = Float[Array, "ranks samples"]
HIGHEST = np.uint32(2**32 - 1)
Weigh = Callable[[Float[Array, "samples n"]], Float[Array, "samples n"]]


class Table(NamedTuple):
    """What each rank has from each pivot up: how many logits, and what they weigh.

    pivots: the first logit of each block of each rank, in no order. whole: what all of a rank's
    logits weigh.
    """

    pivots: UInt32[Array, "samples pivots"]
    counts: Float[Array, "ranks samples pivots"]
    masses: Float[Array, "ranks samples pivots"]
    whole: _PerRank

    def reached(self, by_mass: bool) -> Float[Array, "ranks samples pivots"]:
        return self.masses if by_mass else self.counts


class Gap(NamedTuple):
    """A threshold is `low`, or above it and below `high`: pivots with no other one between them;
    0 and the highest integer where there is none."""

    low: UInt32[Array, " samples"]
    high: UInt32[Array, " samples"]


class Cut(NamedTuple):
    """The threshold, 0 where nothing is cut off, and what each rank has from it up."""

    threshold: UInt32[Array, " samples"]
    masses: _PerRank


def key(logits: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Unsigned integers in the order of the floats, all above 0."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _logit(keys: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    bits = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(1 << 31), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def block_size(entries: int) -> int:
    """Of as many blocks as a block has entries: the least that is exchanged."""
    return math.isqrt(entries - 1) + 1


def sorted_blocks(logits: Float[Array, "samples shard"]) -> _Blocks:
    """Keys of each row, largest first, filled up with that of -inf."""
    entries = logits.shape[1]
    size = block_size(entries)
    filling = (0, 0), (0, size * size - entries)
    filled = jnp.pad(logits, filling, constant_values=-jnp.inf)
    return (~lax.sort(~key(filled), dimension=1, is_stable=False)).reshape(-1, size, size)


def look_up(
    blocks: _Blocks, pivots: UInt32[Array, "samples pivots"], weigh: Weigh
) -> tuple[Float[Array, "samples pivots"], Float[Array, "samples pivots"]]:
    """How many of a rank's logits are at or above each pivot, and what they weigh."""
    in_block = _weights(blocks, weigh).sum(axis=2)
    earlier = running_sum(in_block) - in_block
    block = _last_block(blocks[:, :, 0], pivots)
    keys = jnp.take_along_axis(blocks, block[:, :, None], axis=1, mode="clip")
    above = keys >= pivots[:, :, None]
    count = block * blocks.shape[2] + above.sum(axis=2)
    mass = jnp.where(above, _weights(keys, weigh), 0.0).sum(axis=2)
    mass += jnp.take_along_axis(earlier, block, axis=1, mode="clip")
    return count.astype(jnp.float32), mass


def _weights(keys: _Blocks, weigh: Weigh) -> Float[Array, "samples blocks block"]:
    return weigh(_logit(keys.reshape(keys.shape[0], -1))).reshape(keys.shape)


def _last_block(
    heads: UInt32[Array, "samples blocks"], bound: UInt32[Array, "samples bounds"]
) -> Int[Array, "samples bounds"]:
    """The last block that begins at or above a bound: all before it are above, all after below."""
    begun = (heads[:, None, :] >= bound[:, :, None]).sum(axis=2)
    return jnp.maximum(begun - 1, 0)


def gap(table: Table, goal: Float[Array, " samples"], by_mass: bool) -> Gap:
    """Where the threshold is. goal: of the mass, or of the count."""
    enough = table.reached(by_mass).sum(axis=0) >= goal[:, None]
    low = jnp.where(enough, table.pivots, 0).max(axis=1)
    high = jnp.where(table.pivots > low[:, None], table.pivots, HIGHEST).min(axis=1)
    return Gap(low, high)


def block_in(heads: UInt32[Array, "samples blocks"], gap: Gap) -> Int[Array, " samples"]:
    """The one block with all that a rank has inside a gap: the first entry of the next one is a
    pivot."""
    return _last_block(heads, gap.high[:, None])[:, 0]


def settle(
    table: Table,
    goal: Float[Array, " samples"],
    by_mass: bool,
    gap: Gap,
    entries: UInt32[Array, "ranks samples block"],
    weigh: Weigh,
) -> Cut:
    """The threshold, from the block that every rank has in the gap."""
    keys = side_by_side(entries)
    inside = (keys > gap.low[:, None]) & (keys < gap.high[:, None])
    masses = jnp.where(inside, weigh(_logit(keys)), 0.0)
    parts = masses if by_mass else inside.astype(jnp.float32)
    from_each = jnp.where(keys[:, None, :] >= keys[:, :, None], parts[:, None, :], 0.0)
    reached = _at(table, table.reached(by_mass), gap.high).sum(axis=0)[:, None]
    enough = inside & (reached + from_each.sum(axis=2) >= goal[:, None])
    found = jnp.where(enough, keys, 0).max(axis=1)
    kept = jnp.where(keys >= found[:, None], masses, 0.0)
    kept = kept.reshape(kept.shape[0], entries.shape[0], -1).sum(axis=2).T
    at_found = _at(table, table.masses, gap.high) + kept
    at_low = jnp.where(gap.low > 0, _at(table, table.masses, gap.low), table.whole)
    threshold = jnp.maximum(found, gap.low)
    return Cut(threshold, jnp.where(found > gap.low, at_found, at_low))


def side_by_side(x: Array) -> Array:
    """`[ranks, samples, n]` as `[samples, ranks * n]`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def _at(table: Table, reached, pivot: UInt32[Array, " samples"]) -> _PerRank:
    """What is reached at a pivot; nothing at one that is not in the table."""
    # Equal pivots reach the same.
    return jnp.where(table.pivots == pivot[:, None], reached, 0.0).max(axis=2)
