"""What XLA makes of the engine's step on H100s: nothing copied, what overlaps, what is launched.

The attention kernels are stand-ins (`stand_in.py`); all else is what the engine would run.
"""

from __future__ import annotations

import re

import pytest

from bench.hlo_counts import Instruction, arrays, launches, until_done, work
from tests.gpu_compile.programs import MODELS, Program, program
from tests.gpu_compile.thunks import COLLECTIVES, descendants, launched, layers

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


def attention(compiled: Program, instructions, rows: int) -> list[Instruction]:
    """Attention kernels with that many rows among some instructions, calls looked into."""
    width = compiled.dims.spec.head_dim
    return [
        i
        for i in launches(compiled.module, instructions)
        if "mosaic_gpu" in i.attributes and arrays(i.shape) == [("bf16", (rows, width))]
    ]


def decode_rows(compiled: Program) -> int:
    heads = compiled.dims.heads
    return compiled.bucket.decode_rows * heads.groups * heads.q_per_device


def prefill_rows(compiled: Program) -> int:
    heads = compiled.dims.heads
    return heads.groups * compiled.bucket.rows * heads.q_per_device


def all_to_alls(compiled: Program) -> list[Instruction]:
    """There, back, hand-off: in the order of their launches."""
    return [
        i for i in compiled.layer.body if i.base == "all-to-all" and not i.opcode.endswith("-done")
    ]


def test_the_pool_is_updated_in_place(compiled: Program):
    assert compiled.pool_bytes > 15 << 30
    assert compiled.memory.alias_size_in_bytes >= compiled.pool_bytes
    # Activations, and the sampler's arrays, included.
    assert compiled.memory.temp_size_in_bytes < 0.02 * compiled.pool_bytes


def test_no_kv_is_copied(compiled: Program):
    """Nothing that is launched writes as much as one layer's KV, but the scatter into the pool."""
    layer_bytes = compiled.pool_bytes // compiled.dims.spec.num_layers
    written = [
        i
        for computation in compiled.module.computations.values()
        if any(i.base in ("while", "conditional") for i in computation)
        or computation is compiled.layer.body
        for i in launches(compiled.module, computation)
        if i.bytes >= layer_bytes
    ]
    (scatter,) = written
    assert scatter in compiled.layer.body
    opcodes = {i.opcode for i in compiled.module.called(scatter)}
    assert "scatter" in opcodes
    assert not [i for i in compiled.layer.body if i.base == "copy" and i.bytes > 4]


def test_no_weight_is_copied(compiled: Program):
    """Matrix products read a layer's weights in place, out of the stack of all layers'."""
    dims, heads = compiled.dims, compiled.dims.heads
    spec = dims.spec
    hidden, ffn = spec.hidden_size, spec.intermediate_size // heads.tp
    qkv, q_width = (
        heads.groups * dims.device_outputs,
        heads.groups * heads.q_per_device * spec.head_dim,
    )
    weights = {(qkv, hidden), (hidden, q_width), (2 * ffn, hidden), (hidden, ffn)}
    stacked = {("bf16", (spec.num_layers, *weight)) for weight in weights}
    readers = [i for i in compiled.module.entry if i.opcode == "parameter"]
    assert stacked <= {array for i in readers for array in arrays(i.shape)}
    for instruction in launches(compiled.module, compiled.layer.body):
        for _, shape in arrays(instruction.shape):
            assert tuple(size for size in shape if size != 1) not in weights, instruction.name


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
    """Its all-to-all runs beside matrix products."""
    hand_off = all_to_alls(compiled)[-1]
    assert hand_off.opcode == "all-to-all-start"
    beside = until_done(compiled.layer.body, hand_off)
    assert work(compiled.module, beside).flops >= 2 * compiled.bucket.rows * (
        2 * compiled.dims.spec.intermediate_size // compiled.dims.heads.tp
    ) * (compiled.dims.spec.hidden_size)


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
