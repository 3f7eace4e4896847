"""What becomes of a unit's result in prefill attention: stored, or, where it is that of a part of
the keys, left in memory until the block's last part is there, and merged.

Partial results go straight between registers and global memory, a few KiB a consumer once in many
tiles: no shared memory is kept for them.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.building_blocks import (
    LN_2,
    ROWS,
    WGMMA,
    Ref,
    Softmax,
    empty_softmax,
    merged,
    normalised,
)
from pallas_kernels.prefill_memory import CONSUMERS, HALF, PrefillRefs, PrefillShape
from pallas_kernels.prefill_plan import (
    BLOCK,
    BLOCK_QUERIES,
    FIRST_QUERY,
    FIRST_SLOT,
    LAST_QUERY,
    PARTS,
    QUERY_ROW,
    SLOT,
)
from pallas_kernels.tickets import TICKET_WORDS, draw_ticket
from pallas_kernels.work_queue import Units


def finish_unit(shape: PrefillShape, refs: PrefillRefs, consumer, item, head, softmax: Softmax):
    """Stores a consumer's half of a unit. Where it is a part, the last to come stores the whole;
    the halves of a block are merged apart, by whatever programs."""
    store = partial(_store, refs, consumer, item, head)
    if not shape.parts:
        store(softmax)
        return
    parts = refs.item(item, PARTS)
    pl.when(parts <= 1)(partial(store, softmax))

    @pl.when(parts > 1)
    def _():
        assert refs.parts is not None and refs.part_lse is not None
        own = _part(shape, refs.item(item, SLOT), head, consumer)
        mean, log2_sum = normalised(softmax)
        refs.parts.at[own][...] = mean
        refs.part_lse.at[own][...] = plgpu.layout_cast(log2_sum, ROWS)
        if refs.tickets is not None:
            first = _part(shape, refs.item(item, FIRST_SLOT), head, consumer)
            box = refs.scratch["ticket"].at[pl.ds(consumer * TICKET_WORDS, TICKET_WORDS)]
            ticket = draw_ticket(refs.tickets.at[pl.ds(first, 1)], parts - 1, box)

            @pl.when(ticket == parts - 1)
            def _():
                store(_merged(shape, refs, consumer, item, head))


def merge_parts(shape: PrefillShape, refs: PrefillRefs, item_of: Ref, program, programs) -> None:
    """Merges every divided block, by one warpgroup of each of so many programs. item_of: of each
    partial result."""
    count = shape.half_parts

    @pl.loop(0, lax.div(count - program + programs - 1, jnp.int32(programs)))
    def _(n):
        half, heads = n * programs + program, jnp.int32(shape.q_heads)
        consumer, unit = lax.rem(half, jnp.int32(CONSUMERS)), lax.div(half, jnp.int32(CONSUMERS))
        head, slot = lax.rem(unit, heads), lax.div(unit, heads)
        item = jnp.maximum(item_of[slot], 0)

        @pl.when((item_of[slot] >= 0) & (refs.item(item, FIRST_SLOT) == slot))
        def _():
            _store(refs, consumer, item, head, _merged(shape, refs, consumer, item, head))

    plgpu.wait_smem_to_gmem(0)


def _part(shape: PrefillShape, slot, head, consumer):
    """Which of the partial results is a slot's, of a head, of half the queries."""
    return (slot * shape.q_heads + head) * CONSUMERS + consumer


def _merged(shape: PrefillShape, refs: PrefillRefs, consumer, item, head) -> Softmax:
    """The result of all parts of an item's block, which are in memory by now."""
    first = refs.item(item, FIRST_SLOT)

    def step(slot, softmax):
        assert refs.parts is not None and refs.part_lse is not None
        part = _part(shape, slot, head, consumer)
        mean = plgpu.load(refs.parts.at[part], layout=WGMMA, optimized=False)
        log2_sum = plgpu.load(refs.part_lse.at[part], layout=ROWS, optimized=False)
        return merged(softmax, mean, log2_sum)

    start = empty_softmax(HALF, shape.head_dim)
    return Softmax(*lax.fori_loop(first, first + refs.item(item, PARTS), step, start))


def _store(refs: PrefillRefs, consumer, item, head, softmax: Softmax) -> None:
    """The rows that are the unit's queries: at once if all are, else one by one, since the others
    are other units'."""
    staged = refs.scratch["out"].at[consumer]
    first = refs.item(item, QUERY_ROW) + consumer * HALF
    low = jnp.maximum(refs.item(item, FIRST_QUERY), first)
    high = jnp.minimum(refs.item(item, LAST_QUERY), first + HALF)
    mean, log2_sum = normalised(softmax)
    lse_at = pl.multiple_of(refs.item(item, BLOCK) * BLOCK_QUERIES + consumer * HALF, HALF)
    refs.lse.at[head, pl.ds(lse_at, HALF)][...] = plgpu.layout_cast(log2_sum * LN_2, ROWS)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the unit before, which lies there
    staged[...] = mean.astype(staged.dtype)
    plgpu.commit_smem()

    @pl.when(high - low == HALF)
    def _():
        plgpu.copy_smem_to_gmem(staged, refs.out.at[pl.ds(first, HALF), head])

    @pl.when(high - low < HALF)
    def _():
        @pl.loop(low, high)
        def _(row):
            target = refs.out.at[pl.ds(row, 1), head]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(row - first, 1)], target)


def clear_gaps(shape: PrefillShape, refs: PrefillRefs, consumer, share: Units) -> None:
    """Zeros for the rows that are no run's, which the consumers of all programs share."""
    heads = shape.q_heads
    if heads > HALF:
        heads = math.gcd(heads, HALF)
    zeros = refs.scratch["out"].at[consumer]
    zeros[...] = plgpu.layout_cast(jnp.zeros(zeros.shape, zeros.dtype), WGMMA)
    plgpu.commit_smem()
    mine, step = share.program * CONSUMERS + consumer, share.programs * CONSUMERS

    def before_run(run, end):
        at = jnp.minimum(run, shape.num_runs - 1) * 2
        is_real = (run < shape.num_runs) & (refs.runs[at + 1] > refs.runs[at])
        start = jnp.where(is_real, refs.runs[at], shape.tokens)

        @pl.loop(0, lax.div(jnp.maximum(start - end - mine + step - 1, 0), jnp.int32(step)))
        def _(n):
            for head in range(0, shape.q_heads, heads):
                target = refs.out.at[end + mine + n * step, pl.ds(head, heads)]
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, heads)], target)

        return jnp.where(is_real, refs.runs[at + 1], shape.tokens)

    lax.fori_loop(0, shape.num_runs + 1, before_run, jnp.int32(0))
