"""What every program of the step must keep, and where its parts are."""

from __future__ import annotations

from bench.h100.programs import Program
from bench.hlo_counts import Instruction, arrays, launches, until_done, work


def attention(compiled: Program, instructions, rows: int) -> list[Instruction]:
    """Attention kernels with that many rows among some instructions, calls looked into."""
    width = compiled.dims.spec.head_dim
    return [
        i
        for i in launches(compiled.module, instructions)
        if "mosaic_gpu" in i.attributes and arrays(i.shape) == [("bf16", (rows, width))]
    ]


def decode_rows(compiled: Program) -> int:
    """Rows of decode attention's result: one for each head, wherever decodes attend."""
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


def check_pool_in_place(compiled: Program) -> None:
    assert compiled.pool_bytes > 15 << 30
    assert compiled.memory.alias_size_in_bytes >= compiled.pool_bytes
    # Activations, and the sampler's arrays, included.
    assert compiled.memory.temp_size_in_bytes < 0.02 * compiled.pool_bytes


def check_no_kv_copied(compiled: Program) -> None:
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


def check_no_weight_copied(compiled: Program) -> None:
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


def check_hand_off_hidden(compiled: Program) -> None:
    """Its all-to-all, the last, runs beside matrix products."""
    hand_off = all_to_alls(compiled)[-1]
    assert hand_off.opcode == "all-to-all-start"
    beside = until_done(compiled.layer.body, hand_off)
    assert work(compiled.module, beside).flops >= 2 * compiled.bucket.rows * (
        2 * compiled.dims.spec.intermediate_size // compiled.dims.heads.tp
    ) * (compiled.dims.spec.hidden_size)
