"""The device program of prefill attention on Hopper: a producer warpgroup and two consumers.

A unit of work is 128 queries of one head, half of them for each consumer. The producer copies
tiles of 128 keys and values by TMA into rings in shared memory, from which both consumers read the
same ones. A unit's tiles come piece by piece: the context in the pool, then each run of the
segment's own rows up to the queries. Where the plan divides a block's keys, a unit has the tiles of
its part. Tiles begin at rows that divide by 8, since TMA cannot begin elsewhere in tiled shared
memory; what they bring from before a run or from behind it is masked.

Drivers call `produce` and `consume` in their warpgroups, with the share of the units that is
theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.building_blocks import (
    ROWS,
    WGMMA,
    Softmax,
    empty_softmax,
    pv,
    score_scale,
)
from pallas_kernels.prefill_memory import (
    CONSUMERS,
    HALF,
    QUERY_SLOTS,
    PrefillRefs,
    PrefillShape,
)
from pallas_kernels.prefill_plan import (
    BLOCK_KEYS,
    CONTEXT,
    END_RUN,
    END_TILE,
    FIRST_RUN,
    LAST_QUERY,
    OWN_RUN,
    QUERY_ROW,
    ROW_GRAIN,
    SEGMENT,
    START_RUN,
    START_TILE,
)
from pallas_kernels.prefill_results import clear_gaps, finish_unit
from pallas_kernels.work_queue import Units

_accumulator: Any = plgpu.WGMMAAccumulatorRef  # its type is none that a type checker can make
# A power of two: its product with the scale is exact, so that a row that sees nothing yet has
# scores that equal their maximum, also in a fused multiply-add.
MASKED = -(2.0**100)


def produce(shape: PrefillShape, refs: PrefillRefs, share: Units) -> None:
    """The producer's part: queries, keys and values of all units of the share. Returns when the
    consumers have read everything, so that every barrier is as it was."""
    units, steps = _for_units(shape, refs, share, partial(_load_unit, shape, refs))
    rings = ("k", steps, shape.stages), ("v", steps, shape.stages), ("q", units, QUERY_SLOTS)
    for name, count, slots in rings:
        free = refs.scratch[f"{name}_free"]

        @pl.loop(jnp.maximum(count - slots, 0), count)
        def _(step, free=free, slots=slots):
            plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(slots))])


def consume(shape: PrefillShape, refs: PrefillRefs, consumer: jax.Array, share: Units) -> None:
    """The part of consumer 0 or 1: attention of its half of the queries of each unit. `share` is
    the producer's. Those of all programs write zeros to the rows that are no run's."""
    clear_gaps(shape, refs, consumer, share)
    pl.when(consumer == 1)(partial(_take_turn, refs))  # half a tile behind the other
    _for_units(shape, refs, share, partial(_attend_unit, shape, refs, consumer))
    pl.when(consumer == 0)(partial(_take_turn, refs))
    plgpu.wait_smem_to_gmem(0)


def _for_units(
    shape: PrefillShape, refs: PrefillRefs, share: Units, work: Callable
) -> tuple[jax.Array, jax.Array]:
    """`step = work(n, item, head, step)` for the share's units, n counting them; step counts the
    tiles so far, by which the rings turn. Returns both at the end."""
    units, heads = refs.num_items[0] * shape.q_heads, jnp.int32(shape.q_heads)

    def one(carry):
        n, unit, step = carry
        step = work(n, lax.div(unit, heads), lax.rem(unit, heads), step)
        return n + 1, share.unit(n + 1), step

    zero = jnp.int32(0)
    n, _, step = lax.while_loop(lambda c: c[1] < units, one, (zero, share.unit(zero), zero))
    share.finish(n)
    return n, step


@dataclass(frozen=True)
class _Piece:
    """Keys of a unit that follow each other in memory. A key's number is its row; those of the
    context lie before row 0. first: the first tile's. Those of [low, high) count."""

    first: jax.Array
    low: jax.Array
    high: jax.Array

    @property
    def tiles(self) -> jax.Array:
        return lax.div(self.high - self.first + BLOCK_KEYS - 1, jnp.int32(BLOCK_KEYS))


def _piece(refs: PrefillRefs, item: jax.Array, run: jax.Array) -> _Piece:
    """Of a run of the item's segment; the one before its first stands for the context."""
    is_context = run < refs.item(item, FIRST_RUN)
    context = refs.item(item, CONTEXT)
    at = jnp.maximum(run, 0) * 2
    start, end = refs.runs[at], refs.runs[at + 1]
    end = jnp.where(run == refs.item(item, OWN_RUN), refs.item(item, LAST_QUERY), end)
    return _Piece(
        first=jnp.where(is_context, -context, start - lax.rem(start, jnp.int32(ROW_GRAIN))),
        low=jnp.where(is_context, -context, start),
        high=jnp.where(is_context, 0, end),
    )


def _pieces(refs: PrefillRefs, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    return refs.item(item, START_RUN), refs.item(item, END_RUN) + 1


def _tiles(
    refs: PrefillRefs, item: jax.Array, run: jax.Array, piece: _Piece
) -> tuple[jax.Array, jax.Array]:
    """[first, end) of a piece's tiles that are the unit's."""
    first = jnp.where(run == refs.item(item, START_RUN), refs.item(item, START_TILE), 0)
    is_last = run == refs.item(item, END_RUN)
    return first, jnp.where(is_last, refs.item(item, END_TILE), piece.tiles)


# The producer.


def _load_unit(shape: PrefillShape, refs: PrefillRefs, n, item, head, step):
    slot = lax.rem(n, jnp.int32(QUERY_SLOTS))

    @pl.when(n >= QUERY_SLOTS)
    def _():
        plgpu.barrier_wait(refs.scratch["q_free"].at[slot])

    row = pl.multiple_of(refs.item(item, QUERY_ROW), ROW_GRAIN)
    for half in range(CONSUMERS):
        plgpu.copy_gmem_to_smem(
            refs.qkv.at[pl.ds(row + half * HALF, HALF), head],
            refs.scratch["q"].at[slot, half],
            refs.scratch["q_full"].at[slot],
        )
    kv_head = lax.div(head, jnp.int32(shape.q_heads // shape.kv_heads))

    def one_piece(run, step):
        piece = _piece(refs, item, run)

        def tile(j, step):
            stage = lax.rem(step, jnp.int32(shape.stages))
            for kind, name in enumerate(("k", "v")):

                @pl.when(step >= shape.stages)
                def _(name=name):
                    plgpu.barrier_wait(refs.scratch[f"{name}_free"].at[stage])

                target = refs.scratch[name].at[stage], refs.scratch[f"{name}_full"].at[stage]

                @pl.when(run < refs.item(item, FIRST_RUN))
                def _(kind=kind, target=target):
                    _load_context(shape, refs, item, kv_head, kind, j, *target)

                @pl.when(run >= refs.item(item, FIRST_RUN))
                def _(kind=kind, target=target):
                    own = shape.q_heads + kind * shape.kv_heads + kv_head
                    _load_own(shape, refs, own, piece.first + j * BLOCK_KEYS, *target)

            return step + 1

        return lax.fori_loop(*_tiles(refs, item, run, piece), tile, step)

    return lax.fori_loop(*_pieces(refs, item), one_piece, step)


def _load_own(shape: PrefillShape, refs: PrefillRefs, head, row, tile, barrier) -> None:
    """Rows of the operand. Behind its last TMA reads zeros."""

    @pl.loop(0, BLOCK_KEYS // shape.copy_rows)
    def _(part):
        at = pl.multiple_of(part * shape.copy_rows, shape.copy_rows)
        source = refs.qkv.at[pl.ds(pl.multiple_of(row + at, ROW_GRAIN), shape.copy_rows), head]
        plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(at, shape.copy_rows)], barrier)


def _load_context(
    shape: PrefillShape, refs: PrefillRefs, item, kv_head, kind, j, tile, barrier
) -> None:
    """Tile j of an item's context, from its pages; after the last of them, that one again."""
    parts = BLOCK_KEYS // shape.copy_rows
    parts_of_page = jnp.int32(shape.page_tokens // shape.copy_rows)
    table = refs.item(item, SEGMENT) * shape.max_pages
    last_page = lax.div(refs.item(item, CONTEXT) - 1, jnp.int32(shape.page_tokens))
    first_row = (refs.layer[0] * 2 + kind) * (shape.pages * shape.page_rows)
    first_row += kv_head * shape.page_tokens

    @pl.loop(0, parts)
    def _(part):
        at = j * parts + part
        page = refs.page_table[table + jnp.minimum(lax.div(at, parts_of_page), last_page)]
        row = first_row + page * shape.page_rows + lax.rem(at, parts_of_page) * shape.copy_rows
        source = refs.pool.at[pl.ds(pl.multiple_of(row, ROW_GRAIN), shape.copy_rows)]
        target = tile.at[pl.ds(pl.multiple_of(part * shape.copy_rows, ROW_GRAIN), shape.copy_rows)]
        plgpu.copy_gmem_to_smem(source, target, barrier)


# The consumers.


def _attend_unit(shape: PrefillShape, refs: PrefillRefs, consumer, n, item, head, step):
    slot = lax.rem(n, jnp.int32(QUERY_SLOTS))
    first_query = refs.item(item, QUERY_ROW) + consumer * HALF
    q = refs.scratch["q"].at[slot, consumer]
    plgpu.barrier_wait(refs.scratch["q_full"].at[slot])

    def one_piece(run, carry):
        piece = _piece(refs, item, run)

        def tile(j, carry):
            step, softmax = carry
            key = piece.first + j * BLOCK_KEYS
            mask = partial(_mask, piece, first_query, key)
            return step + 1, _attend_tile(shape, refs, consumer, q, mask, step, softmax)

        return lax.fori_loop(*_tiles(refs, item, run, piece), tile, carry)

    start = step, empty_softmax(HALF, shape.head_dim)
    step, softmax = lax.fori_loop(*_pieces(refs, item), one_piece, start)
    plgpu.barrier_arrive(refs.scratch["q_free"].at[slot])
    finish_unit(shape, refs, consumer, item, head, softmax)
    return step


def _mask(piece: _Piece, first_query, key, scores):
    """Scores of the keys `key`, `key + 1`, ...: those of keys that do not count, or that come after
    the query, are set so low that they vanish. Most tiles have none."""
    end = key + BLOCK_KEYS

    def masked(scores):
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape[:1], 0, layout=ROWS)
        end = _across(jnp.minimum(row + (first_query + 1), piece.high) - key, scores)
        return jnp.where((column >= piece.low - key) & (column < end), scores, MASKED)

    is_whole = (key >= piece.low) & (end <= piece.high) & (end <= first_query + 1)
    return lax.cond(is_whole, lambda scores: scores, masked, scores)


def _attend_tile(
    shape: PrefillShape, refs: PrefillRefs, consumer, q, mask, step, softmax: Softmax
) -> Softmax:
    """One tile more."""
    scratch, stage = refs.scratch, lax.rem(step, jnp.int32(shape.stages))
    plgpu.barrier_wait(scratch["k_full"].at[stage])

    def multiply(products):
        plgpu.wgmma(products, q, scratch["k"].at[stage].transpose((1, 0)))
        _take_turn(refs)
        return products[...]

    scores = pl.run_scoped(multiply, _accumulator((HALF, BLOCK_KEYS), jnp.float32))
    plgpu.barrier_arrive(scratch["k_free"].at[stage])
    scores = mask(scores)
    # Scaled only now, in the multiply-add that also takes the maximum away.
    scale = score_scale(shape.head_dim)
    maximum = jnp.maximum(softmax.maximum, scores.max(axis=1) * scale)
    keep = jnp.exp2(softmax.maximum - maximum)
    weights = jnp.exp2(scores * scale - _across(maximum, scores))
    total = softmax.total * keep + weights.sum(axis=1)
    values = softmax.values * _across(keep, softmax.values)
    weights = weights.astype(jnp.bfloat16)
    # All of it before the other's turn ends.
    maximum, total, values, weights = lax.optimization_barrier((maximum, total, values, weights))
    plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["v_full"].at[stage])
    plgpu.barrier_wait(scratch["turn"])
    staged = scratch["weights"].at[consumer] if shape.interpretable else None
    values = pv(values, weights, scratch["v"].at[stage], staged)
    plgpu.barrier_arrive(scratch["v_free"].at[stage])
    return Softmax(maximum, total, values)


def _take_turn(refs: PrefillRefs) -> None:
    """Meets the other consumer. They meet twice a tile, one of them half a tile behind, so that one
    has the tensor cores for its products while the other works on its softmax."""
    plgpu.barrier_arrive(refs.scratch["turn"])
    plgpu.barrier_wait(refs.scratch["turn"])


def _across(column, tile):
    return lax.broadcast_in_dim(column, tile.shape, [0])
