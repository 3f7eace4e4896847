"""Decode attention inside its kernels: what a program of the grid does with its stretch of items.

The mixed kernel has them too, so they know neither the grid nor who calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.building_blocks import (
    COLUMNS,
    ROW_GROUP,
    ROWS,
    SMS,
    TILE_ROWS,
    WGMMA,
    Ref,
    Softmax,
    empty_softmax,
    fill,
    mask_keys,
    merged,
    normalised,
    page_loads,
    pages_of_block,
    qk,
    score_scale,
    softmax_step,
    swizzled,
)
from pallas_kernels.tickets import draw_ticket, ticket_box

BLOCK_KEYS = 64
STAGES = 4
PLAN_FIELDS = 5  # row, head and block that a program begins with; its pieces; items of a stretch


class HeadRows(NamedTuple):
    """Where what belongs to a row and KV head stands in a flat array `[n, head_dim]`: at
    `first + row * per_row + (head // inner) * outer + head % inner * per_head`, and for the other
    parts of the head's queries `per_part` on each."""

    first: int
    per_row: int
    per_head: int
    inner: int = 1
    outer: int = 0
    per_part: int = 0

    def at(self, row, head, part: int = 0):
        inner = jnp.int32(self.inner)
        return (
            self.first
            + row * self.per_row
            + lax.div(head, inner) * self.outer
            + lax.rem(head, inner) * self.per_head
            + part * self.per_part
        )


@dataclass(frozen=True)
class DecodeShape:
    """What a decode kernel is compiled for.

    parts, part_rows: the queries of a KV head are `parts` runs of `part_rows` consecutive rows.
    programs: how many there are, at most one an SM. merges: whether the kernel merges what it has
    divided, or another one has to. interpretable: see `building_blocks`.
    """

    num_rows: int
    kv_heads: int
    parts: int
    part_rows: int
    head_dim: int
    page_tokens: int
    q: HeadRows
    k: HeadRows
    v: HeadRows
    programs: int = SMS
    merges: bool = False
    interpretable: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head: the rows of the tile in use."""
        return self.parts * self.part_rows

    @property
    def part_tile(self) -> int:
        """Rows of a partial result: the group in whole swizzled tiles."""
        return -(-self.group // ROW_GROUP) * ROW_GROUP

    def check(self) -> None:
        if self.group > TILE_ROWS:
            raise ValueError(f"q_per_kv: at most {TILE_ROWS} query heads, got {self.group}")
        if self.programs < 1:
            raise ValueError(f"programs: must be at least 1, got {self.programs}")


class Scratch(NamedTuple):
    """Shared memory of a decode program.

    rows: queries as they come, results as they go, unswizzled: those copies may begin at any row of
    memory. q: the queries of a piece. partial: a partial result on its way. weights: for the
    interpreter."""

    rows: Ref
    q: Ref
    k: Ref
    v: Ref
    partial: Ref
    weights: Ref | None
    q_full: Ref
    full: Ref
    empty: Ref
    partial_full: Ref
    ticket: Ref


def decode_scratch(shape: DecodeShape) -> Scratch:
    """193 KiB of shared memory at head_dim 128, 128 of them the ring."""
    ring = swizzled((STAGES, BLOCK_KEYS, shape.head_dim))
    copies = 2 * pages_of_block(BLOCK_KEYS, shape.page_tokens)
    return Scratch(
        rows=plgpu.SMEM((TILE_ROWS, shape.head_dim), jnp.bfloat16),
        q=swizzled((TILE_ROWS, shape.head_dim)),
        k=ring,
        v=ring,
        partial=swizzled((TILE_ROWS, shape.head_dim), jnp.float32),
        weights=swizzled((TILE_ROWS, BLOCK_KEYS)) if shape.interpretable else None,
        q_full=plgpu.Barrier(num_arrivals=shape.parts),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        empty=plgpu.Barrier(num_barriers=STAGES),
        partial_full=plgpu.Barrier(),
        ticket=ticket_box(),
    )


def decode_kernel(shape: DecodeShape, pool_shape: tuple[int, ...], *refs: Ref) -> None:
    """A program of two warpgroups. With a ticket counter among the operands it also merges."""
    (plan, lens, table, layer, q, new_k, new_v, pool), refs = refs[:8], refs[8:]
    tickets, refs = (refs[0], refs[1:]) if shape.merges else (None, refs)
    results, smem = Results(*refs[:4]), Scratch(*refs[4:])
    program = lax.axis_index("program")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _():
        consume(shape, program, plan, lens, (q, new_k, new_v), results, smem, tickets)

    @pl.when(warpgroup == 1)
    def _():
        produce(shape, pool_shape, program, plan, lens, table, layer, pool, smem)


def merge_kernel(shape: DecodeShape, *refs: Ref) -> None:
    """A program of one warpgroup: merges what begins in its stretch and ends in another's."""
    (plan, lens, parts, part_lse, out, lse), smem = refs[:6], Scratch(*refs[6:])
    results = Results(out, lse, parts, part_lse)
    program = lax.axis_index("program")

    def visit(piece: Piece, _) -> None:
        @pl.when(jnp.logical_and(piece.first == program, piece.last > program))
        def _():
            _merge(shape, piece, results, smem)

    for_each_piece(shape, program, plan, lens, visit)


class Results(NamedTuple):
    """What a decode kernel writes: rows of the result and base-2 log-sum-exps of each (row, head),
    and both of partial results, two a program: one begun by others before it, one by itself."""

    out: Ref
    lse: Ref
    parts: Ref
    part_lse: Ref


class Piece(NamedTuple):
    """A run of blocks of one row and KV head. first, last: the programs that have a part of it."""

    row: Int[Array, ""]
    head: Int[Array, ""]
    block: Int[Array, ""]
    blocks: Int[Array, ""]
    num_keys: Int[Array, ""]
    first: Int[Array, ""]
    last: Int[Array, ""]

    @property
    def loads(self) -> Int[Array, ""]:
        """Blocks with keys: a row without context has one item all the same."""
        return jnp.where(self.num_keys > 0, self.blocks, 0)


def for_each_piece(shape: DecodeShape, program, plan: Ref, lens: Ref, visit) -> Int[Array, ""]:
    """`visit(piece, loads before it)` for all of a program's pieces; returns its loads."""
    row, head, block, pieces, share = (plan[program, i] for i in range(PLAN_FIELDS))

    def step(_, carry):
        row, head, block, done, loads = carry
        num_keys = lens[row]
        blocks = jnp.maximum(lax.div(num_keys + (BLOCK_KEYS - 1), jnp.int32(BLOCK_KEYS)), 1)
        count = jnp.minimum(share - done, blocks - block)
        item = program * share + done - block
        last = lax.div(item + blocks - 1, share)
        piece = Piece(row, head, block, count, num_keys, lax.div(item, share), last)
        visit(piece, loads)
        wraps = head + 1 == shape.kv_heads
        row, head = jnp.where(wraps, row + 1, row), jnp.where(wraps, 0, head + 1)
        return row, head, jnp.int32(0), done + count, loads + piece.loads

    zero = jnp.int32(0)
    *_, loads = lax.fori_loop(0, pieces, step, (row, head, block, zero, zero))
    return loads


def produce(
    shape: DecodeShape,
    pool_shape: tuple[int, ...],
    program,
    plan: Ref,
    lens: Ref,
    table: Ref,
    layer: Ref,
    pool: Ref,
    smem: Scratch,
) -> None:
    """The copying warpgroup: every block of the program's stretch, as the ring has room."""
    pages, page_rows = pool_shape[2:4]
    keys_row = layer[0] * (2 * pages * page_rows)
    stages = jnp.int32(STAGES)

    def visit(piece: Piece, loads) -> None:
        @pl.loop(jnp.int32(0), piece.loads)
        def _(i):
            load = loads + i
            slot = lax.rem(load, stages)

            @pl.when(load >= STAGES)
            def _():
                plgpu.barrier_wait(smem.empty.at[slot])

            page_loads(
                pool,
                smem.k.at[slot],
                smem.v.at[slot],
                smem.full.at[slot],
                lambda place: table[piece.row, place],
                piece.block + i,
                piece.num_keys,
                first_row=keys_row + piece.head * shape.page_tokens,
                values_offset=pages * page_rows,
                page_rows=page_rows,
                page_tokens=shape.page_tokens,
            )

    loads = for_each_piece(shape, program, plan, lens, visit)

    # Every arrival is waited for, so that the barriers are as at the start.
    @pl.loop(jnp.maximum(loads - STAGES, 0), loads)
    def _(load):
        plgpu.barrier_wait(smem.empty.at[lax.rem(load, stages)])


def consume(
    shape: DecodeShape,
    program,
    plan: Ref,
    lens: Ref,
    rows: tuple[Ref, Ref, Ref],
    results: Results,
    smem: Scratch,
    tickets: Ref | None,
) -> None:
    """The multiplying warpgroup: the pieces of the program's stretch. Of what is divided among
    programs, the one that is done last merges the parts, if there are tickets to tell."""
    scale = score_scale(shape.head_dim)

    def visit(piece: Piece, loads) -> None:
        softmax = _begin(shape, piece, rows, smem)

        def step(i, softmax):
            slot = lax.rem(loads + i, jnp.int32(STAGES))
            plgpu.barrier_wait(smem.full.at[slot])
            scores = qk(smem.q, smem.k.at[slot]) * scale
            scores = mask_keys(scores, (piece.block + i) * BLOCK_KEYS, piece.num_keys)
            softmax = softmax_step(softmax, scores, smem.v.at[slot], smem.weights)
            plgpu.barrier_arrive(smem.empty.at[slot])
            return softmax

        softmax = Softmax(*lax.fori_loop(0, piece.loads, step, softmax))
        mean, log2_sum = normalised(softmax)
        whole = piece.first == piece.last

        @pl.when(whole)
        def _():
            _write(shape, piece, mean, log2_sum, results, smem)

        @pl.when(jnp.logical_not(whole))
        def _():
            _write_part(shape, program, piece, mean, log2_sum, results, smem)
            if tickets is not None:
                others = piece.last - piece.first
                counter = tickets.at[pl.ds(piece.first, 1)]

                @pl.when(draw_ticket(counter, others, smem.ticket) == others)
                def _():
                    _merge(shape, piece, results, smem)

    for_each_piece(shape, program, plan, lens, visit)


def _begin(shape: DecodeShape, piece: Piece, rows: tuple[Ref, Ref, Ref], smem: Scratch) -> Softmax:
    """Fetches the queries. The piece with a row's first keys starts from the row's own key and
    value; the others from nothing, but from the same maximum."""
    q, new_k, new_v = rows
    for part in range(shape.parts):
        source = pl.ds(shape.q.at(piece.row, piece.head, part), shape.part_rows)
        target = pl.ds(part * shape.part_rows, shape.part_rows)
        plgpu.copy_gmem_to_smem(q.at[source], smem.rows.at[target], smem.q_full)
    plgpu.barrier_wait(smem.q_full)
    tile = TILE_ROWS, shape.head_dim
    queries = plgpu.load(smem.rows, layout=WGMMA, optimized=False)
    smem.q[...] = queries
    plgpu.commit_smem()
    queries = queries.astype(jnp.float32)
    own_k, own_v = (
        plgpu.load(
            ref.at[layout.at(piece.row, piece.head)], layout=COLUMNS, optimized=False
        ).astype(jnp.float32)
        for ref, layout in ((new_k, shape.k), (new_v, shape.v))
    )
    scores = (queries * lax.broadcast_in_dim(own_k, tile, [1])).sum(axis=1)
    counts = jnp.where(piece.block == 0, jnp.float32(1), jnp.float32(0))
    values = lax.broadcast_in_dim(own_v, tile, [1]) * fill(tile, counts)
    return Softmax(scores * score_scale(shape.head_dim), fill((TILE_ROWS,), counts, ROWS), values)


def _write(shape: DecodeShape, piece: Piece, mean, log2_sum, results: Results, smem: Scratch):
    """The result of a whole (row, head)."""
    segment = piece.row * shape.kv_heads + piece.head
    smem.rows[...] = mean.astype(jnp.bfloat16)
    plgpu.commit_smem()
    target = results.out.at[pl.ds(segment * shape.group, shape.group)]
    plgpu.copy_smem_to_gmem(smem.rows.at[pl.ds(0, shape.group)], target)
    results.lse[segment, :] = log2_sum
    plgpu.wait_smem_to_gmem(0)


def _part_of(shape: DecodeShape, program, piece: Piece):
    """Which of the partial results a program's part of a piece is, and its rows."""
    part = 2 * program + jnp.where(program == piece.first, 1, 0)
    return part, pl.ds(part * shape.part_tile, shape.part_tile)


def _write_part(
    shape: DecodeShape, program, piece: Piece, mean, log2_sum, results: Results, smem: Scratch
):
    part, rows = _part_of(shape, program, piece)
    smem.partial[...] = mean
    plgpu.commit_smem()
    source = smem.partial.at[pl.ds(0, shape.part_tile)]
    plgpu.copy_smem_to_gmem(source, results.parts.at[rows])
    results.part_lse[part, :] = log2_sum
    plgpu.wait_smem_to_gmem(0)


def _merge(shape: DecodeShape, piece: Piece, results: Results, smem: Scratch) -> None:
    """Makes the result of all parts of a (row, head), which are in memory by now."""
    target = smem.partial.at[pl.ds(0, shape.part_tile)]

    def step(program, softmax):
        part, rows = _part_of(shape, program, piece)
        plgpu.commit_smem()  # all threads have read what the copy overwrites
        plgpu.copy_gmem_to_smem(results.parts.at[rows], target, smem.partial_full)
        plgpu.barrier_wait(smem.partial_full)
        mean = plgpu.load(smem.partial, layout=WGMMA)
        log2_sum = plgpu.load(results.part_lse.at[part], layout=ROWS, optimized=False)
        return merged(softmax, mean, log2_sum)

    start = empty_softmax(TILE_ROWS, shape.head_dim)
    softmax = Softmax(*lax.fori_loop(piece.first, piece.last + 1, step, start))
    _write(shape, piece, *normalised(softmax), results, smem)
