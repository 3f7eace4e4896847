"""An iteration's stages from operators' times, conserved and in proportion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import LLAMA_3_1_8B, QWEN3_14B, QWEN3_32B
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import Curve, IterationShape, LatencyModel, prefill_work
from conflux_jax.simulation.costs import (
    ConfluxCosts,
    CostPredictor,
    ProfiledCosts,
    UniformTPCosts,
)
from conflux_jax.simulation.hardware import preset
from conflux_jax.simulation.model_costs import Heads, ModelOnGpus, heads_per_gpu
from conflux_jax.simulation.work import Stages, Work

H100 = preset("h100")
LAYERS = QWEN3_14B.num_layers
DECODES = Work(16, (16,) * 4, (16 * 8192,) * 4, 8192, samples=16)
CHUNK = Work(1024, (0,) * 4, (0,) * 4, 0, ((8192, 4096),), (1024,) * 4)
MIXED = DECODES._replace(rows=1040, chunks=CHUNK.chunks, shares=CHUNK.shares)


def conflux(groups: int = 4, **ablation: bool) -> ConfluxCosts:
    return ConfluxCosts(QWEN3_14B, H100, groups, **ablation)


def test_heads_are_dealt_out_padded_or_copied():
    assert heads_per_gpu(QWEN3_14B, 1) == Heads(40, 8)
    assert heads_per_gpu(QWEN3_14B, 4) == Heads(10, 2)
    assert heads_per_gpu(QWEN3_14B, 3) == Heads(15, 3)
    assert heads_per_gpu(QWEN3_14B, 16) == Heads(3, 1)


def test_a_decode_iteration_is_the_sum_of_its_operators():
    """One row of Llama-3.1-8B on one GPU: four products a layer, four small kernels, attention."""
    hidden, ffn, rows = 4096, 14_336, 8
    layer = sum(
        H100.gemm_s(rows, n, k)
        for n, k in ((6144, hidden), (hidden, 4096), (2 * ffn, hidden), (hidden, ffn))
    )
    layer += 2 * H100.elementwise_s(rows * 4 * hidden * 2)
    layer += H100.elementwise_s(rows * 2 * 6144 * 2) + H100.elementwise_s(rows * 3 * ffn * 2)
    work = Work(rows, (rows,), (rows * 1000,), 1000, samples=rows)
    stages = ConfluxCosts(LLAMA_3_1_8B, H100, 1).stages(work)
    assert stages.linear == pytest.approx(32 * layer)
    assert stages.attention == pytest.approx(32 * H100.decode_attention_s(rows, rows * 1000, 8))
    assert stages.attention == stages.decode_attention
    assert stages.prefill_attention == stages.communication == 0
    head = stages.head - H100.gemm_s(rows, 128_256, hidden)
    logits = H100.elementwise_s(rows * 128_256 * 4)
    assert head == pytest.approx(4 * logits + H100.elementwise_s(rows * 2 * hidden * 2))
    assert stages.total == pytest.approx(
        stages.linear + stages.head + stages.attention + H100.iteration_s
    )


def test_doubling_bandwidth_halves_a_decode_that_waits_for_memory():
    fast = H100.scaled("fast", source="", memory=2.0)
    work = DECODES._replace(contexts=(16 * 100_000,) * 4)
    slow_s, fast_s = (
        ConfluxCosts(QWEN3_14B, gpu, 4).stages(work).attention for gpu in (H100, fast)
    )
    start = LAYERS * H100.decode_attention_s(1, 1, 8)
    assert (slow_s - start) / (fast_s - start) == pytest.approx(2, rel=0.03)


def test_groups_share_a_prompts_attention_and_pay_for_the_exchange():
    alone = conflux(1).stages(CHUNK._replace(decodes=(0,), contexts=(0,), shares=(4096,)))
    shared = conflux(4).stages(CHUNK)
    assert shared.prefill_attention == pytest.approx(alone.prefill_attention / 4, rel=0.1)
    assert alone.communication == 0
    # 1,024 tokens of 40 queries, 8 keys and 8 values of 128 numbers go out, the queries come back.
    out, back = (H100.all_to_all_s(1024 * heads * 128 * 2, 4) for heads in (56, 40))
    assert shared.communication == pytest.approx(LAYERS * (out + back))
    assert shared.attention == pytest.approx(shared.prefill_attention + shared.communication)


def test_overlap_hides_and_takes():
    mixed, serial = conflux().stages(MIXED), conflux(overlap=False).stages(MIXED)
    confined = conflux(confined=True).stages(MIXED)
    parts = (serial.prefill_attention, serial.decode_attention, serial.communication)
    assert serial.attention == pytest.approx(sum(parts))
    assert max(parts) < mixed.attention < serial.attention
    assert mixed.attention <= confined.attention
    assert mixed.linear == serial.linear and mixed.head == serial.head
    assert mixed.overhead == pytest.approx(serial.overhead + LAYERS * H100.fork_s)
    # One path alone overlaps with nothing.
    for work in (DECODES, CHUNK):
        assert conflux().stages(work) == conflux(overlap=False).stages(work)


def test_a_decode_that_outlasts_prefill_hides_all_of_it():
    work = MIXED._replace(contexts=(10_000_000,) * 4)
    alone = H100.decode_attention_s(16, 10_000_000, 8, H100.decode_sms)
    expected = LAYERS * alone * (1 + H100.contention)
    assert conflux().stages(work).attention == pytest.approx(expected)


def test_prefill_takes_over_the_sms_that_decode_leaves():
    """Counted by hand from the operators: until decode ends, prefill runs beside it."""
    stages = conflux().stages(MIXED)
    slower, sms = 1 + H100.contention, H100.decode_sms
    decode = LAYERS * slower * H100.decode_attention_s(16, 16 * 8192, 8, sms)
    beside = LAYERS * slower * H100.prefill_attention_s(CHUNK.chunks, 10, H100.sms - sms)
    out = LAYERS * H100.all_to_all_s(1024 * 56 * 128 * 2, 4)
    back = stages.communication - out
    assert out < decode < out + beside
    left = 1 - (decode - out) / beside
    expected = decode + left * stages.prefill_attention + back
    assert stages.attention == pytest.approx(expected)
    assert conflux(confined=True).stages(MIXED).attention == pytest.approx(out + beside + back)


def test_ablations_cost_what_they_take_away():
    spread = conflux(spread=True).stages(MIXED)
    apart = conflux(batched=False).stages(MIXED)
    model = ModelOnGpus(QWEN3_14B, H100)
    assert apart.linear == pytest.approx(model.linear_s(16) + model.linear_s(1024))
    assert apart.linear > conflux().stages(MIXED).linear == model.linear_s(1040)
    # All 64 decodes with 2 of 8 KV heads each, and their rows through the exchanges.
    assert spread.decode_attention == pytest.approx(
        LAYERS * H100.decode_attention_s(64, 64 * 8192, 2)
    )
    assert spread.communication == sum(model.exchange_s(1040, 4))
    assert spread.attention == pytest.approx(
        spread.decode_attention + spread.prefill_attention + spread.communication
    )


def test_tensor_parallelism_splits_products_and_pays_all_reduces():
    model = ModelOnGpus(QWEN3_32B, H100)
    for rows in (16, 2048):
        reduces = 64 * 2 * H100.all_reduce_s(rows * 5120 * 2, 2)
        half = model.linear_s(rows, tp=2) - reduces
        assert model.linear_s(rows) / 2 < half < model.linear_s(rows) / 1.6
    floor = 64 * 2 * H100.all_reduce_s(1, 8)
    assert model.linear_s(1, tp=8) > floor > 1e-3


def test_uniform_tensor_parallelism_runs_the_paths_in_turn():
    work = Work(1088, (64,), (64 * 8192,), 8192, ((8192, 1024),), (1024,), 65)
    stages = UniformTPCosts(QWEN3_14B, H100, 4).stages(work)
    assert stages.attention == stages.prefill_attention + stages.decode_attention
    assert stages.prefill_attention == LAYERS * H100.prefill_attention_s(work.chunks, 10)
    assert stages.decode_attention == LAYERS * H100.decode_attention_s(64, 64 * 8192, 2)
    assert stages.communication == 0


def test_a_handoff_hides_behind_linear_layers_until_it_is_longer():
    plain = conflux().stages(MIXED)
    assert conflux().stages(MIXED._replace(handoff_tokens=1000)) == plain
    large = conflux().stages(MIXED._replace(handoff_tokens=1_000_000))
    sent = LAYERS * H100.send_s(1_000_000 * 8 * 2 * 128 * 2)
    assert large.linear == pytest.approx(sent) and sent > plain.linear
    assert large.attention == plain.attention


def test_a_ring_computes_the_same_and_hides_its_sends_behind_long_prompts():
    model = ModelOnGpus(QWEN3_14B, H100)
    one, four = (model.ring_prefill_s([(0, 65_536)], degree) for degree in (1, 4))
    assert one == model.prefill_attention_s([(0, 65_536)])
    assert one / 4 < four < one / 4 * 1.02
    # A short one waits for its sends: three of 256 tokens' keys and values.
    short = model.ring_prefill_s([(0, 1024)], 4)
    assert short > 3 * LAYERS * H100.send_s(256 * 8 * 2 * 128 * 2)
    assert model.ring_prefill_s([], 4) == 0


@pytest.mark.parametrize(
    "name", ["rows", "samples", "decodes", "contexts", "chunks", "shares", "handoff_tokens"]
)
def test_no_iteration_gets_cheaper_by_growing(name: str):
    costs, seconds = conflux(), []
    for step in range(0, 2000, 7):
        values: dict[str, object] = {
            "rows": 1 + step,
            "samples": step,
            "decodes": (1 + step, 8, 8, 8),
            "contexts": (1000 * step, 8192, 8192, 8192),
            "chunks": ((step * 16, 1 + step * 2),),
            "shares": (1 + step, 1024, 1024, 1024),
            "handoff_tokens": step * 1000,
        }
        seconds.append(costs.stages(MIXED._replace(**{name: values[name]})).total)
    assert sorted(seconds) == pytest.approx(seconds, rel=1e-9)
    assert seconds[-1] > seconds[0]


PROFILE = LatencyModel(
    identity={"rows_ladder": [16, 64, 256], "decode_rows_ladder": [1, 2, 4, 8, 16, 32]},
    groups=2,
    segments=4,
    linear=Curve((8, 256), (1e-3, 1e-2)),
    head=Curve((8, 32), (1e-3, 2e-3)),
    handoff_s=1e-4,
    communication=Curve((16, 256), (1e-3, 2e-3)),
    work_s=1e-9,
    read_s=1e-9,
    chunk_s=1e-5,
    token_s=1e-6,
    decode_rows=Curve((8, 32), (1e-3, 2e-3)),
    context_s=1e-7,
    all_context_s=0.0,
    padded_context_s=1e-8,
    k_d=0.5,
    k_p=0.5,
)


def test_a_profile_prices_the_bucket_that_its_engine_would_run():
    work = Work(70, (5, 3), (500, 300), 120, ((100, 130),), (65, 65), samples=6)
    bucket = Bucket(256, 8, prefill=True, handoff=True)
    shape = IterationShape(bucket, 500, 800, 120, 1, 130, prefill_work(100, 130))
    stages = ProfiledCosts(PROFILE).stages(work)
    assert stages.total == pytest.approx(PROFILE.predict_s(shape))
    assert stages.prefill_attention == PROFILE.parts(shape).prefill
    alone = Work(5, (5, 3), (500, 300), 120, samples=5)
    decode = IterationShape(Bucket(8, 8, prefill=False, handoff=False), 500, 800, 120)
    assert ProfiledCosts(PROFILE).stages(alone).total == pytest.approx(PROFILE.predict_s(decode))
    with pytest.raises(ValueError, match="rows: at most 256 in the profile's ladders, got 300"):
        ProfiledCosts(PROFILE).stages(work._replace(rows=300))
    nameless = replace(PROFILE, identity={"rows_ladder": [16]})
    with pytest.raises(ConfigError, match=r"identity\.decode_rows_ladder: must be a list"):
        ProfiledCosts(nameless)


def test_an_oracle_predicts_what_an_iteration_costs():
    costs = conflux()
    bucket = Bucket(1040, 16, prefill=True, handoff=True)
    work = prefill_work(8192, 4096)
    shape = IterationShape(bucket, 16 * 8192, 64 * 8192, 8192, 1, 4096, work)
    actual: Stages = costs.stages(MIXED._replace(samples=17))
    assert CostPredictor(costs, 4).predict_s(shape) == pytest.approx(actual.total, rel=0.01)
    decode = IterationShape(Bucket(16, 16, False, False), 16 * 8192, 64 * 8192, 8192)
    assert CostPredictor(costs, 4).predict_s(decode) == costs.stages(DECODES).total
    # The last tokens of a prompt: priced as these few, not as the whole block that is computed.
    few = MIXED._replace(rows=17, chunks=((8192, 3),), shares=(1, 1, 1, 0), samples=17)
    shape = IterationShape(
        Bucket(17, 16, True, True), 16 * 8192, 64 * 8192, 8192, 1, 3, prefill_work(8192, 3)
    )
    expected = costs.stages(few).total
    assert CostPredictor(costs, 4).predict_s(shape) == pytest.approx(expected, rel=1e-9)
