"""The Hopper kernels as machine code: nothing spilled, all resources within an SM's, tensor cores
and TMA in use. `-rP` prints what each takes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.building_blocks import SMS
from pallas_kernels.decode_attention import decode_attention, decode_plan, decode_rows
from pallas_kernels.decode_kernel import DecodeShape, HeadRows
from pallas_kernels.mixed_attention import (
    STRETCHES,
    DecodeOperands,
    PrefillOperands,
    mixed_attention,
    num_counters,
)
from pallas_kernels.prefill_attention import num_tickets
from pallas_kernels.prefill_plan import PrefillPlan
from tests.gpu_compile.kernels import (
    MAX_REGISTERS,
    MAX_SHARED_BYTES,
    Kernel,
    compile_kernels,
    divided_plan,
)

ROWS, KV_HEADS, LAYERS = 64, 8, 32
COUNTING = r"ATOMG?\S*\.INC\S*\.STRONG\.GPU"  # the wrap-around increment of a counter


def check_resources(kernel: Kernel) -> None:
    print(kernel)
    assert kernel.spilled_bytes == 0
    assert kernel.registers * kernel.threads <= MAX_REGISTERS
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert "setmaxnreg ignored" not in kernel.log and "C7504" not in kernel.log


def check_instructions(kernel: Kernel) -> None:
    assert "HGMMA.64x64x16.F32.BF16" in kernel.sass
    assert "UTMALDG" in kernel.sass


def decode_operands(page_tokens: int, q_per_kv: int, head_dim: int) -> list:
    """Pages enough for 2**31 elements and more."""
    pages = 2**31 // (LAYERS * 2 * page_tokens * KV_HEADS * head_dim) + 1024
    shapes = [
        ((ROWS, KV_HEADS, q_per_kv, head_dim), jnp.bfloat16),
        ((ROWS, KV_HEADS, head_dim), jnp.bfloat16),
        ((ROWS, KV_HEADS, head_dim), jnp.bfloat16),
        ((LAYERS, 2, pages, page_tokens * KV_HEADS, head_dim), jnp.bfloat16),
        ((), jnp.int32),
        ((ROWS, 131_072 // page_tokens), jnp.int32),
        ((ROWS,), jnp.int32),
    ]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.parametrize(("page_tokens", "q_per_kv", "head_dim"), [(16, 8, 128), (128, 9, 64)])
def test_decode_in_two_launches(page_tokens, q_per_kv, head_dim, tmp_path, monkeypatch):
    operands = decode_operands(page_tokens, q_per_kv, head_dim)
    kernels = compile_kernels(decode_attention, operands, tmp_path, monkeypatch)
    assert kernels.keys() == {"decode_attention", "decode_merge"}
    for kernel in kernels.values():
        check_resources(kernel)
    check_instructions(kernels["decode_attention"])


def test_both_sides_in_one_launch(tmp_path, monkeypatch):
    """With registers moved from the warpgroup that copies to those that multiply."""
    page_tokens, q_per_kv, head_dim, tokens, stretches = 16, 5, 128, 2048, STRETCHES * SMS
    own = HeadRows(0, KV_HEADS, 1, inner=KV_HEADS)
    queries = HeadRows(0, KV_HEADS * q_per_kv, q_per_kv, inner=KV_HEADS)
    shape = DecodeShape(
        ROWS, KV_HEADS, 1, q_per_kv, head_dim, page_tokens, queries, own, own, stretches
    )

    def mixed(q, k, v, pool, layer, table, lens, qkv, plan, counters):
        q, k, v = (x.reshape(-1, head_dim) for x in (q, k, v))
        decode = DecodeOperands(decode_plan(lens, KV_HEADS, stretches), q, k, v, table, lens)
        prefill = PrefillOperands(qkv, PrefillPlan(*plan))
        return mixed_attention(
            shape, decode, prefill, pool, layer, counters, kv_heads=2, decode_sms=64
        )

    plan = divided_plan(tokens, 2 * q_per_kv, 512)
    counters = num_counters(stretches, num_tickets(plan, 2 * q_per_kv))
    operands = [
        *decode_operands(page_tokens, q_per_kv, head_dim),
        jax.ShapeDtypeStruct((tokens, 2 * q_per_kv + 4, head_dim), jnp.bfloat16),
        list(plan),
        jax.ShapeDtypeStruct((counters,), jnp.int32),
    ]
    kernels = compile_kernels(mixed, operands, tmp_path, monkeypatch)
    (kernel,) = kernels.values()
    check_resources(kernel)
    check_instructions(kernel)
    assert "USETMAXREG" in kernel.sass
    # The two queues' and both sides' merging's, each at the place of its taking or of its end.
    assert len(re.findall(COUNTING, kernel.sass)) >= 4


def test_decode_in_one_launch(tmp_path, monkeypatch):
    """The program that is done last with a row merges its parts."""
    page_tokens, q_per_kv, head_dim = 64, 4, 128
    own = HeadRows(0, KV_HEADS, 1, inner=KV_HEADS)
    queries = HeadRows(0, KV_HEADS * q_per_kv, q_per_kv, inner=KV_HEADS)
    shape = DecodeShape(ROWS, KV_HEADS, 1, q_per_kv, head_dim, page_tokens, queries, own, own)

    def decode(q, k, v, pool, layer, table, lens, tickets):
        plan = decode_plan(lens, KV_HEADS, SMS)
        q, k, v = (x.reshape(-1, head_dim) for x in (q, k, v))
        return decode_rows(shape, plan, q, k, v, pool, layer, table, lens, tickets)

    tickets = jax.ShapeDtypeStruct((SMS,), jnp.int32)
    operands = [*decode_operands(page_tokens, q_per_kv, head_dim), tickets]
    kernels = compile_kernels(decode, operands, tmp_path, monkeypatch)
    (kernel,) = kernels.values()
    check_resources(kernel)
    check_instructions(kernel)
    # The counter's wrap-around increment, ordered with what the program wrote before.
    assert re.search(COUNTING, kernel.sass)
