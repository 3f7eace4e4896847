"""What `bench.long_prefill` prints about H100s, against arithmetic on paper for one shape.

Llama-3.1-8B on four devices, bfloat16: 32 layers, hidden size 4,096, 32 query and 8 KV heads of
128, feed-forward 14,336, vocabulary 128,256. 2,048 rows in all, 256 of them decodes. The figures
below are written out from these numbers, not taken from the code under test.

The iteration: 1,792 tokens of prefill after 8,192; decodes of 1,000 tokens, but one of 3,000. At
home the busiest group has 63 of 1,000 and that one: 66,000; all four groups together 258,000.
"""

from __future__ import annotations

import pytest

from bench.h100.accounting import Cost, Iteration, cost
from bench.h100.thunks import always
from tests.gpu_compile.programs import Program, ablation

AT_HOME = ((1000,) * 64, (1000,) * 64, (1000,) * 63 + (3000,), (1000,) * 64)
IN_ONE_GROUP = (tuple(context for group in AT_HOME for context in group),)

# Weights of a layer on one device: 4096 x 6144 (32 + 8 + 8 heads of 128), 4096 x 4096,
# 4096 x 28,672 (gate and up), 14,336 x 4096: 25,165,824 + 16,777,216 + 117,440,512 + 58,720,256.
LAYER_WEIGHTS = 218_103_808
HEAD_WEIGHTS = 525_336_576  # 128,256 x 4,096
# One token's keys and values in all layers, of one head: 32 x 2 x 128 x 2 bytes.
HEAD_TOKEN_BYTES = 16_384
# One query of one head by one key, and its weight by the value, in all layers: 32 x 2 x (2 x 128).
PAIR_FLOPS = 16_384
# Query i of the chunk sees 8,192 + i + 1 keys: 1,792 x 8,192 + 1,792 x 1,793 / 2.
CHUNK_PAIRS = 16_286_592
# Each decode sees its context and itself: 66,000 + 64 in the busiest group; 258,000 + 256 in all.
BUSIEST_PAIRS, ALL_PAIRS = 66_064, 258_256


def counted(key: str) -> tuple[Program, Cost]:
    program = ablation(key)
    groups = program.limits.geometry.groups
    iteration = Iteration(1792, 8192, AT_HOME if groups == 4 else IN_ONE_GROUP)
    total = cost(program.module, program.dims, program.limits, program.bucket, iteration)
    return program, total


@pytest.mark.parametrize("key", ["scheme", "no_overlap"])
def test_the_scheme(key: str):
    program, total = counted(key)
    # Rows of four groups, 12 of 48 heads of 256 bytes each: 2,048 x 3,072. Back: 8 query heads,
    # 2,048 x 2,048. Hand-off: 64 pages of 16 tokens for each of four groups, keys and values of
    # two heads: 4,096 x 2 x 512.
    there, back, moved = 6_291_456, 4_194_304, 4_194_304
    assert [c.operand_bytes for c in total.collectives if c.kind == "all-to-all"] == [
        there,
        back,
        moved,
    ] * 32
    # Three quarters go to other devices: 11,010,048 bytes a layer.
    assert total.bytes_sent("all-to-all") == 352_321_536
    assert total.bytes_sent("all-reduce") == 0
    # Slots, positions and tokens of 72 samples (64 decodes, 8 chunks), 4 bytes each, to three
    # others.
    assert total.bytes_sent("all-gather") == 2_592
    assert total.weight_bytes == 2 * (32 * LAYER_WEIGHTS + HEAD_WEIGHTS) == 15_009_316_864
    # 512 rows through the layers, 72 samples through the head.
    assert total.product_flops == 2 * (512 * 32 * LAYER_WEIGHTS + 72 * HEAD_WEIGHTS)
    attention = total.attention
    assert attention.decode_bytes == 66_000 * 8 * HEAD_TOKEN_BYTES == 8_650_752_000
    assert attention.prefill_bytes == 8_192 * 2 * HEAD_TOKEN_BYTES == 268_435_456
    assert attention.handoff_bytes == 4 * 1_024 * 2 * HEAD_TOKEN_BYTES == 134_217_728
    # All 32 query heads for the group's decodes, 8 of them for the chunk.
    assert attention.flops == (32 * BUSIEST_PAIRS + 8 * CHUNK_PAIRS) * PAIR_FLOPS
    # 4 products, 2 attention kernels, 3 all-to-alls, 2 norms and copies of their weights, rotation,
    # hand-off's gather, merge, SwiGLU, scatter, counter; around them what XLA says it launches.
    assert total.launches == 32 * (4 + 2 + 3 + 2 * 2 + 6) + len(always(program.thunks))


def test_decode_spread_over_the_groups():
    """No hand-off; each device attends for all decodes with a quarter of the heads, so that the
    long one weighs on all alike."""
    program, total = counted("spread_decode")
    assert [c.operand_bytes for c in total.collectives if c.kind == "all-to-all"] == [
        6_291_456,
        4_194_304,
    ] * 32
    assert total.bytes_sent("all-to-all") == 251_658_240  # 32 x 3/4 of 10,485,760
    assert total.weight_bytes == 15_009_316_864
    assert total.product_flops == 2 * (512 * 32 * LAYER_WEIGHTS + 72 * HEAD_WEIGHTS)
    attention = total.attention
    assert attention.decode_bytes == 258_000 * 2 * HEAD_TOKEN_BYTES == 8_454_144_000
    assert (attention.prefill_bytes, attention.handoff_bytes) == (268_435_456, 0)
    assert attention.flops == (8 * ALL_PAIRS + 8 * CHUNK_PAIRS) * PAIR_FLOPS
    # As the scheme, without the hand-off's two; but decode rows are cut out of what was received,
    # and what comes back, merged before, is turned around.
    layer = 4 + 2 + 2 + 2 * 2 + 5 + 2
    assert total.launches == 32 * layer + len(always(program.thunks))


def test_linear_layers_by_phase():
    """Every weight of a layer is read twice, by 64 rows and by 448; the head's once."""
    _, total = counted("no_batching")
    assert total.bytes_sent("all-to-all") == 352_321_536
    assert total.weight_bytes == 2 * (2 * 32 * LAYER_WEIGHTS + HEAD_WEIGHTS) == 28_967_960_576
    assert total.product_flops == 2 * (512 * 32 * LAYER_WEIGHTS + 72 * HEAD_WEIGHTS)
    assert total.attention.decode_bytes == 8_650_752_000


def test_uniform_tensor_parallelism():
    """A quarter of every weight for all 2,048 rows."""
    program, total = counted("uniform_tp")
    assert total.bytes_sent("all-to-all") == 0
    # 2,048 rows of 4,096, two bytes: of the embedding, then two a layer. At the end, the best logit
    # and its id of 264 samples.
    sums = [c.operand_bytes for c in total.collectives if c.kind == "all-reduce"]
    assert sums[:65] == [16_777_216] * 65
    assert total.bytes_sent("all-reduce") >= 1_635_778_560  # 65 x 2 x 3/4
    assert sum(sums[65:]) < 16_384
    assert total.weight_bytes == 2 * (32 * LAYER_WEIGHTS + HEAD_WEIGHTS) // 4 == 3_752_329_216
    products = 2048 * 32 * LAYER_WEIGHTS + 264 * HEAD_WEIGHTS
    assert total.product_flops == 2 * products // 4
    attention = total.attention
    assert attention.decode_bytes == 258_000 * 2 * HEAD_TOKEN_BYTES == 8_454_144_000
    assert (attention.prefill_bytes, attention.handoff_bytes) == (268_435_456, 0)
    assert attention.flops == (8 * ALL_PAIRS + 8 * CHUNK_PAIRS) * PAIR_FLOPS
    # 4 products, 2 attention kernels, 2 sums, 2 norms and copies of their weights, rotation, merge,
    # SwiGLU, scatter, counter, and the last residual's addition, which a sum is in the way of.
    layer = 4 + 2 + 2 + 2 * 2 + 6
    assert total.launches == 32 * layer + len(always(program.thunks))
