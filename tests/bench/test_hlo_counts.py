"""Counts read out of compiled programs: a schedule written by hand, and a program of this machine's
compiler, both against arithmetic on paper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from bench.hlo_counts import _group_size, array_bytes, layer_loop, parse, until_done, work
from bench.hlo_weights import weight_bytes

# Two layers of: norm, product of 8 x 64 by 64 x 32 in a fusion, decode attention beside an
# all-to-all of 8 x 32 over two groups, another product by cuBLAS, a sum over two ranks.
SCHEDULE = """
HloModule step, is_scheduled=true

%product (p0: bf16[2,32,64], p1: s32[], p2: bf16[8,64]) -> bf16[8,32] {
  %p2 = bf16[8,64]{1,0} parameter(2)
  %p0 = bf16[2,32,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %weight = bf16[1,32,64]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,32,64}
  %view = bf16[32,64]{1,0} bitcast(%weight)
  ROOT %dot = bf16[8,32]{1,0} dot(%p2, %view), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%decode (p3: bf16[8,32]) -> bf16[8,32] {
  %p3 = bf16[8,32]{1,0} parameter(0)
  ROOT %kernel = bf16[8,32]{1,0} custom-call(%p3), custom_call_target="mosaic_gpu_v2"
}

%layer (carry: (s32[], bf16[8,64], bf16[2,32,64])) -> (s32[], bf16[8,64], bf16[2,32,64]) {
  %carry = (s32[], bf16[8,64]{1,0}, bf16[2,32,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[8,64]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[2,32,64]{2,1,0} get-tuple-element(%carry), index=2
  %norm = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%norm_computation
  %q = bf16[8,32]{1,0} fusion(%w, %i, %norm), kind=kCustom, calls=%product
  %start = ((bf16[8,32]{1,0}), bf16[8,32]{1,0}) call-start(%q), to_apply=%decode
  %send = ((bf16[8,32]{1,0}), bf16[8,32]{1,0}) all-to-all-start(%q), replica_groups={{0,1},{2,3}}
  %sent = bf16[8,32]{1,0} all-to-all-done(%send)
  %done = bf16[8,32]{1,0} call-done(%start)
  %out = (bf16[8,64]{1,0}, s8[1024]{0}) custom-call(%done, %w), """ + (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    """
  %y = bf16[8,64]{1,0} get-tuple-element(%out), index=0
  %sum = bf16[8,64]{1,0} all-reduce(%y), replica_groups=mesh['sp'=2,'tp'=2] {'tp'}, to_apply=%add
  %next = s32[] fusion(%i), kind=kLoop, calls=%increment
  ROOT %result = (s32[], bf16[8,64]{1,0}, bf16[2,32,64]{2,1,0}) tuple(%next, %sum, %w)
}

ENTRY %main (x0: bf16[8,64], w0: bf16[2,32,64]) -> bf16[8,64] {
  %x0 = bf16[8,64]{1,0} parameter(0)
  %w0 = bf16[2,32,64]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %copy = bf16[8,64]{1,0} copy(%x0)
  %init = (s32[], bf16[8,64]{1,0}, bf16[2,32,64]{2,1,0}) tuple(%zero, %copy, %w0)
  %loop = (s32[], bf16[8,64]{1,0}, bf16[2,32,64]{2,1,0}) while(%init), condition=%c, body=%layer"""
    ', backend_config={"known_trip_count":{"n":"2"}}'
    """
  ROOT %last = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}

%norm_computation (p4: bf16[8,64]) -> bf16[8,64] {
  ROOT %p4 = bf16[8,64]{1,0} parameter(0)
}

%increment (p5: s32[]) -> s32[] {
  ROOT %p5 = s32[] parameter(0)
}
"""
)


def test_a_layer_written_by_hand():
    module = parse(SCHEDULE)
    loop = layer_loop(module)
    layer = work(module, loop.body)
    assert loop.trip_count == 2
    assert layer.flops == 2 * (2 * 8 * 32 * 64)
    # norm, two products, attention, counter; all-to-all and sum.
    assert layer.launches == 5 + 2
    moved, summed = layer.collectives
    assert (moved.kind, moved.operand_bytes, moved.group_size) == ("all-to-all", 8 * 32 * 2, 2)
    assert moved.asynchronous and not summed.asynchronous
    assert moved.bytes_sent == 8 * 32 * 2 // 2
    assert (summed.kind, summed.operand_bytes, summed.group_size) == ("all-reduce", 8 * 64 * 2, 2)
    assert summed.bytes_sent == 8 * 64 * 2


def test_an_iteration_is_its_layers_and_what_is_around_them():
    module = parse(SCHEDULE)
    layer, iteration = work(module, layer_loop(module).body), work(module, module.entry)
    assert iteration.flops == 2 * layer.flops
    assert iteration.launches == 2 * layer.launches + 1  # the copy in front
    assert len(iteration.collectives) == 4


def test_weights_that_products_read():
    """Of each of the two layers: in the fusion its 32 x 64 of the stack, by cuBLAS the whole stack
    of 2 x 32 x 64, as this schedule has it; two bytes each. What was computed before is none, nor
    is the sum that the loop carries on."""
    assert weight_bytes(parse(SCHEDULE)) == 2 * (32 * 64 * 2 + 2 * 32 * 64 * 2)
    from_carry = SCHEDULE.replace("custom-call(%done, %w)", "custom-call(%x, %w)")
    assert weight_bytes(parse(from_carry)) == weight_bytes(parse(SCHEDULE))
    from_program = SCHEDULE.replace("custom-call(%done, %w)", "custom-call(%done, %q)")
    assert weight_bytes(parse(from_program)) == 2 * (32 * 64 * 2)


def test_what_runs_beside_an_asynchronous_call():
    body = layer_loop(parse(SCHEDULE)).body
    (start,) = (i for i in body if i.opcode == "call-start")
    assert [i.name for i in until_done(body, start)] == ["send", "sent"]
    (norm,) = (i for i in body if i.name == "norm")
    with pytest.raises(ValueError, match="norm is never done"):
        until_done(body, norm)


def test_a_program_of_this_compiler():
    """Sixteen rows through three stacked 48 x 48 matrices."""

    @jax.jit
    def run(x, weights):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    compiled = run.lower(jnp.ones((16, 48)), jnp.ones((3, 48, 48))).compile()
    module = parse(compiled.as_text() or "")
    assert layer_loop(module).trip_count == 3
    assert work(module, layer_loop(module).body).flops == 2 * 16 * 48 * 48
    assert work(module, module.entry).flops == 3 * 2 * 16 * 48 * 48
    assert weight_bytes(module) == 3 * 48 * 48 * 4


def test_shapes_and_groups():
    assert array_bytes("(bf16[4,512]{1,0}, s32[], pred[3])") == 4 * 512 * 2 + 4 + 3
    assert array_bytes("f8e4m3fn[16]{0}") == 16
    assert _group_size("replica_groups={{0,2},{1,3}}") == 2
    assert _group_size("replica_groups=[2,4]<=[8]") == 4
    with pytest.raises(ValueError, match="replica_groups not understood"):
        _group_size("channel_id=1")


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("module @jit_step {}")
    with pytest.raises(ValueError, match="no loop of known trip count"):
        layer_loop(parse("ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}"))
