"""What XLA makes of the ablations, of uniform tensor parallelism and of decode iterations on H100s:
they keep what the scheme's programs keep, and differ in what they are meant to."""

from __future__ import annotations

import pytest

from bench.h100.programs import Program
from bench.h100.thunks import COLLECTIVES, descendants, launched, layers
from bench.hlo_counts import Collective, until_done, work
from tests.gpu_compile.checks import (
    all_to_alls,
    attention,
    check_hand_off_hidden,
    check_no_kv_copied,
    check_no_weight_copied,
    check_pool_in_place,
    decode_rows,
    prefill_rows,
)
from tests.gpu_compile.programs import ablation, decode_only

PROGRAMS = {
    "spread_decode": lambda: ablation("spread_decode"),
    "no_batching": lambda: ablation("no_batching"),
    "uniform_tp": lambda: ablation("uniform_tp"),
    "decode": lambda: decode_only(handoff=False),
    "decode_handoff": lambda: decode_only(handoff=True),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def compiled(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]()


def collectives(compiled: Program) -> tuple[Collective, ...]:
    """Of a layer."""
    return work(compiled.module, compiled.layer.body).collectives


def test_nothing_large_is_copied(compiled: Program):
    check_pool_in_place(compiled)
    check_no_kv_copied(compiled)
    check_no_weight_copied(compiled)


def test_launches_are_those_that_xla_names(compiled: Program):
    layer = work(compiled.module, compiled.layer.body)
    assert layer.launches == len(launched(layers(compiled.thunks)))
    assert compiled.layer.trip_count == compiled.dims.spec.num_layers


def test_products_are_in_cuda_graphs(compiled: Program):
    """All of a layer's; no attention kernel and no collective."""
    body = layers(compiled.thunks)
    graphs = [thunk for thunk in body if thunk.kind == "kCommandBuffer"]
    captured = [thunk.kind for thunk in launched(graphs)]
    everything = [thunk.kind for thunk in launched(body)]
    products = 8 if compiled.limits.apart else 4
    assert captured.count("kCublasLtMatmul") == everything.count("kCublasLtMatmul") == products
    everywhere = [t for t in descendants(compiled.thunks) if t.kind == "kCommandBuffer"]
    assert not {thunk.kind for thunk in descendants(everywhere)} & {*COLLECTIVES, "kCustomCall"}


def test_spread_decodes_ride_the_all_to_alls():
    """Both attend between the two, at the same time, each for all groups; nothing is handed over
    and nothing else is sent."""
    compiled = ablation("spread_decode")
    body = compiled.layer.body
    there, back = all_to_alls(compiled)
    assert [c.kind for c in collectives(compiled)] == ["all-to-all"] * 2
    (prefill,) = attention(compiled, body, prefill_rows(compiled))
    (decode,) = attention(compiled, body, decode_rows(compiled))
    (start,) = (i for i in body if i.opcode == "call-start")
    assert decode in compiled.module.called(start)
    assert prefill in until_done(body, start)
    assert body.index(there) < body.index(start) < body.index(prefill) < body.index(back)


def test_linear_layers_apart_are_done_twice():
    """Each of the four products for 64 rows and for 448; attention and its collectives are the
    scheme's."""
    compiled, scheme = ablation("no_batching"), ablation("scheme")
    body = compiled.layer.body
    products = [work(compiled.module, (i,)).flops for i in body if i.base == "fusion"]
    # Of the weights of 4096 x 6144, 4096 x 4096, 4096 x 28,672 and 14,336 x 4096.
    weights = (25_165_824, 16_777_216, 117_440_512, 58_720_256)
    expected = [2 * rows * weight for rows in (64, 448) for weight in weights]
    assert sorted(flops for flops in products if flops) == sorted(expected)
    layer = work(compiled.module, body)
    assert [(c.kind, c.operand_bytes) for c in layer.collectives] == [
        (c.kind, c.operand_bytes) for c in collectives(scheme)
    ]
    check_hand_off_hidden(compiled)


def test_uniform_tensor_parallelism_sums_twice_a_layer():
    """No all-to-all: both attend where the heads are, decodes on their own stream."""
    compiled = ablation("uniform_tp")
    body = compiled.layer.body
    hidden_bytes = 2048 * 4096 * 2
    assert [(c.kind, c.operand_bytes, c.group_size) for c in collectives(compiled)] == [
        ("all-reduce", hidden_bytes, 4)
    ] * 2
    (start,) = (i for i in body if i.opcode == "call-start")
    (prefill,) = attention(compiled, body, prefill_rows(compiled))
    assert prefill in until_done(body, start)


def test_a_decode_iteration_talks_only_to_hand_over():
    alone, handing = decode_only(handoff=False), decode_only(handoff=True)
    assert collectives(alone) == ()
    (moved,) = collectives(handing)
    # 64 pages of 16 tokens for each of four groups, keys and values of two heads of 128.
    assert (moved.kind, moved.operand_bytes) == ("all-to-all", 4 * 1024 * 2 * 2 * 128 * 2)
    check_hand_off_hidden(handing)
    for compiled in (alone, handing):
        kernels = attention(compiled, compiled.layer.body, decode_rows(compiled))
        assert len(kernels) == 1
