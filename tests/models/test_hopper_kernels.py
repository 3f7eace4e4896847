"""The engine's seam to the Hopper kernels: which device gets them, and that they find their heads.

The latter interpreted, against the oracle; the pool's other pages are NaN.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from conflux_jax.config import ConfigError, ExecutionConfig
from conflux_jax.models import triton_kernels
from conflux_jax.models.attention import AttentionInputs, DecodeInputs, XlaKernels
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.hopper_kernels import (
    HopperKernels,
    attention_options,
    choose_kernels,
    decode_sms_of,
    with_decode_sms,
)
from conflux_jax.models.triton_kernels import TritonKernels
from pallas_kernels.reference import attend
from tests.kernels.interpreter import (
    QUICK,
    PagedPool,
    assert_close,
    bfloat16_normal,
    interpreted,
    page_table,
)

H100 = SimpleNamespace(
    compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3", platform="gpu"
)
A100 = SimpleNamespace(compute_capability="8.0", device_kind="NVIDIA A100-SXM4-80GB")
T4 = SimpleNamespace(compute_capability="7.5", device_kind="Tesla T4")
MI250 = SimpleNamespace(compute_capability="gfx90a", device_kind="AMD Instinct MI250")
CPU = SimpleNamespace(device_kind="cpu")


def test_hopper_devices_get_the_kernels():
    assert choose_kernels(None, H100, jnp.bfloat16, 128, 16) == HopperKernels()
    assert choose_kernels("pallas", H100, jnp.bfloat16, 64, 128) == HopperKernels()
    assert choose_kernels("xla", H100, jnp.bfloat16, 128, 16) == XlaKernels()


@pytest.mark.parametrize(("overlap", "expected"), [("fused", 64), ("stream", 64), ("none", None)])
def test_multiprocessors_are_divided_where_both_phases_run_at_once(overlap, expected):
    def options(decode_sms: int | None):
        execution = ExecutionConfig(overlap=overlap, decode_sms=decode_sms)
        return attention_options(execution, H100, jnp.bfloat16, 128, 16)

    assert decode_sms_of(options(None)) == expected
    if expected is not None:
        assert decode_sms_of(options(48)) == 48
        assert with_decode_sms(options(None), 48) == options(48)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "page_tokens", "message"),
    [
        (CPU, jnp.bfloat16, 64, 16, "a Hopper GPU .H100, H200., and this is 'cpu'"),
        (A100, jnp.bfloat16, 64, 16, "a Hopper GPU .*'NVIDIA A100-SXM4-80GB'"),
        (H100, jnp.float32, 64, 16, "dtype bfloat16, and this is float32"),
        (H100, jnp.bfloat16, 96, 16, "a head_dim of 64 or 128, and this model's is 96"),
        (H100, jnp.bfloat16, 64, 24, "page_tokens: must be 16, 32 or a multiple of 64, got 24"),
    ],
)
def test_others_get_xla(device, dtype, head_dim, page_tokens, message, monkeypatch):
    monkeypatch.setattr(triton_kernels, "is_installed", lambda: False)
    assert choose_kernels(None, device, dtype, head_dim, page_tokens) == XlaKernels()
    with pytest.raises(ConfigError, match=f"attention: pallas needs .*{message}"):
        choose_kernels("pallas", device, dtype, head_dim, page_tokens)


def test_older_gpus_get_triton_where_it_is_installed(monkeypatch):
    chosen = partial(choose_kernels, dtype=jnp.bfloat16, head_dim=64, page_tokens=16)
    monkeypatch.setattr(triton_kernels, "is_installed", lambda: False)
    assert chosen(None, A100) == XlaKernels()
    with pytest.raises(ConfigError, match=r"attention: triton needs jax-triton .*not installed"):
        chosen("triton", A100)
    monkeypatch.setattr(triton_kernels, "is_installed", lambda: True)
    assert chosen(None, A100) == chosen("triton", A100) == TritonKernels()
    assert chosen("triton", H100) == TritonKernels()
    assert chosen("xla", A100) == XlaKernels()
    for device, kind in ((T4, "Tesla T4"), (CPU, "cpu"), (MI250, "AMD Instinct MI250")):
        assert chosen(None, device) == XlaKernels()
        with pytest.raises(ConfigError, match=f"an NVIDIA GPU, Ampere or newer, .*{kind}"):
            chosen("triton", device)
    with pytest.raises(ConfigError, match="attention: triton needs dtype bfloat16"):
        choose_kernels("triton", A100, jnp.float32, 64, 16)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("groups", "kv_per_device", "q_per_kv", "replicas"),
    # Plainly split; a KV head on two devices each.
    [pytest.param(2, 2, 3, 1, marks=QUICK), (4, 1, 2, 2)],
)
def test_decode_finds_its_heads(groups, kv_per_device, q_per_kv, replicas):
    heads = HeadLayout(groups, 1, kv_per_device, q_per_kv, replicas, (), ())
    contexts, rows, page_tokens, head_dim = [20, 0], 5, 16, 64
    num_q, num_kv, kv_heads = heads.q_per_device, kv_per_device, heads.kv_per_rank
    rng = np.random.default_rng(0)
    sent = bfloat16_normal(rng, groups, rows, num_q + 2 * num_kv, head_dim)
    for replica in range(replicas):  # devices with the same KV head have the same keys
        sent[replica::replicas, :, num_q:] = sent[::replicas, :, num_q:]
    pool = PagedPool(rng, 6, page_tokens * kv_heads, head_dim)
    past = [bfloat16_normal(rng, 2, n, kv_heads, head_dim) for n in contexts]
    table = page_table([pool.store(k, v, page_tokens) for k, v in past], 4)
    lens, no_writes = jnp.asarray(contexts, jnp.int32), jnp.zeros(2, jnp.int32)
    decode = DecodeInputs(jnp.int32(2), lens, table, no_writes)
    kernels = HopperKernels(programs=2, interpretable=True)

    def run(sent, pool, layer, decode):
        planned = kernels.planned(AttentionInputs(decode, None, None), heads, heads).decode
        assert planned is not None
        return kernels.decode(sent, pool, layer, planned, heads)

    out = interpreted(run, jnp.asarray(sent, jnp.bfloat16), *pool.operands, decode)
    for row, sequence in enumerate(past):
        own = sent[::replicas, row, num_q:].reshape(-1, 2, num_kv, head_dim)
        own_k, own_v = own[:, 0].reshape(-1, head_dim), own[:, 1].reshape(-1, head_dim)
        k = np.concatenate([sequence[0], own_k[None]])
        v = np.concatenate([sequence[1], own_v[None]])
        q = sent[:, row, :num_q].reshape(-1, head_dim)
        assert_close(out[row].reshape(-1, head_dim), attend(q, k, v))
