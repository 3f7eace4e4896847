"""The attention stage's kernels on GPUs that are not Hopper: see `pallas_kernels.triton`."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from conflux_jax.models.attention import (
    AttentionInputs,
    DecodeInputs,
    PrefillInputs,
    decode_qkv,
)
from conflux_jax.models.heads import HeadLayout
from pallas_kernels.prefill_plan import ROW_GRAIN, plan_prefill

LEAST_CAPABILITY = 8.0  # Ampere: tensor cores for bfloat16


@dataclass(frozen=True)
class TritonKernels:
    """Satisfies `AttentionKernels`. Decode attention is two launches, behind XLA's own that gather
    its queries; so it has no stream of its own."""

    streams: bool = False

    def planned(self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout):
        if (prefill := inputs.prefill) is None:
            return inputs
        plan = plan_prefill(prefill.segments, prefill.received, heads.groups)
        # Behind a barrier: not made again in every layer.
        return inputs._replace(prefill=prefill._replace(plan=lax.optimization_barrier(plan)))

    def decode(self, sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout):
        from pallas_kernels.triton.attention import decode_attention

        q, k, v = decode_qkv(sent, inputs.context_lens.shape[0], heads)
        out, _ = decode_attention(q, k, v, pool, layer, inputs.page_table, inputs.context_lens)
        return out.reshape(q.shape[0], -1)

    def prefill(self, received, pool, layer, inputs: PrefillInputs, heads: HeadLayout):
        from pallas_kernels.triton.attention import prefill_attention

        tokens, kv_heads = received.shape[0], heads.kv_per_device
        received = jnp.pad(received, [(0, -tokens % ROW_GRAIN), (0, 0), (0, 0)])
        out, _ = prefill_attention(received, pool, layer, inputs.plan, kv_heads=kv_heads)
        return out[:tokens]


def triton_refusal(device: Any) -> str | None:
    """What the kernels would need of a device, and of this Python, and do not find."""
    capability = str(getattr(device, "compute_capability", ""))
    is_nvidia = re.fullmatch(r"\d+\.\d+", capability) is not None
    if not is_nvidia or float(capability) < LEAST_CAPABILITY:
        return f"an NVIDIA GPU, Ampere or newer, and this is {device.device_kind!r}"
    if not is_installed():
        return "jax-triton (the extras cuda12 and cuda13 have it), and it is not installed"
    return None


def is_installed() -> bool:
    return importlib.util.find_spec("jax_triton") is not None
