"""The prefill kernel as machine code. `-rP` prints what it takes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.prefill_attention import num_tickets, prefill_attention
from pallas_kernels.prefill_plan import ITEM_FIELDS, PrefillPlan, max_items
from tests.gpu_compile.kernels import RUNS, SEGMENTS, compile_kernels, divided_plan
from tests.gpu_compile.test_kernels import COUNTING, check_resources

TOKENS, LAYERS = 8192, 32


def prefill_operands(page_tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> list:
    """page_tokens: of a page in prefill layout. Pages enough for 2**31 elements and more."""
    page_rows = page_tokens * kv_heads
    pages = 2**31 // (LAYERS * 2 * page_rows * head_dim) + 1024
    return [
        jax.ShapeDtypeStruct(*shape)
        for shape in (
            ((TOKENS, q_heads + 2 * kv_heads, head_dim), jnp.bfloat16),
            ((LAYERS, 2, pages, page_rows, head_dim), jnp.bfloat16),
            ((), jnp.int32),
            ((max_items(TOKENS, RUNS), ITEM_FIELDS), jnp.int32),
            ((), jnp.int32),
            ((RUNS, 2), jnp.int32),
            ((SEGMENTS, 131_072 // page_tokens), jnp.int32),
        )
    ]


@pytest.mark.parametrize(
    ("page_tokens", "q_heads", "kv_heads", "head_dim"),
    [
        (64, 8, 2, 128),  # Llama-3.1-8B on four devices, pages of 16 tokens
        (256, 10, 2, 128),  # Qwen3-14B on four, of 64
        (16, 32, 8, 128),  # one device, of 16
        (512, 3, 1, 64),  # SmolLM2 on three, of 128 and more
    ],
)
def test_prefill_in_one_launch(page_tokens, q_heads, kv_heads, head_dim, tmp_path, monkeypatch):
    def prefill(qkv, pool, layer, tickets, *plan):
        plan = PrefillPlan(*plan)
        return prefill_attention(qkv, pool, layer, plan, kv_heads=kv_heads, tickets=tickets)

    plan = divided_plan(TOKENS, q_heads, 131_072 // page_tokens)
    tickets = jax.ShapeDtypeStruct((num_tickets(plan, q_heads),), jnp.int32)
    operands = prefill_operands(page_tokens, q_heads, kv_heads, head_dim)[:3]
    operands += [tickets, *plan]
    (kernel,) = compile_kernels(prefill, operands, tmp_path, monkeypatch).values()
    assert kernel.name == "prefill_attention"
    check_resources(kernel)
    # Queries by keys and weights by values, over the depth of one and of the other.
    steps = kernel.sass.count("HGMMA.64x128x16.F32.BF16"), kernel.sass.count("HGMMA")
    assert steps == ((16, 16) if head_dim == 128 else (4, 12))
    assert "UTMALDG" in kernel.sass and "UTMASTG" in kernel.sass
    assert "USETMAXREG.TRY_ALLOC" in kernel.sass and "USETMAXREG.DEALLOC" in kernel.sass
    assert re.search(COUNTING, kernel.sass)


@pytest.mark.parametrize("divided", [True, False])
def test_prefill_without_counters(divided, tmp_path, monkeypatch):
    """Another launch merges what the plan may have divided."""

    def prefill(qkv, pool, layer, *plan):
        return prefill_attention(qkv, pool, layer, PrefillPlan(*plan), kv_heads=2)

    operands = prefill_operands(64, 8, 2, 128)
    if divided:
        operands[3:] = divided_plan(TOKENS, 8, 2048)
    kernels = compile_kernels(prefill, operands, tmp_path, monkeypatch)
    assert kernels.keys() == {"prefill_attention", *(["prefill_merge"] if divided else [])}
    for kernel in kernels.values():
        check_resources(kernel)
