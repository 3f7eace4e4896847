"""Decode and prefill attention in one launch, interpreted, each against the oracle.

Who takes what is drawn by chance before: any such trace is one that queues could have made.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_plan
from pallas_kernels.decode_kernel import DecodeShape, HeadRows
from pallas_kernels.mixed_attention import DecodeOperands, PrefillOperands, mixed_attention
from pallas_kernels.prefill_plan import divide_keys
from tests.kernels import test_decode, test_prefill
from tests.kernels.interpreter import QUICK, PagedPool, assert_close, interpreted

PAGE_ROWS, HEAD_DIM = 64, 64


def trace(rng: np.random.Generator, programs: int, units: int) -> list[list[int]]:
    """Every unit is some program's, each program's in rising order; at last their number."""
    owners = rng.integers(programs, size=units)
    return [[*np.flatnonzero(owners == program).tolist(), units] for program in range(programs)]


def traces(programs: int, *sizes: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    rows = [trace(rng, programs, size) for size in sizes]
    longest = max(len(row) for side in rows for row in side)
    return np.array(
        [[row + [-1] * (longest - len(row)) for row in side] for side in rows], np.int32
    )


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("programs", "decode_sms", "stretches", "contexts", "chunks", "shares", "tokens"),
    [
        pytest.param(*(3, 1, 5, [70, 0, 130], [(5, 3), (40, 100)], [(9, 103)], 112), marks=QUICK),
        # No decode but padding, where all begin; prefill's keys divided into two parts.
        (2, 2, 2, [0, 0], [(300, 20)], [(0, 20)], 24),
        (2, 0, 3, [200], [(5, 1)], [(3, 1)], 8),  # all begin with prefill, and hardly any is there
    ],
)
def test_both_sides_equal_the_oracle(
    programs, decode_sms, stretches, contexts, chunks, shares, tokens
):
    pool = PagedPool(np.random.default_rng(0), 40, PAGE_ROWS, HEAD_DIM)
    decode = test_decode.Case(contexts, 16, 4, 3, HEAD_DIM, pool=pool)  # pages of 4 heads
    prefill = test_prefill.Case(chunks, shares, tokens, 64, 1, 2, HEAD_DIM, pool=pool)  # of one
    own = HeadRows(0, 4, 1, inner=4)
    queries = HeadRows(0, 12, 3, inner=4)
    shape = DecodeShape(
        len(contexts), 4, 1, 3, HEAD_DIM, 16, queries, own, own, stretches, interpretable=True
    )
    divided = divide_keys(prefill.plan, q_heads=2, programs=4, least_tiles=1)
    units = int(divided.num_items) * 2
    takes = jnp.asarray(traces(programs, stretches, units))

    def kernel(q, new_k, new_v, table, lens, qkv, pool, layer):
        q, new_k, new_v = (x.reshape(-1, HEAD_DIM) for x in (q, new_k, new_v))
        plan = decode_plan(lens, 4, stretches)
        decode = DecodeOperands(plan, q, new_k, new_v, table, lens)
        both = PrefillOperands(qkv, divided)
        return mixed_attention(
            shape, decode, both, pool, layer, takes, kv_heads=1, decode_sms=decode_sms,
            programs=programs,
        )  # fmt: skip

    qkv = jnp.asarray(prefill.qkv, jnp.bfloat16)
    results = interpreted(kernel, *decode.operands, qkv, *pool.operands)
    assert_close(results.decode, decode.expected())
    np.testing.assert_allclose(results.decode_lse, decode.expected_lse(), atol=1e-4)
    assert_close(results.prefill, prefill.out)
    lse = test_prefill.by_rows(jnp.asarray(results.prefill_lse), divided, tokens)
    np.testing.assert_allclose(lse, prefill.lse, atol=1e-4)
