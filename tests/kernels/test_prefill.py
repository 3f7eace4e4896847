"""Prefill attention on Hopper, interpreted, against the oracle: every page but those in use is NaN,
as is whatever a kernel has not written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise import Segments, max_prefill_blocks, prefill_block_queries
from pallas_kernels.prefill_attention import PrefillTuning, by_rows, prefill_attention
from pallas_kernels.prefill_plan import (
    BLOCK,
    BLOCK_KEYS,
    BLOCK_QUERIES,
    CONTEXT,
    END_RUN,
    END_TILE,
    FIRST_QUERY,
    FIRST_RUN,
    FIRST_SLOT,
    LAST_QUERY,
    OWN_RUN,
    PARTS,
    QUERY_ROW,
    SEGMENT,
    SLOT,
    START_RUN,
    START_TILE,
    TILES,
    PrefillPlan,
    divide_keys,
    max_items,
    plan_prefill,
)
from pallas_kernels.reference import causal
from tests.kernels.interpreter import (
    QUICK,
    PagedPool,
    assert_close,
    bfloat16_normal,
    interpreted,
    page_table,
)


def segments_of(chunks: list[tuple[int, int]], table: np.ndarray, tokens: int) -> Segments:
    """Chunks (context, length) end to end, and a place for one more."""
    step, at, starts, blocks = prefill_block_queries(tokens), 0, [], []
    for index, (_, length) in enumerate(chunks):
        starts.append(at)
        blocks += [(index, first, at + length) for first in range(at, at + length, step)]
        at += length
    padding = max_prefill_blocks(tokens, len(chunks) + 1) - len(blocks)
    fields: tuple[Any, ...] = (
        np.array([*starts, 0], np.int32),
        np.array([*(context for context, _ in chunks), 0], np.int32),
        table,
        np.array(blocks + [(0, 0, 0)] * padding, np.int32),
        np.int32(len(blocks)),
    )
    return Segments(*fields)


def rows_of(shares: list[tuple[int, int]], tokens: int) -> np.ndarray:
    """Each token's row, where each sender's share is (first row, number); zeros after the last."""
    rows = np.concatenate([first + np.arange(count) for first, count in shares])
    return np.pad(rows, (0, tokens - len(rows))).astype(np.int32)


class Case:
    """Random chunks, and what the oracle makes of them in float64."""

    def __init__(
        self, chunks, shares, tokens, page_tokens, kv_heads, q_per_kv, head_dim, pool=None
    ):
        rng = np.random.default_rng(0)
        self.kv_heads, q_heads = kv_heads, kv_heads * q_per_kv
        self.qkv = bfloat16_normal(rng, tokens, q_heads + 2 * kv_heads, head_dim)
        pages = 3 + sum(-(-context // page_tokens) for context, _ in chunks)
        self.pool = pool or PagedPool(rng, pages, page_tokens * kv_heads, head_dim)
        rows = rows_of(shares, tokens)
        self.out = np.zeros((tokens, q_heads, head_dim))
        self.lse = np.full((tokens, q_heads), -np.inf)
        ids, at = [], 0
        for context, length in chunks:
            past = bfloat16_normal(rng, 2, context, kv_heads, head_dim)
            ids.append(self.pool.store(past[0], past[1], page_tokens) if context else [])
            own = rows[at : at + length]
            new = self.qkv[own, q_heads:].reshape(length, 2, kv_heads, head_dim)
            k, v = np.concatenate([past, new.swapaxes(0, 1)], axis=1)
            self.out[own] = causal(self.qkv[own, :q_heads], k, v)
            self.lse[own] = log_sum_exp(self.qkv[own, :q_heads], k)
            at += length
        others = np.setdiff1d(np.arange(tokens), rows[:at])
        self.qkv[others, : q_heads + kv_heads] = np.nan  # queries and keys that went wrong
        table = np.asarray(page_table([*ids, []], max(map(len, ids)) + 1))
        plan = plan_prefill(segments_of(chunks, table, tokens), rows, len(shares))
        self.plan = jax.tree.map(jnp.asarray, plan)

    def check(self, programs, plan=None):
        plan = plan or self.plan

        def kernel(qkv, pool, layer):
            tuning = PrefillTuning(programs, interpretable=True)
            return prefill_attention(qkv, pool, layer, plan, kv_heads=self.kv_heads, tuning=tuning)

        out, lse = interpreted(kernel, jnp.asarray(self.qkv, jnp.bfloat16), *self.pool.operands)
        assert out.dtype == jnp.bfloat16
        assert_close(out, self.out)
        assert (out[np.isinf(self.lse[:, 0])] == 0).all()
        lse = by_rows(jnp.asarray(lse), plan, len(out))
        np.testing.assert_allclose(lse, self.lse, atol=1e-4)


def log_sum_exp(q, k):
    """Of the last tokens of a sequence of keys, each up to itself."""
    length, context = len(q), len(k) - len(q)
    repeated = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("qhd,thd->qht", q, repeated) / np.sqrt(q.shape[2])
    seen = np.arange(len(k)) <= context + np.arange(length)[:, None]
    return np.log(np.where(seen[:, None], np.exp(scores), 0).sum(axis=-1))


def test_a_chunk_between_other_rows():
    """Begins and ends within eights, after a context of part of a page."""
    Case([(5, 3)], [(9, 3)], 16, 16, 1, 1, 64).check(1)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("programs", "chunks", "shares", "tokens", "page_tokens", "kv_heads", "q_per_kv", "head_dim"),
    [
        (1, [(0, 1)], [(0, 1)], 8, 16, 1, 1, 128),  # one token, no context
        (2, [(127, 1), (128, 1), (129, 1)], [(7, 3)], 16, 128, 1, 2, 64),  # about a tile and a page
        (2, [(0, 128), (0, 130)], [(0, 258)], 264, 64, 1, 1, 64),  # whole blocks, two runs' edges
        # Three senders' shares: the first segment lies in two, the second in two.
        pytest.param(
            *(2, [(130, 100), (3, 60)], [(5, 60), (97, 60), (162, 40)], 208, 16, 2, 1, 128),
            marks=QUICK,
        ),
        (3, [(300, 5), (0, 40)], [(4, 45)], 56, 48, 2, 1, 64),  # pages that tiles end within
        (3, [(40, 70)], [(0, 70)], 72, 256, 1, 5, 128),  # pages of two tiles, more queries a head
        (5, [(1, 9)], [(2, 9)], 16, 32, 1, 2, 64),  # more programs than units
    ],
)
def test_prefill_equals_the_oracle(
    programs, chunks, shares, tokens, page_tokens, kv_heads, q_per_kv, head_dim
):
    Case(chunks, shares, tokens, page_tokens, kv_heads, q_per_kv, head_dim).check(programs)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("programs", "parts", "chunks", "shares", "tokens", "page_tokens", "q_per_kv", "head_dim"),
    [
        # A tile each, the last of own keys alone.
        pytest.param(2, 4, [(300, 5)], [(4, 5)], 16, 16, 1, 64, marks=QUICK),
        # Blocks of other keys between divided ones; a part's tiles from a context and two runs.
        (3, 12, [(130, 100), (3, 60)], [(5, 60), (97, 60), (162, 40)], 208, 64, 2, 128),
        (2, 12, [(0, 300), (520, 9)], [(0, 309)], 312, 16, 2, 64),  # whole blocks and part of one
    ],
)
def test_divided_keys_equal_the_oracle(
    programs, parts, chunks, shares, tokens, page_tokens, q_per_kv, head_dim
):
    """parts: programs that the plan is made for. A query sees none of the keys of some parts."""
    case = Case(chunks, shares, tokens, page_tokens, 1, q_per_kv, head_dim)
    plan = divide_keys(case.plan, q_per_kv, parts, least_tiles=1)
    assert plan.num_items > case.plan.num_items
    case.check(programs, plan)


@pytest.mark.kernels
def test_nothing_to_do_gives_zeros():
    case = Case([(5, 3)], [(9, 3)], 16, 16, 1, 1, 64)
    nothing = jax.tree.map(jnp.zeros_like, case.plan)
    tuning = PrefillTuning(2, interpretable=True)

    def kernel(qkv, pool, layer):
        return prefill_attention(qkv, pool, layer, nothing, kv_heads=1, tuning=tuning)

    out, _ = interpreted(kernel, jnp.asarray(case.qkv, jnp.bfloat16), *case.pool.operands)
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("chunks", "shares", "tokens"),
    [
        ([(0, 1)], [(0, 1)], 8),
        ([(300, 700), (5, 1), (0, 8), (70_000, 290)], [(3, 999)], 1024),
        ([(130, 300), (3, 60), (0, 640)], [(64, 448), (515, 300), (1024, 252)], 1536),
        ([(0, 1024)], [(0, 512), (512, 512)], 1024),  # shares that meet are one run
    ],
)
def test_the_plan_has_every_query_once(chunks, shares, tokens):
    """With the tiles that it needs, the most first."""
    table = np.zeros((len(chunks) + 1, 1), np.int32)
    rows = rows_of(shares, tokens)
    plan = plan_prefill(segments_of(chunks, table, tokens), rows, len(shares))
    items, runs = plan.items[: plan.num_items], plan.runs
    assert len(plan.items) == max_items(tokens, len(chunks) + len(shares))
    assert (items[:, QUERY_ROW] % 8 == 0).all()
    assert (np.diff(items[:, TILES]) <= 0).all()
    owner = np.repeat(np.arange(len(chunks)), [length for _, length in chunks])
    seen = []
    for item in items:
        segment = item[SEGMENT]
        assert item[CONTEXT] == chunks[segment][0]
        queries = np.arange(item[FIRST_QUERY], item[LAST_QUERY])
        assert item[QUERY_ROW] <= queries[0] and queries[-1] < item[QUERY_ROW] + BLOCK_QUERIES
        own = runs[item[FIRST_RUN] : item[OWN_RUN] + 1]
        keys = np.concatenate([np.arange(*run) for run in own])
        # Those of the segment up to the last query, and no more than the rest of its run.
        segment_rows = rows[: len(owner)][owner == segment]
        np.testing.assert_array_equal(
            keys[keys < item[LAST_QUERY]], segment_rows[segment_rows < item[LAST_QUERY]]
        )
        ends = np.minimum(own[:, 1], item[LAST_QUERY])
        spans = [item[CONTEXT], *(ends - own[:, 0] // 8 * 8)]
        counts = [-(-int(span) // BLOCK_KEYS) for span in spans]
        numbers = [-1, *range(item[FIRST_RUN], item[OWN_RUN] + 1)]
        expected = [(r, n) for r, count in zip(numbers, counts, strict=True) for n in range(count)]
        assert tiles_of(plan, item) == expected and item[TILES] == len(expected)
        seen += [(segment, query) for query in queries]
    assert sorted(seen) == sorted(zip(owner, rows, strict=False))


def tiles_of(plan: PrefillPlan, item: np.ndarray) -> list[tuple[int, int]]:
    """(run, number) of each tile of keys that the kernel's loops give an item; run -1: context."""
    tiles = []
    for run in range(item[START_RUN], item[END_RUN] + 1):
        start, end = plan.runs[max(run, 0)]
        is_context = run < item[FIRST_RUN]
        span = item[CONTEXT] if is_context else end - start // 8 * 8
        first = item[START_TILE] if run == item[START_RUN] else 0
        stop = item[END_TILE] if run == item[END_RUN] else -(-int(span) // BLOCK_KEYS)
        tiles += [(-1 if is_context else run, tile) for tile in range(first, stop)]
    return tiles


@pytest.mark.parametrize(
    ("chunks", "q_heads", "programs", "units"),
    [
        ([(100_000, 512)], 8, 132, 128),  # four blocks of eight heads in four parts
        (
            [(100_000, 8), (0, 1016)],
            8,
            132,
            15 * 8 + 8 * 8,
        ),  # a long block in 15, eight short
        ([(0, 1024)], 8, 132, 64),  # less than 16 tiles to a part
        ([(100_000, 1024)], 16, 132, 128),  # as many as there are programs
        ([(100_000, 512)], 80, 132, 320),  # more heads than would leave a program free
        ([(9_000, 1024)], 1, 132, 32),  # last parts: the context's end and own keys
    ],
)
def test_keys_are_divided_where_programs_would_be_idle(chunks, q_heads, programs, units):
    """A block's parts have all its tiles once, as even as can be; partial results are never more
    than programs, each with a place of its own."""
    table = np.zeros((len(chunks) + 1, 1), np.int32)
    rows = rows_of([(0, 1024)], 1024)
    plan = plan_prefill(segments_of(chunks, table, 1024), rows)
    divided = divide_keys(plan, q_heads, programs)
    items = divided.items[: divided.num_items]
    assert len(items) * q_heads == units
    assert (np.diff(items[:, TILES]) <= 0).all()
    slots = []
    for block in plan.items[: plan.num_items]:
        parts = items[items[:, BLOCK] == block[BLOCK]]
        tiles = [tile for part in parts for tile in tiles_of(plan, part)]
        assert sorted(tiles) == tiles_of(plan, block) and len(tiles) == block[TILES]
        assert [len(tiles_of(plan, part)) for part in parts] == parts[:, TILES].tolist()
        assert (parts[:, :TILES] == block[:TILES]).all()
        assert (parts[:, PARTS] == len(parts)).all()
        assert np.ptp(parts[:, TILES]) <= 1
        if len(parts) > 1:
            assert parts[:, TILES].min() >= 16
            assert (parts[:, FIRST_SLOT] == parts[:, SLOT].min()).all()
            slots += parts[:, SLOT].tolist()
    assert sorted(slots) == list(range(len(slots))) and len(slots) * q_heads <= programs
    if slots:
        assert divided.parts is not None
        owners = divided.parts[: len(slots)]
        assert (items[owners, SLOT] == np.arange(len(slots))).all()
        assert (divided.parts[len(slots) :] == -1).all()


@pytest.mark.kernels
def test_the_plan_is_the_same_in_a_program():
    segments = segments_of([(130, 100), (3, 60)], np.zeros((3, 2), np.int32), 208)
    rows = rows_of([(5, 60), (97, 60), (162, 40)], 208)

    def plan(segments, rows):
        return divide_keys(plan_prefill(segments, rows, 3), 2, 12, least_tiles=1)

    in_program = jax.jit(plan)(jax.tree.map(jnp.asarray, segments), jnp.asarray(rows))
    for host, device in zip(plan(segments, rows), in_program, strict=True):
        assert host is not None and device is not None
        assert host.dtype == device.dtype
        np.testing.assert_array_equal(host, device)


def test_what_no_kernel_supports_is_refused():
    def attempt(rows=8, heads=4, head_dim=64, page_rows=16, dtype=jnp.bfloat16):
        qkv = jnp.zeros((rows, heads, head_dim), dtype)
        pool = jnp.zeros((1, 2, 1, page_rows, head_dim), jnp.bfloat16)
        segments = segments_of([(0, 1)], np.zeros((2, 1), np.int32), 8)
        plan = jax.tree.map(jnp.asarray, plan_prefill(segments, np.arange(8, dtype=np.int32)))
        prefill_attention(qkv, pool, jnp.int32(0), plan, kv_heads=1)

    with pytest.raises(ValueError, match="qkv: head_dim must be 64 or 128, got 96"):
        attempt(head_dim=96)
    with pytest.raises(ValueError, match="qkv: must be bfloat16, got float32"):
        attempt(dtype=jnp.float32)
    with pytest.raises(ValueError, match="kv_heads: of the 2 heads of qkv"):
        attempt(heads=2)
    with pytest.raises(ValueError, match="qkv: rows must be a multiple of 8, got 12"):
        attempt(rows=12)
    with pytest.raises(ValueError, match=r"pool: page_rows \(20\) must be a multiple of 8 tokens"):
        attempt(page_rows=20)
