"""What the prefill kernel works on: planned once an iteration, the same for all layers.

Arithmetic on a few hundred integers, for the host or for a program's part before the layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.blockwise import Segments

AnyArray: TypeAlias = Array | np.ndarray  # noqa: UP040 - jaxtyping takes no `type` statement

BLOCK_QUERIES = 128  # of a unit of work
BLOCK_KEYS = 128  # of a tile
ROW_GRAIN = 8  # blocks of queries and tiles of keys begin at multiples of it

# Fields of an item.
QUERY_ROW, FIRST_QUERY, LAST_QUERY, CONTEXT, SEGMENT, FIRST_RUN, OWN_RUN, TILES = range(8)
ITEM_FIELDS = 8


class PrefillPlan(NamedTuple):
    """What the kernel reads. A run is a part of a segment whose tokens lie on consecutive rows.

    items: blocks of queries, the one with the most tiles of keys first; each is worked on once a
    query head. Its fields: first row of the block, which divides by 8; the rows [first query, last
    query) that are the run's; tokens of context; segment; first and own run; tiles of keys.
    num_items: how many are real.
    runs: [first row, end row) of each run, in the order of their tokens; empty past the last.
    page_table: of each segment's context, in prefill layout.
    """

    items: Int[AnyArray, "items 8"]
    num_items: Int[AnyArray, ""]
    runs: Int[AnyArray, "runs 2"]
    page_table: Int[AnyArray, "segments max_pages"]


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
    item_tiles = _ceil_div(context, BLOCK_KEYS) + before[run] - before[first_run[run]]
    item_tiles += _ceil_div(last - aligned[run], BLOCK_KEYS)
    first = xp.maximum(row, starts[run])
    fields = [row, first, last, context, segment[run], first_run[run], run, item_tiles]
    items = xp.stack(fields, axis=1).astype("int32")
    num_items = blocks_end[-1].astype("int32")
    longest_first = xp.argsort(xp.where(item < num_items, -item_tiles, 1), stable=True)
    return PrefillPlan(
        xp.where(item[:, None] < num_items, items[longest_first], 0).astype("int32"),
        num_items,
        xp.stack([starts, ends], axis=1).astype("int32"),
        segments.page_table,
    )


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
