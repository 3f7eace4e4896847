"""The attention stage's kernels on Hopper, and which kernels a device gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from conflux_jax.config import ConfigError
from conflux_jax.models.attention import (
    AttentionInputs,
    AttentionKernels,
    DecodeInputs,
    PrefillInputs,
    XlaKernels,
)
from conflux_jax.models.heads import HeadLayout
from pallas_kernels.building_blocks import HEAD_DIMS, SMS, check_page_tokens
from pallas_kernels.decode_attention import decode_plan, decode_rows
from pallas_kernels.decode_kernel import DecodeShape, HeadRows

HOPPER = "9.0"  # compute capability


class DecodePlan(NamedTuple):
    """stretches: which blocks each program attends to. tickets: counters in device memory, which
    all layers use, one after the other; None where the merging is another launch's."""

    stretches: Int[Array, "programs fields"]
    tickets: Int[Array, " programs"] | None


@dataclass(frozen=True)
class HopperKernels:
    """Satisfies `AttentionKernels`. programs: of a launch, one an SM. interpretable: for tests on a
    CPU, see `pallas_kernels.building_blocks`; then decode attention takes two launches."""

    programs: int = SMS
    interpretable: bool = False

    @property
    def streams(self) -> bool:
        return True

    def planned(self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout):
        if inputs.decode is None:
            return inputs
        lens = inputs.decode.context_lens
        stretches = decode_plan(lens, decode_heads.kv_per_rank, self.programs)
        stretches = lax.optimization_barrier(stretches)  # made once, not in every layer
        tickets = None
        if not self.interpretable:
            # Behind a barrier, so that these zeros never share memory with any others.
            tickets = lax.optimization_barrier(jnp.zeros(self.programs, jnp.int32))
        plan = DecodePlan(stretches, tickets)
        return inputs._replace(decode=inputs.decode._replace(plan=plan))

    def decode(self, sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout):
        shape = self._decode_shape(sent, pool, inputs.context_lens.shape[0], heads)
        rows = sent.reshape(-1, sent.shape[3])
        stretches, tickets = inputs.plan
        table, lens = inputs.page_table, inputs.context_lens
        out, _ = decode_rows(shape, stretches, rows, rows, rows, pool, layer, table, lens, tickets)
        return out.reshape(shape.num_rows, -1)

    def _decode_shape(self, sent, pool, num_rows: int, heads: HeadLayout) -> DecodeShape:
        """Heads of a row lie `[group][queries | keys | values]`. Where KV heads are scarce, several
        groups have the same one, each with a part of its queries."""
        _, all_rows, qkv_heads, head_dim = sent.shape
        group_rows = all_rows * qkv_heads

        def rows(first: int, per_head: int) -> HeadRows:
            return HeadRows(
                first,
                per_row=qkv_heads,
                per_head=per_head,
                inner=heads.kv_per_device,
                outer=heads.replicas * group_rows,
                per_part=group_rows,
            )

        return DecodeShape(
            num_rows,
            heads.kv_per_rank,
            parts=heads.replicas,
            part_rows=heads.q_per_kv,
            head_dim=head_dim,
            page_tokens=pool.shape[3] // heads.kv_per_rank,
            q=rows(0, heads.q_per_kv),
            k=rows(heads.q_per_device, 1),
            v=rows(heads.q_per_device + heads.kv_per_device, 1),
            programs=self.programs,
            interpretable=self.interpretable,
        )

    def prefill(self, received, pool, layer, inputs: PrefillInputs, heads: HeadLayout):
        return XlaKernels().prefill(received, pool, layer, inputs, heads)


def choose_kernels(
    attention: str | None, device: Any, dtype: Any, head_dim: int, page_tokens: int
) -> AttentionKernels:
    """attention: `pallas`, `xla`, or None for the kernels where the device and the model allow it.
    page_tokens: of a page in decode layout. Raises ConfigError where `pallas` cannot work."""
    refusal = _refusal(device, dtype, head_dim, page_tokens)
    if attention == "pallas" and refusal:
        raise ConfigError(f"attention: pallas needs {refusal}. Use xla")
    return XlaKernels() if attention == "xla" or refusal else HopperKernels()


def _refusal(device: Any, dtype: Any, head_dim: int, page_tokens: int) -> str | None:
    """What the kernels would need and do not find."""
    if getattr(device, "compute_capability", None) != HOPPER:
        return f"a Hopper GPU (H100, H200), and this is {device.device_kind!r}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"dtype bfloat16, and this is {jnp.dtype(dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"a head_dim of 64 or 128, and this model's is {head_dim}"
    try:
        check_page_tokens(page_tokens)
    except ValueError as error:
        return f"other {error}"
    return None
