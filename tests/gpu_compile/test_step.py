"""What XLA makes of the engine's step on H100s: nothing copied, what overlaps, what is launched.

The attention kernels are stand-ins (`stand_in.py`); all else is what the engine would run.
"""

from __future__ import annotations

import re

import pytest

from bench.h100.thunks import COLLECTIVES, descendants, launched, layers
from bench.hlo_counts import launches, until_done, work
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
from tests.gpu_compile.programs import MODELS, Program, program

MAX_LAUNCHES = 24  # of a layer, collectives included
EXCHANGES = 5  # of the sampler, over the ranks of a tensor-parallel group
BF16 = 2


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["none", "stream"])
def compiled(request: pytest.FixtureRequest, model: str) -> Program:
    return program(model, request.param)


def is_overlapped(compiled: Program) -> bool:
    return any(i.opcode == "call-start" for i in compiled.layer.body)


def test_the_pool_is_updated_in_place(compiled: Program):
    check_pool_in_place(compiled)


def test_no_kv_is_copied(compiled: Program):
    check_no_kv_copied(compiled)


def test_no_weight_is_copied(compiled: Program):
    check_no_weight_copied(compiled)


def test_collectives_are_those_designed(compiled: Program):
    """Two all-to-alls around prefill attention and one for hand-off, each of just its rows; two
    sums over the ranks of a group, where it has more than one."""
    dims, heads, rows = compiled.dims, compiled.dims.heads, compiled.bucket.rows
    all_rows = heads.groups * rows
    tokens = compiled.limits.handoff_pages * compiled.limits.geometry.page_tokens
    width = dims.spec.head_dim * BF16
    expected = {
        ("all-to-all", all_rows * (heads.q_per_device + 2 * heads.kv_per_device) * width),
        ("all-to-all", all_rows * heads.q_per_device * width),
        ("all-to-all", heads.groups * tokens * 2 * heads.kv_per_device * width),
    }
    layer = work(compiled.module, compiled.layer.body)
    moved = [c for c in layer.collectives if c.kind == "all-to-all"]
    assert len(moved) == 3
    assert {(c.kind, c.operand_bytes) for c in moved} == expected
    assert {c.group_size for c in moved} == {heads.groups}
    summed = [c for c in layer.collectives if c.kind != "all-to-all"]
    assert [(c.kind, c.operand_bytes, c.group_size) for c in summed] == [
        ("all-reduce", rows * dims.spec.hidden_size * BF16, heads.tp)
    ] * (2 if heads.tp > 1 else 0)


def test_hand_off_is_hidden(compiled: Program):
    check_hand_off_hidden(compiled)


def test_decode_overlaps_where_asked(compiled: Program):
    """`stream`: decode attention is on a stream of its own from before the first all-to-all, and
    nothing waits for it that does not also wait for the second. `none`: it is over before the first
    begins."""
    body = compiled.layer.body
    there, back, _ = all_to_alls(compiled)
    (prefill,) = attention(compiled, body, prefill_rows(compiled))
    (decode,) = attention(compiled, body, decode_rows(compiled))
    if not is_overlapped(compiled):
        assert body.index(decode) < body.index(there) < body.index(prefill)
        return
    (start,) = (i for i in body if i.opcode == "call-start")
    assert '_xla_stream_annotation="1"' in start.attributes
    assert decode in compiled.module.called(start)
    beside = until_done(body, start)
    assert there in beside and prefill in beside and back in beside
    joined = body.index(start) + 1 + len(beside)
    back_done = body.index(next(i for i in body if back.name in i.operands))
    assert not list(launches(compiled.module, body[joined:back_done]))  # empty if joined later


def test_both_modes_are_compiled(model: str):
    assert not is_overlapped(program(model, "none"))
    assert is_overlapped(program(model, "stream"))


def test_a_layer_is_few_launches(compiled: Program):
    """Counted in the HLO and, independently, in what XLA says that it launches."""
    layer = work(compiled.module, compiled.layer.body)
    assert layer.launches == len(launched(layers(compiled.thunks)))
    assert layer.launches <= MAX_LAUNCHES


def test_a_layer_multiplies_what_its_weights_say(compiled: Program):
    """2 * rows * weights: no product is done twice."""
    dims, heads = compiled.dims, compiled.dims.heads
    hidden, ffn = dims.spec.hidden_size, dims.spec.intermediate_size // heads.tp
    weights = hidden * heads.groups * dims.device_outputs
    weights += hidden * heads.groups * heads.q_per_device * dims.spec.head_dim
    weights += 3 * hidden * ffn
    layer = work(compiled.module, compiled.layer.body)
    assert layer.flops == 2 * compiled.bucket.rows * weights
    assert compiled.layer.trip_count == dims.spec.num_layers


def test_linear_layers_are_cuda_graphs(compiled: Program):
    """Every matrix product of a layer is captured; no attention kernel and no collective is."""
    body = layers(compiled.thunks)
    graphs = [thunk for thunk in body if thunk.kind == "kCommandBuffer"]
    captured = [thunk.kind for thunk in launched(graphs)]
    everything = [thunk.kind for thunk in launched(body)]
    assert captured.count("kCublasLtMatmul") == everything.count("kCublasLtMatmul") == 4
    assert everything.count("kCustomCall") == 2
    assert "kCustomCall" not in captured
    # A graph ends where a collective begins: before attention, at each sum, at the hand-off's end.
    assert 2 <= len(graphs) <= 4
    everywhere = [t for t in descendants(compiled.thunks) if t.kind == "kCommandBuffer"]
    assert not {thunk.kind for thunk in descendants(everywhere)} & {*COLLECTIVES, "kCustomCall"}


def test_the_host_is_not_waited_for(compiled: Program):
    """No transfer, no callback, and no branch or loop that the host decides: the layers' loop has a
    known trip count, and the sampler's branches and loops are inside graphs, on several ranks too.
    """
    assert not re.search(r"S\(5\)|callback| (infeed|outfeed|send|recv)\(", compiled.text)
    kinds = [t.kind for t in compiled.thunks if t.kind in ("kWhile", "kConditional")]
    assert kinds == ["kWhile"]
    in_layers = {thunk.kind for thunk in descendants(layers(compiled.thunks))}
    assert not in_layers & {"kWhile", "kConditional"}


def test_the_sampler_exchanges_few_numbers(compiled: Program):
    """Over the ranks of a group only, a few times, and never what is near a rank's logits."""
    heads, limits = compiled.dims.heads, compiled.limits
    found = work(compiled.module, compiled.module.entry).collectives
    over_ranks = [c for c in found if c.kind == "all-gather" and c.group_size == heads.tp]
    assert len(over_ranks) == (EXCHANGES if heads.tp > 1 else 0)
    samples = compiled.bucket.decode_rows + limits.max_segments
    logits_bytes = samples * compiled.dims.padded_vocab // heads.tp * 4
    assert all(c.operand_bytes < 0.02 * logits_bytes for c in over_ranks)
