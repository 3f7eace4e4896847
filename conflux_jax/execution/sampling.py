"""Choosing tokens on the device: greedy, temperature, top-k, top-p, min-p, log-probabilities.

The vocabulary may be split over the ranks of a tensor-parallel group. Logits never leave their
rank: ranks tell each other a few numbers a row (`VocabShard.gather`), and all of them choose the
same token. They do so five times a step, whatever is asked for, and outside all branches: what is
in a branch is one rank's own work, so that a GPU takes or skips it without asking the host.

On one rank there is nothing to tell. There the cut-offs are found by bisection over the bits of
the logits: no sort over the vocabulary, whose cost would be paid by every row of the batch. Over
ranks each round of it would be an exchange; see `cut_search`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from conflux_jax.execution import cut_search
from conflux_jax.execution.draw import locate, passed, total, uniform, weigh
from conflux_jax.plan import NO_TOKEN
from conflux_jax.request import MAX_LOGPROBS


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
    """Chosen ids, NO_TOKEN where logits are not finite; their log-probability under the model
    (temperature 1, no cut-off, no penalty or bias) and the likeliest alternatives, zeros unless
    asked for."""

    token_ids: Int[Array, " samples"]
    logprobs: Float[Array, " samples"]
    top_ids: Int[Array, "samples top"]
    top_logprobs: Float[Array, "samples top"]


class Peak(NamedTuple):
    """The largest logit, and the first id that has it."""

    value: Float[Array, "*ranks samples"]
    token_ids: Int[Array, "*ranks samples"]


class Likeliest(NamedTuple):
    """What log-probabilities follow from: of a rank's entries, the largest logit, the sum of
    exp(logit - best), and the largest logits with their ids."""

    best: Float[Array, "*ranks samples"]
    total: Float[Array, "*ranks samples"]
    logits: Float[Array, "*ranks samples top"]
    ids: Int[Array, "*ranks samples top"]


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary whose logits this rank has.

    size: entries of each rank; rank r has those from r * size on. axis: the ranks' mesh axis.
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

    def limited(
        self, logits: Float[Array, "samples shard"], limit: int
    ) -> Float[Array, "samples shard"]:
        """Minus infinity for ids from `limit` on, which have no token."""
        if limit >= self.total:
            return logits
        return jnp.where(self.ids < limit, logits, -jnp.inf)

    def gather(self, tree: Any) -> Any:
        """What each rank has, by one exchange: 32-bit arrays `[samples, ...]` become
        `[ranks, samples, ...]`, the same on every rank. For a few columns, never for logits; and
        outside all branches."""
        if self.ranks == 1:
            return jax.tree.map(lambda x: x[None], tree)
        arrays, structure = jax.tree.flatten(tree)
        rows = [_as_int32(x).reshape(x.shape[0], -1) for x in arrays]
        ends = list(accumulate(row.shape[1] for row in rows))
        got = lax.all_gather(jnp.concatenate(rows, axis=1), self.axis)
        parts = zip(arrays, jnp.split(got, ends[:-1], axis=2), strict=True)
        return structure.unflatten(
            lax.bitcast_convert_type(part.reshape(self.ranks, *x.shape), x.dtype)
            for x, part in parts
        )


def _as_int32(x: Shaped[Array, "*shape"]) -> Int[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


Undo = Callable[[Float[Array, " samples"], Int[Array, " samples"]], Float[Array, " samples"]]


@runtime_checkable
class Adjustment(Protocol):
    """What requests change in this rank's logits. Exchanges nothing."""

    def apply(self, logits: Float[Array, "samples shard"]) -> Float[Array, "samples shard"]:
        """The logits that tokens are chosen by."""
        ...

    def undo(
        self, values: Float[Array, " samples"], places: Int[Array, " samples"]
    ) -> Float[Array, " samples"]:
        """What chosen ones were before, from their places in the rank's part."""
        ...


def sample(
    logits: Float[Array, "samples shard"],
    inputs: SamplingInputs,
    vocab: VocabShard,
    adjustment: Adjustment | None = None,
) -> Sampled:
    """One token a row. The costly parts run only when some row needs them.

    Log-probabilities are those of `logits`; tokens are chosen by what the adjustment makes of them,
    which may take their place in memory: they are not read any more then."""
    best_ones = _when(inputs.wants_logprobs, lambda: likeliest(vocab, logits))
    if adjustment is not None:
        # All that reads the logits is done before they are written over.
        logits, best_ones = lax.optimization_barrier((logits, best_ones))
        logits = adjustment.apply(logits)
    undo = adjustment.undo if adjustment is not None else lambda values, _: values
    choose = _sample_whole if vocab.ranks == 1 else _sample_split
    return choose(logits, best_ones, undo, inputs, vocab)


def _sample_whole(
    logits, best_ones: Likeliest, undo: Undo, inputs: SamplingInputs, vocab: VocabShard
) -> Sampled:
    """With all logits here."""
    best = _peak(vocab, logits)
    random, cut = _flags(inputs)
    draw = partial(_draw, logits, best.value, inputs, cut)
    token_ids = lax.cond(random, draw, lambda: best.token_ids)
    token_ids = jnp.where(inputs.temperature > 0, token_ids, best.token_ids)

    def report():
        own = undo(_entry(logits, token_ids), token_ids)
        normaliser, *listed = alternatives(vocab, vocab.gather(best_ones))
        return jnp.minimum(own - normaliser, 0.0), *listed

    reported = _when(inputs.wants_logprobs, report)
    return Sampled(_unless_broken(token_ids, best.value), *reported)


def _unless_broken(
    token_ids: Int[Array, " samples"], best: Float[Array, " samples"]
) -> Int[Array, " samples"]:
    """NO_TOKEN where the largest logit, as `_largest` has it, is not finite."""
    return jnp.where(jnp.isfinite(best), token_ids, NO_TOKEN)


def _entry(
    logits: Float[Array, "samples n"], index: Int[Array, " samples"]
) -> Float[Array, " samples"]:
    """One of each row; the nearest where there is none at the index."""
    return jnp.take_along_axis(logits, index[:, None], axis=1, mode="clip")[:, 0]


def _largest(x: Float[Array, "*shape"], axis: int) -> Float[Array, "*rest"]:
    """The maximum along an axis, NaN where anything is: on a CPU `max` may pass over NaN."""
    return jnp.where(jnp.isnan(x.sum(axis=axis)), jnp.nan, x.max(axis=axis))


def _when(flag: Bool[Array, ""], function: Callable[..., Any], *args: Any) -> Any:
    """What the function says if the flag is set, else zeros."""
    shapes = jax.eval_shape(function, *args)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(flag, function, lambda *_: zeros, *args)


def _flags(inputs: SamplingInputs) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Whether any row is drawn, and whether any of those is cut."""
    drawn = inputs.temperature > 0
    return jnp.any(drawn), jnp.any(drawn & ((inputs.top_k > 0) | (inputs.top_p < 1.0)))


def _peak(vocab: VocabShard, logits: Float[Array, "samples shard"]) -> Peak:
    """This rank's. Plain reductions, which vectorise where argmax does not."""
    best = _largest(logits, axis=1)
    ids = jnp.where(logits == best[:, None], vocab.ids, vocab.total - 1)
    return Peak(best, ids.min(axis=1))


def _draw(logits, best, inputs: SamplingInputs, cut: Bool[Array, ""]) -> Int[Array, " samples"]:
    """A draw from the tempered distribution, cut by min-p, then top-k, then top-p as in vLLM."""
    weights = weigh(logits, best, inputs.temperature, inputs.min_p)
    limits = inputs.top_k, inputs.top_p
    weights = lax.cond(cut, _cut, lambda _, weights, *__: weights, logits, weights, *limits)
    return locate(weights, uniform(inputs.seed, inputs.position) * total(weights))


def _cut(logits, weights, top_k, top_p) -> Float[Array, "samples shard"]:
    """The weights of the `top_k` largest (and their ties), then of the smallest set of largest ones
    whose probability reaches `top_p`; 0 for all others."""
    keys = cut_search.key(logits)
    wanted = jnp.where(top_k > 0, top_k, keys.shape[1])
    weights = jnp.where(keys >= _threshold(keys, jnp.ones_like(weights), wanted), weights, 0.0)
    # Rounding must not push the goal past what the whole set sums to.
    goal = jnp.where(top_p < 1.0, top_p, 2.0) * weights.sum(axis=1)
    return jnp.where(keys >= _threshold(keys, weights, goal), weights, 0.0)


def _threshold(keys, weight, goal) -> UInt32[Array, "samples 1"]:
    """The largest key t for which the weight of keys >= t reaches the goal; 0 if none does."""

    def body(i, low):
        probe = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        found = jnp.where(keys >= probe[:, None], weight, 0.0).sum(axis=1)
        return jnp.where(found >= goal, probe, low)

    low = lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))
    return low[:, None]


def _sample_split(
    logits, best_ones: Likeliest, undo: Undo, inputs: SamplingInputs, vocab: VocabShard
) -> Sampled:
    """With a part of the logits here. Branches and exchanges take turns: an exchange has what the
    branches before it made, which is zeros where they were not taken."""
    random, cut = _flags(inputs)
    blocks = _when(cut, cut_search.sorted_blocks, logits)
    peak = _peak(vocab, logits)
    own_peak = _when(inputs.wants_logprobs, lambda: undo(peak.value, peak.token_ids - vocab.offset))
    peaks, own_peaks, heads = vocab.gather((peak, own_peak, blocks[:, :, 0]))
    best = _largest(peaks.value, axis=0)
    first = jnp.where(peaks.value == best, peaks.token_ids, vocab.total - 1).min(axis=0)

    def weights(x):
        return weigh(x, best, inputs.temperature, inputs.min_p)

    pivots = cut_search.side_by_side(heads)
    reached = _when(cut, lambda: cut_search.look_up(blocks, pivots, weights))
    whole = _when(random, lambda: total(weights(logits)))
    (counts, masses), whole, best_ones = vocab.gather((reached, whole, best_ones))
    report = partial(alternatives, vocab, best_ones)
    normaliser, top_ids, top_logprobs = _when(inputs.wants_logprobs, report)
    table = cut_search.Table(pivots, counts, masses, whole)

    found = _find_cut(vocab, cut, table, blocks, weights, inputs)

    def draw():
        keys = cut_search.key(logits)
        kept = jnp.where(keys >= found.threshold[:, None], weights(logits), 0.0)
        target = uniform(inputs.seed, inputs.position) * found.masses.sum(axis=0)
        rank, target = passed(found.masses.T, target)
        # Ranks that are not it search in vain; their result is not looked at.
        index = locate(kept, target)
        return rank, vocab.offset + index, undo(_entry(logits, index), index)

    rank, *drawn = _when(random, draw)
    drawn = vocab.gather(drawn)
    drawn_ids, drawn_logits = (
        jnp.take_along_axis(x, rank[None], axis=0, mode="clip")[0] for x in drawn
    )
    token_ids = jnp.where(inputs.temperature > 0, drawn_ids, first)
    own_first = jnp.where(peaks.token_ids == first, own_peaks, -jnp.inf).max(axis=0)
    own = jnp.where(inputs.temperature > 0, drawn_logits, own_first)
    logprobs = jnp.where(inputs.wants_logprobs, jnp.minimum(own - normaliser, 0.0), 0.0)
    return Sampled(_unless_broken(token_ids, best), logprobs, top_ids, top_logprobs)


def _find_cut(
    vocab: VocabShard,
    cut: Bool[Array, ""],
    table: cut_search.Table,
    blocks: UInt32[Array, "samples blocks block"],
    weights: Callable[[Array], Array],
    inputs: SamplingInputs,
) -> cut_search.Cut:
    """By top-k, then by top-p of what that leaves; nothing is cut off where the flag is not set."""

    def search(goal, by_mass: bool):
        gap = cut_search.gap(table, goal, by_mass)
        return goal, gap, cut_search.block_in(blocks[:, :, 0], gap)

    def exchange(block):
        own = jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0]
        return vocab.gather(own)

    wanted = jnp.where(inputs.top_k > 0, inputs.top_k, jnp.inf)
    goal, gap, block = _when(cut, lambda: search(wanted, by_mass=False))
    entries = exchange(block)

    def search_again():
        largest = cut_search.settle(table, goal, False, gap, entries, weights)
        share = jnp.where(inputs.top_p < 1.0, inputs.top_p * largest.masses.sum(axis=0), jnp.inf)
        return largest, search(share, by_mass=True)

    largest, (share, last_gap, block) = _when(cut, search_again)
    last_entries = exchange(block)

    def deepest():
        likely = cut_search.settle(table, share, True, last_gap, last_entries, weights)
        # Rounding must not bring back what top-k has cut off.
        higher = likely.threshold > largest.threshold
        return jax.tree.map(lambda x, y: jnp.where(higher, x, y), likely, largest)

    everything = cut_search.Cut(jnp.zeros_like(gap.low), table.whole)
    return lax.cond(cut, deepest, lambda: everything)


def likeliest(vocab: VocabShard, logits: Float[Array, "samples shard"]) -> Likeliest:
    """This rank's."""
    best = logits.max(axis=1)
    # A rank may have nothing but minus infinity.
    mass = jnp.exp(logits - jnp.where(best > -jnp.inf, best, 0.0)[:, None]).sum(axis=1)
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, vocab.size))
    return Likeliest(best, mass, top, vocab.offset + ids.astype(jnp.int32))


def alternatives(
    vocab: VocabShard, found: Likeliest
) -> tuple[Float[Array, " samples"], Int[Array, "samples top"], Float[Array, "samples top"]]:
    """What a logit is above its log-probability, and the likeliest of all ranks' lists."""
    best = found.best.max(axis=0)
    normaliser = best + jnp.log((found.total * jnp.exp(found.best - best)).sum(axis=0))
    # Of equals the lower id comes first: so does each rank's own list, and so do the ranks.
    candidates, ids = (cut_search.side_by_side(x) for x in (found.logits, found.ids))
    top, at = lax.top_k(candidates, min(MAX_LOGPROBS, vocab.total))
    ids = jnp.take_along_axis(ids, at, axis=1)
    return normaliser, ids, top - normaliser[:, None]
