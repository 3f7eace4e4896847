"""Decode attention on Hopper, interpreted, against the oracle: every page but those in use is NaN,
as is whatever a kernel has not written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention, decode_plan
from pallas_kernels.decode_kernel import BLOCK_KEYS
from pallas_kernels.reference import attend
from tests.kernels.interpreter import (
    QUICK,
    PagedPool,
    assert_close,
    bfloat16_normal,
    interpreted,
    page_table,
)


class Case:
    """Random rows of these contexts, and what the oracle makes of them in float64."""

    def __init__(self, contexts, page_tokens, kv_heads, q_per_kv, head_dim, pool=None):
        rng = np.random.default_rng(0)
        self.contexts, rows = contexts, len(contexts)
        self.q = bfloat16_normal(rng, rows, kv_heads, q_per_kv, head_dim)
        self.sequences = [bfloat16_normal(rng, 2, n + 1, kv_heads, head_dim) for n in contexts]
        pages = 3 + sum(-(-n // page_tokens) for n in contexts)
        self.pool = pool or PagedPool(rng, pages, page_tokens * kv_heads, head_dim)
        ids = [self.pool.store(s[0, :-1], s[1, :-1], page_tokens) for s in self.sequences]
        self.table = page_table(ids, max(map(len, ids)) + 2)

    def run(self, programs):
        def kernel(*operands):
            return decode_attention(*operands, programs=programs, interpretable=True)

        rows, indices = self.operands[:3], self.operands[3:]
        return interpreted(kernel, *rows, *self.pool.operands, *indices)

    @property
    def operands(self):
        """Queries, own keys and values; page table and contexts."""
        own = (np.stack([s[kind, -1] for s in self.sequences]) for kind in (0, 1))
        rows = (jnp.asarray(x, jnp.bfloat16) for x in (self.q, *own))
        return *rows, self.table, jnp.asarray(self.contexts, jnp.int32)

    def expected(self):
        flat = (len(self.contexts), -1, self.q.shape[-1])
        pairs = zip(self.q.reshape(flat), self.sequences, strict=True)
        return np.stack([attend(q, s[0], s[1]) for q, s in pairs]).reshape(self.q.shape)

    def expected_lse(self):
        def of_row(q, sequence):
            scores = np.einsum("kgd,tkd->kgt", q, sequence[0]) / np.sqrt(q.shape[-1])
            return np.log(np.exp(scores).sum(axis=-1))

        return np.stack([of_row(q, s) for q, s in zip(self.q, self.sequences, strict=True)])


def check(programs, *case):
    case = Case(*case)
    out, lse = case.run(programs)
    assert out.dtype == jnp.bfloat16
    assert_close(out, case.expected())
    np.testing.assert_allclose(lse, case.expected_lse(), atol=1e-4)


def test_rows_of_two_blocks_and_of_none():
    """The first row's blocks are another program's each."""
    check(2, [70, 0], 16, 1, 3, 64)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("programs", "contexts", "page_tokens", "kv_heads", "q_per_kv", "head_dim"),
    [
        pytest.param(3, [1, 15, 16, 17], 16, 1, 5, 128, marks=QUICK),  # about a page
        (2, [63, 64, 65, 0], 64, 1, 1, 64),  # about a block, and a page of one
        (3, [127, 129], 128, 2, 8, 64),  # two blocks a page; pieces end within heads
        (1, [130, 40], 32, 1, 12, 128),  # nothing divided; more than eight queries a head
        (16, [3125], 16, 1, 4, 64),  # a row of 100,000 a program of an H100, for 16 of them
        (7, [400], 16, 1, 64, 128),  # more programs than fit evenly; a full tile of queries
        (4, [0, 0], 16, 2, 2, 64),  # padding only
    ],
)
def test_decode_equals_the_oracle(programs, contexts, page_tokens, kv_heads, q_per_kv, head_dim):
    check(programs, contexts, page_tokens, kv_heads, q_per_kv, head_dim)


jitted_plan = jax.jit(decode_plan, static_argnums=(1, 2))


@pytest.mark.parametrize("contexts", [[100_000], [0, 131_072, 64, 65]])
def test_the_plan_gives_every_block_to_one_program(contexts):
    """And all programs as much as another, but for the last."""
    programs, kv_heads = 132, 8
    lens = np.asarray(contexts)
    blocks = np.maximum(-(-lens // BLOCK_KEYS), 1)
    everything = [
        (row, head, block)
        for row, count in enumerate(blocks)
        for head in range(kv_heads)
        for block in range(count)
    ]
    plan = np.asarray(jitted_plan(jnp.asarray(lens, jnp.int32), kv_heads, programs))
    share = -(-len(everything) // programs)
    assert (plan[:, -1] == share).all()
    for program, (row, head, block, pieces, _) in enumerate(plan):
        stretch = everything[program * share : (program + 1) * share]
        assert pieces == len({(row, head) for row, head, _ in stretch})
        assert not stretch or stretch[0] == (row, head, block)


def test_what_no_kernel_supports_is_refused():
    def attempt(q_per_kv=2, head_dim=64, page_rows=64, dtype=jnp.bfloat16):
        q, own = np.zeros((1, 2, q_per_kv, head_dim), dtype), np.zeros((1, 2, head_dim), dtype)
        pool, index = np.zeros((1, 2, 1, page_rows, head_dim), dtype), np.zeros((1, 1), np.int32)
        decode_attention(
            *map(jnp.asarray, (q, own, own, pool, np.int32(0), index, np.zeros(1, np.int32)))
        )

    with pytest.raises(ValueError, match="head_dim: must be 64 or 128, got 96"):
        attempt(head_dim=96)
    with pytest.raises(ValueError, match="pool: must be bfloat16, got float32"):
        attempt(dtype=jnp.float32)
    with pytest.raises(ValueError, match="page_tokens: must be 16, 32 or a multiple of 64, got 48"):
        attempt(page_rows=96)
    with pytest.raises(ValueError, match=r"page_rows .65. must be a multiple of 2 heads"):
        attempt(page_rows=65)
    with pytest.raises(ValueError, match="q_per_kv: at most 64 query heads, got 65"):
        attempt(q_per_kv=65)
