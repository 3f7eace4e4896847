"""From a trace to requests: slices, rates, targets."""

from __future__ import annotations

import doctest
import itertools

import pytest

from conflux_jax.models.known_specs import LLAMA_3_1_8B, QWEN3_14B
from conflux_jax.simulation import targets
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.targets import Targets, scaled_targets
from conflux_jax.simulation.traces import TraceError, TraceRequest
from conflux_jax.simulation.workload import at_rate, rate_of, simulated, slice_minutes, spread

TRACE = [
    TraceRequest(0.0, 100, 5, (1,)),
    TraceRequest(30.0, 600, 6, (1, 2)),
    TraceRequest(90.0, 700, 7, (1, 3)),
    TraceRequest(150.0, 40_000, 8),
]


def test_examples():
    assert doctest.testmod(targets).failed == 0


def test_rate_is_scaled_by_one_factor():
    """Three intervals in 150 s; at 0.2 a second they take 15 s."""
    assert rate_of(TRACE) == pytest.approx(0.02)
    scaled = at_rate(TRACE, 0.2)
    assert [request.arrival_s for request in scaled] == pytest.approx([0.0, 3.0, 9.0, 15.0])
    assert rate_of(scaled) == pytest.approx(0.2)
    for before, after in zip(TRACE, scaled, strict=True):
        assert (before.prompt_tokens, before.output_tokens, before.prefix_hashes) == (
            after.prompt_tokens,
            after.output_tokens,
            after.prefix_hashes,
        )


def test_all_at_once_have_no_rate():
    with pytest.raises(TraceError, match="at once"):
        at_rate([TraceRequest(0.0, 1, 1), TraceRequest(0.0, 1, 1)], 2.0)
    with pytest.raises(TraceError, match="at once"):
        at_rate(TRACE[:1], 2.0)


def test_slices_are_half_open_and_start_at_zero():
    taken = slice_minutes(TRACE, 0.5, 2.5)
    assert [(r.arrival_s, r.prompt_tokens) for r in taken] == [(0.0, 600), (60.0, 700)]
    with pytest.raises(TraceError, match="minutes 3 to 4"):
        slice_minutes(TRACE, 3, 4)


def test_a_slice_reads_no_further_than_its_end():
    read = iter(TRACE)
    slice_minutes(read, 0, 1)
    assert [request.arrival_s for request in read] == [150.0]


def test_requests_get_numbers_and_targets():
    requests = simulated(TRACE, Targets(0.05, floor_s=2.0, tokens_s=10_000))
    assert [request.number for request in requests] == [0, 1, 2, 3]
    assert [r.deadline_s - r.arrival_s for r in requests] == pytest.approx([2.0, 2.0, 2.0, 4.0])
    assert {request.tbt_slo_s for request in requests} == {0.05}
    assert requests[1].prefix_hashes == (1, 2)
    fixed = simulated(TRACE, Targets(0.05, floor_s=1.5))
    assert {r.deadline_s - r.arrival_s for r in fixed} == {1.5}


def test_deadlines_follow_model_and_gpus():
    """In proportion to the GPUs and against the weights; never under the floor."""
    h100 = load_hardware("h100")
    rules = [scaled_targets(QWEN3_14B, h100, gpus, 0.1) for gpus in (4, 8)]
    speeds = [rule.tokens_s or 0.0 for rule in rules]
    assert speeds[1] == pytest.approx(2 * speeds[0])
    smaller = scaled_targets(LLAMA_3_1_8B, h100, 4, 0.1).tokens_s or 0.0
    # 32 layers of 4096 x 6144 + 4096^2 + 3 x 4096 x 14336 weights; 40 of 5120 x 12288 + ...
    llama = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    qwen = 40 * 5120 * (7168 + 5120 + 3 * 17408)
    assert smaller / speeds[0] == pytest.approx(qwen / llama)
    for rule, (shorter, longer) in itertools.product(rules, itertools.pairwise((1, 10**4, 10**6))):
        assert 2.0 <= rule.ttft_slo_s(shorter) <= rule.ttft_slo_s(longer)


def test_requests_of_one_time_are_spread_up_to_the_next():
    times_s = (0.0, 0.0, 0.0, 3.0, 4.0, 4.0)
    trace = [TraceRequest(time_s, 10 + at, 1, (at,)) for at, time_s in enumerate(times_s)]
    spread_out = spread(trace, seed=1)
    arrivals = [request.arrival_s for request in spread_out]
    assert [request.prompt_tokens for request in spread_out] == [10, 11, 12, 13, 14, 15]
    assert [request.prefix_hashes for request in spread_out] == [(at,) for at in range(6)]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 6
    assert arrivals[0] == 0.0 and 0.0 < arrivals[1] < arrivals[2] < 3.0
    assert arrivals[3:5] == [3.0, 4.0] and 4.0 < arrivals[5] < 5.0
    assert spread(trace, seed=1) == spread_out != spread(trace, seed=2)
    alone = [TraceRequest(0.0, 1, 1), TraceRequest(0.0, 2, 1)]
    assert spread(alone, seed=1) == alone
