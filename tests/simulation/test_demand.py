"""Percentiles, rates and prefix reuse of small traces, worked out by hand."""

from __future__ import annotations

import pytest

from conflux_jax.simulation.demand import PrefixesSeen, measure, percentile
from conflux_jax.simulation.traces import TraceRequest


def test_percentiles_by_nearest_rank():
    twenty = list(range(10, 210, 10))
    # Ranks 0.5 * 20 = 10, 0.95 * 20 = 19, and 0.99 * 20 = 19.8, so 20.
    assert [percentile(twenty, p) for p in (50, 95, 99)] == [100, 190, 200]
    assert [percentile([7], p) for p in (50, 95, 99)] == [7, 7, 7]
    assert percentile([1, 2, 3], 50) == 2


def test_reuse_follows_chains_of_blocks():
    seen = PrefixesSeen()
    added = [
        TraceRequest(0, 1500, 1, (1, 2, 3)),  # all new
        TraceRequest(0, 1500, 1, (1, 2, 4)),  # 1, 2: 1,024 tokens
        TraceRequest(0, 1024, 1, (2, 3)),  # 2 never came first
        TraceRequest(0, 1400, 1, (1, 9, 3)),  # 1 alone: 3 does not come after 9 yet
        TraceRequest(0, 1500, 1, (1, 2, 3)),  # the first again, its last block not full
        TraceRequest(0, 500, 1, (2,)),  # since the third, 2 has come first; not a full block
        TraceRequest(0, 700, 1),
    ]
    assert [seen.add(request) for request in added] == [0, 1024, 0, 512, 1500, 500, 0]


def test_a_small_trace():
    demand = measure(
        [
            TraceRequest(0.0, 1000, 10, (1, 2)),
            TraceRequest(1.0, 600, 30, (1, 3)),
            TraceRequest(4.0, 400, 20, (4,)),
        ]
    )
    assert demand.rate_per_s == 2 / 4.0
    assert (demand.num_requests, demand.duration_s) == (3, 4.0)
    assert demand.prompts.lengths.mean == pytest.approx(2000 / 3)
    assert (demand.prompts.lengths.p50, demand.prompts.lengths.p95) == (600, 1000)
    assert demand.prefix_reuse == pytest.approx(512 / 2000)
    assert demand.uncached is not None
    # 1,000, 600 - 512 = 88 and 400 are left.
    assert (demand.uncached.lengths.p50, demand.uncached.lengths.longest) == (400, 1000)
    # An output of n after p tokens reads p + n / 2 on average:
    # (10 * 1005 + 30 * 615 + 20 * 410) / 60.
    assert demand.decode_context == pytest.approx((10_050 + 18_450 + 8_200) / 60)
    assert demand.longest_context == 1010
    assert demand.outputs.mean == 20


def test_a_prompt_that_was_seen_whole_computes_its_last_token():
    demand = measure([TraceRequest(0, 512, 1, (1,)), TraceRequest(1, 512, 1, (1,))])
    assert demand.prefix_reuse == 0.5
    assert demand.uncached is not None
    assert demand.uncached.lengths.mean == (512 + 1) / 2


def test_what_a_trace_cannot_tell():
    demand = measure([TraceRequest(3, 5, 1), TraceRequest(3, 5, 1)])
    assert demand.rate_per_s is None
    assert demand.prefix_reuse is None
    assert demand.uncached is None
    with pytest.raises(ValueError, match="without requests"):
        measure([])
