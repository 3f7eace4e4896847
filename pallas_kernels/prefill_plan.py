"""What the prefill kernel works on: planned once an iteration, the same for all layers.

Arithmetic on a few hundred integers, for the host or for a program's part before the layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.blockwise import Segments

AnyArray: TypeAlias = Array | np.ndarray  # noqa: UP040 - jaxtyping takes no `type` statement

BLOCK_QUERIES = 128  # of a unit of work
BLOCK_KEYS = 128  # of a tile
ROW_GRAIN = 8  # blocks of queries and tiles of keys begin at multiples of it
# Of a part of a block's keys. They take 18 us; what a part costs beside them (its result written
# and read again, 64 KiB each way; the wait for its first tile) is some 4 us by arithmetic.
LEAST_TILES = 16

# Fields of an item.
QUERY_ROW, FIRST_QUERY, LAST_QUERY, CONTEXT, SEGMENT, FIRST_RUN, OWN_RUN, TILES = range(8)
START_RUN, START_TILE, END_RUN, END_TILE, BLOCK, PARTS, FIRST_SLOT, SLOT = range(8, 16)
ITEM_FIELDS = 16


class PrefillPlan(NamedTuple):
    """What the kernel reads. A run is a part of a segment whose tokens lie on consecutive rows.

    items: blocks of queries, or parts of their keys, the one with the most tiles of keys first;
    each is worked on once a query head. Its fields: first row of the block, which divides by 8; the
    rows [first query, last query) that are the run's; tokens of context; segment; first and own
    run; tiles of keys; the run that the first of these is in, the one before the first run standing
    for the context, and its place there; the same of the last, and the place behind it; the block's
    number; the parts that its keys are divided into; the first of their partial results, and the
    item's own.
    num_items: how many are real.
    runs: [first row, end row) of each run, in the order of their tokens; empty past the last.
    page_table: of each segment's context, in prefill layout.
    parts: of each partial result (of a head) the item, -1 past the last. None: no block is divided.
    """

    items: Int[AnyArray, "items fields"]
    num_items: Int[AnyArray, ""]
    runs: Int[AnyArray, "runs 2"]
    page_table: Int[AnyArray, "segments max_pages"]
    parts: Int[AnyArray, " parts"] | None = None


def max_items(num_rows: int, num_runs: int) -> int:
    """The most blocks that so many runs on so many rows make: each may begin 7 rows early and end
    with part of a block."""
    return (num_rows + (ROW_GRAIN - 1) * num_runs) // BLOCK_QUERIES + num_runs


def plan_prefill(
    segments: Segments, rows: Int[AnyArray, " tokens"], groups: int = 1
) -> PrefillPlan:
    """Plans the chunks of one iteration.

    rows: where each token of the segments' axis lies in the kernel's operand, `arange(tokens)` if
    at its own index. Over the segments' tokens they rise by one, but for at most `groups - 1` jumps
    inside segments: each of `groups` senders has a share of consecutive tokens.

    All arrays NumPy's, on the host, or all JAX's, in a program; so are the plan's.
    """
    xp = rows.__array_namespace__()
    num_segments = segments.starts.shape[0]
    starts, ends, segment = _runs(xp, segments, rows, num_segments + groups - 1)
    is_real = ends > starts
    first_run = xp.searchsorted(segment, segment, side="left")
    aligned = starts // ROW_GRAIN * ROW_GRAIN
    tiles = xp.where(is_real, _ceil_div(ends - aligned, BLOCK_KEYS), 0)
    before = xp.cumsum(tiles) - tiles
    blocks = xp.where(is_real, _ceil_div(ends - aligned, BLOCK_QUERIES), 0)
    blocks_end = xp.cumsum(blocks)

    item = xp.arange(max_items(rows.shape[0], starts.shape[0]))
    run = xp.searchsorted(blocks_end, item, side="right").clip(max=starts.shape[0] - 1)
    row = aligned[run] + (item - blocks_end[run] + blocks[run]) * BLOCK_QUERIES
    last = xp.minimum(row + BLOCK_QUERIES, ends[run])
    context = segments.context_lens[segment.clip(max=num_segments - 1)[run]]
    own_tiles = _ceil_div(last - aligned[run], BLOCK_KEYS)
    item_tiles = _ceil_div(context, BLOCK_KEYS) + before[run] - before[first_run[run]] + own_tiles
    first = xp.maximum(row, starts[run])
    fields = [row, first, last, context, segment[run], first_run[run], run, item_tiles]
    zero = xp.zeros_like(item)
    fields += [first_run[run] - 1, zero, run, own_tiles, item, zero + 1, zero, zero]
    num_items = blocks_end[-1].astype("int32")
    return PrefillPlan(
        _longest_first(xp, xp.stack(fields, axis=1), item < num_items),
        num_items,
        xp.stack([starts, ends], axis=1).astype("int32"),
        segments.page_table,
    )


def divide_keys(
    plan: PrefillPlan, q_heads: int, programs: int, least_tiles: int = LEAST_TILES
) -> PrefillPlan:
    """The plan with the keys of blocks divided, for a launch of so many programs, where else some
    of them would have nothing to do.

    A program's even share of all tiles is the measure: a block with two shares or more is divided
    into as many parts as it has whole shares, of `least_tiles` or more. So partial results are
    never more than programs, and where units are many no block is divided.

    Worked: 512 queries of 8 heads after 100,000 keys are 32 units of 783 to 786 tiles; a share of
    132 is 191, so each block has 4 parts: 128 units of 196.
    """
    most = programs // q_heads  # partial results of a head
    if most < 2:
        return plan
    xp = plan.items.__array_namespace__()
    tiles = plan.items[:, TILES]
    share = xp.maximum((tiles.sum() * q_heads + programs - 1) // programs, least_tiles)
    is_real = xp.arange(len(tiles)) < plan.num_items
    parts = xp.where(is_real, xp.maximum(tiles // share, 1), 0)
    ends, slots = xp.cumsum(parts), xp.where(parts > 1, parts, 0)
    first_slot = xp.where(parts > 1, xp.cumsum(slots) - slots, 0)

    item = xp.arange(len(tiles) + most)
    source = xp.searchsorted(ends, item, side="right").clip(max=len(tiles) - 1)
    part, of = item - (ends - parts)[source], xp.maximum(parts[source], 1)
    first, end = part * tiles[source] // of, (part + 1) * tiles[source] // of
    slot = xp.where(of > 1, first_slot[source] + part, 0)
    block, num_items = plan.items[source], ends[-1].astype("int32")
    start_run, start_tile = _place(xp, plan, block, first)
    end_run, last_tile = _place(xp, plan, block, end - 1)
    own = [end - first, start_run, start_tile, end_run, last_tile + 1]
    own += [block[:, BLOCK], of, first_slot[source], slot]
    items = xp.concat([block[:, :TILES], xp.stack(own, axis=1)], axis=1)
    items = _longest_first(xp, items, item < num_items)
    is_slot = (items[:, PARTS] > 1) & (items[:, SLOT] == xp.arange(most)[:, None])
    item_of = xp.where(is_slot.any(axis=1), is_slot.argmax(axis=1), -1).astype("int32")
    return plan._replace(items=items, num_items=num_items, parts=item_of)


def _place(
    xp: Any, plan: PrefillPlan, items: Int[AnyArray, "items fields"], tile: Int[AnyArray, " items"]
) -> tuple[Int[AnyArray, " items"], Int[AnyArray, " items"]]:
    """(run, number there) of the tile that is the item's block's `tile`-th."""
    starts, ends = plan.runs[:, 0], plan.runs[:, 1]
    tiles = _ceil_div(ends - starts // ROW_GRAIN * ROW_GRAIN, BLOCK_KEYS)
    tiles_end = xp.cumsum(xp.where(ends > starts, tiles, 0))
    tiles_before = xp.concat([xp.zeros_like(tiles_end[:1]), tiles_end])
    first_run = items[:, FIRST_RUN]
    inside = tile - _ceil_div(items[:, CONTEXT], BLOCK_KEYS)
    among_all = tiles_before[first_run] + inside
    run = xp.searchsorted(tiles_end, among_all, side="right").clip(max=len(starts) - 1)
    is_context = inside < 0
    place = xp.where(is_context, tile, among_all - tiles_before[run])
    return xp.where(is_context, first_run - 1, run), place


def _longest_first(
    xp: Any, items: Int[AnyArray, "items fields"], is_real: Bool[AnyArray, " items"]
) -> Int[AnyArray, "items fields"]:
    """The real ones, which come first, by their tiles, then zeros."""
    order = xp.argsort(xp.where(is_real, -items[:, TILES], 1), stable=True)
    return xp.where(is_real[:, None], items[order], 0).astype("int32")


def _runs(
    xp: Any, segments: Segments, rows: Int[AnyArray, " tokens"], count: int
) -> tuple[Int[AnyArray, " runs"], Int[AnyArray, " runs"], Int[AnyArray, " runs"]]:
    """(first row, end row, segment) of each run; empty ones past the last."""
    num_segments, tokens = segments.starts.shape[0], rows.shape[0]
    is_block = xp.arange(segments.blocks.shape[0]) < segments.num_blocks
    is_owner = segments.blocks[:, 0] == xp.arange(num_segments)[:, None]
    segment_ends = xp.where(is_owner & is_block, segments.blocks[:, 2], 0).max(axis=1)
    total = segment_ends.max()
    segment_ends = xp.where(segment_ends > 0, segment_ends, tokens + 1)
    token = xp.arange(tokens)
    segment = xp.searchsorted(segment_ends, token, side="right")
    begins = (token == 0) | (xp.diff(rows, prepend=rows[:1]) != 1)
    begins |= xp.diff(segment, prepend=segment[:1]) != 0
    number = xp.cumsum(begins & (token < total))  # of the run that a token is in, from 1
    at = xp.searchsorted(number, xp.arange(1, count + 2), side="left")
    lengths = xp.minimum(at[1:], total) - xp.minimum(at[:-1], total)
    at = at[:-1].clip(max=tokens - 1)
    starts = xp.where(lengths > 0, rows[at], 0)
    return starts, starts + lengths, xp.where(lengths > 0, segment[at], num_segments)


def _ceil_div(a: Int[AnyArray, "*n"], b: int) -> Int[AnyArray, "*n"]:
    return (a + (b - 1)) // b
