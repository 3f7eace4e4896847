"""FLOPs and bytes counted by hand, and the published figures that estimates should come near."""

from __future__ import annotations

import pytest

from conflux_jax.models.known_specs import LLAMA_3_1_8B, QWEN3_14B, QWEN3_32B
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import IterationShape
from conflux_jax.simulation.roofline import (
    ATTENTION_FRACTION,
    GPUS,
    LINEAR_FRACTION,
    LINK_FRACTION,
    MEMORY_FRACTION,
    Gpu,
    ModelCosts,
    Roofline,
    group_size,
    kv_tokens,
)

# A layer: 1,000 weights; KV of 20 bytes a token, queries of 10, hidden rows of 8.
COSTS = ModelCosts(
    linear_weights=1000,
    head_weights=100,
    all_weights=1200,
    kv_bytes=20,
    query_bytes=10,
    hidden_bytes=8,
    attention_flops=50,
)
# Peaks of which the fractions leave 1,000 FLOP/s in GEMMs, 200 bytes/s of memory, 50 of a link.
GPU = Gpu("small", 1000 / LINEAR_FRACTION, 200 / MEMORY_FRACTION, 8000, 50 / LINK_FRACTION)
ATTENTION_FLOPS_S = 1000 / LINEAR_FRACTION * ATTENTION_FRACTION


def test_qwen3_14b_counted_by_hand():
    costs = ModelCosts.of(QWEN3_14B)
    layer = 5120 * 5120 + 2 * 5120 * 1024 + 5120 * 5120 + 3 * 5120 * 17_408
    assert costs.linear_weights == 40 * layer
    assert costs.all_weights == 40 * layer + 2 * 151_936 * 5120
    assert costs.all_weights == pytest.approx(14.8e9, rel=0.01)  # as its makers state
    assert costs.kv_bytes == 40 * 4096
    # Scores and weighted values: two products of 2 * 128 FLOPs for each of 40 heads.
    assert costs.attention_flops == 40 * 40 * 4 * 128


def test_a_few_decodes_wait_for_weights_and_kv():
    # 1,000 weights and 100 of the head: 2,200 bytes; KV of 30 tokens: 600. At 200 bytes/s.
    shape = IterationShape(Bucket(1, 1, False, False), context_tokens=30)
    assert Roofline(COSTS, GPU).predict_s(shape) == pytest.approx(2200 / 200 + 600 / 200)


def test_a_long_prefill_waits_for_products():
    # 100 rows: 200,000 FLOPs against 10 s of reading. The head of one row: 200 FLOPs, but 200
    # bytes take longer. 1,000 pairs of 50 FLOPs.
    shape = IterationShape(Bucket(100, 0, True, False), 0, 0, 0, 1, 100, 1000)
    expected = 200_000 / 1000 + 200 / 200 + 50_000 / ATTENTION_FLOPS_S
    assert Roofline(COSTS, GPU).predict_s(shape) == pytest.approx(expected)


def test_groups_share_attention_and_send_their_tokens():
    # 2 groups of 100 rows: each half of 1,000 pairs. A token's bytes go out as queries, keys and
    # values and come back as outputs, 10 + 20 + 10, half of them to the other group.
    shape = IterationShape(Bucket(100, 0, True, True), 0, 0, 0, 1, 200, 1000)
    expected = 200 + 1 + 25_000 / ATTENTION_FLOPS_S + 100 * 40 * 0.5 / 50
    assert Roofline(COSTS, GPU, groups=2).predict_s(shape) == pytest.approx(expected)


def test_gpus_of_a_group_share_weights_and_reduce_rows():
    # 1 row over 2 GPUs: half of 2,200 and of 600 bytes each; two all-reduces of 8 bytes (all
    # layers), of which a ring of 2 sends 2 * 1/2 of a row.
    shape = IterationShape(Bucket(1, 1, False, False), context_tokens=30)
    expected = 1100 / 200 + 2 * 8 / 50 + 300 / 200
    assert Roofline(COSTS, GPU, tp=2).predict_s(shape) == pytest.approx(expected)


def test_the_slower_path_counts():
    decode = IterationShape(Bucket(50, 1, True, False), context_tokens=10_000)
    prefill = decode._replace(context_tokens=0, prefill_work=1000)
    both = decode._replace(prefill_work=1000)
    model = Roofline(COSTS, GPU)
    assert model.predict_s(both) == model.predict_s(decode) > model.predict_s(prefill)


def test_groups_are_as_small_as_weights_allow():
    sizes = {
        (spec.name, name): group_size(ModelCosts.of(spec), GPUS[name])
        for spec in (LLAMA_3_1_8B, QWEN3_14B, QWEN3_32B)
        for name in GPUS
    }
    two = {("Qwen3-32B", "h100"), ("Qwen3-32B", "a100")}  # 65.5 GB: over half of 80, not of 141
    assert {key for key, size in sizes.items() if size == 2} == two
    assert set(sizes.values()) == {1, 2}
    # 90% of 8,000 bytes less 1,200 weights of 2 leaves 4,800 for KV of 20.
    assert kv_tokens(COSTS, GPU, 1) == 240
    assert kv_tokens(ModelCosts.of(QWEN3_32B), Gpu("tiny", 1, 1, 1e9, 1), 1) == 0


def test_estimates_come_near_what_was_published():
    """ConfluxServe's figures for Qwen3-14B on H100s: 16 decodes of 8K take about 20 ms."""
    shape = IterationShape(Bucket(16, 16, False, False), context_tokens=16 * 8192)
    model = Roofline(ModelCosts.of(QWEN3_14B), GPUS["h100"])
    assert model.predict_s(shape) == pytest.approx(0.020, rel=0.15)
