"""The attention stage's kernels on Hopper, and which kernels a device gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from conflux_jax.config import ConfigError, ExecutionConfig
from conflux_jax.models.attention import (
    AttentionInputs,
    AttentionKernels,
    AttentionOptions,
    DecodeInputs,
    PrefillInputs,
    XlaKernels,
)
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.triton_kernels import TritonKernels, triton_refusal
from pallas_kernels.building_blocks import HEAD_DIMS, SMS, check_page_tokens
from pallas_kernels.decode_attention import decode_plan, decode_rows
from pallas_kernels.decode_kernel import DecodeShape, HeadRows
from pallas_kernels.mixed_attention import (
    STRETCHES,
    DecodeOperands,
    PrefillOperands,
    mixed_attention,
    num_counters,
)
from pallas_kernels.prefill_attention import PrefillTuning, num_tickets, prefill_attention
from pallas_kernels.prefill_plan import ROW_GRAIN, PrefillPlan, divide_keys, plan_prefill

HOPPER = "9.0"  # compute capability
DECODE_SMS = 64  # where neither config nor profile says: a guess


class DecodePlan(NamedTuple):
    """stretches: which blocks each program attends to. tickets: counters in device memory, which
    all layers use, one after the other; None where another launch merges."""

    stretches: Int[Array, "programs fields"]
    tickets: Int[Array, " programs"] | None


class PlannedPrefill(NamedTuple):
    """What prefill attention works on, and how many programs do. tickets: as `DecodePlan`'s, of its
    own; None also where the launch has other counters."""

    plan: PrefillPlan
    programs: int
    tickets: Int[Array, " tickets"] | None


@dataclass(frozen=True)
class HopperKernels:
    """Satisfies `FusedKernels`.

    programs: of a launch, one an SM. decode_sms: of these, how many decode attention has to itself
    where prefill attention runs at the same time, and has the others; 0: each has all, one after
    the other. fused: `mixed` will be called for both. interpretable: for tests on a CPU, see
    `pallas_kernels.building_blocks`; then decode attention takes two launches, and nothing is
    fused."""

    programs: int = SMS
    decode_sms: int = 0
    fused: bool = False
    interpretable: bool = False

    @property
    def streams(self) -> bool:
        return True

    def planned(self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout):
        decode, prefill = inputs.decode, inputs.prefill
        both = decode is not None and prefill is not None
        divided = self.decode_sms if both else 0
        fused = self.fused and both and decode_heads == heads
        prefill_tickets = 0
        if prefill is not None:
            programs = self.programs - (0 if fused else divided)
            plan = plan_prefill(prefill.segments, prefill.received, heads.groups)
            plan = divide_keys(plan, heads.q_per_device, programs)
            prefill_tickets = num_tickets(plan, heads.q_per_device)
            counts = not fused and prefill_tickets and not self.interpretable
            tickets = jnp.zeros(prefill_tickets, jnp.int32) if counts else None
            plan, tickets = _made_once((plan, tickets))
            prefill = prefill._replace(plan=PlannedPrefill(plan, programs, tickets))
        if decode is not None:
            programs = STRETCHES * self.programs if fused else divided or self.programs
            counters = num_counters(programs, prefill_tickets) if fused else programs
            kv_heads = decode_heads.kv_per_rank
            stretches = decode_plan(decode.context_lens, kv_heads, programs)
            tickets = None if self.interpretable else jnp.zeros(counters, jnp.int32)
            decode = decode._replace(plan=_made_once(DecodePlan(stretches, tickets)))
        return inputs._replace(decode=decode, prefill=prefill)

    def decode(self, sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout):
        stretches, tickets = inputs.plan
        num_rows, programs = inputs.context_lens.shape[0], stretches.shape[0]
        shape = self._decode_shape(sent, pool, num_rows, programs, heads)
        rows = sent.reshape(-1, sent.shape[3])
        table, lens = inputs.page_table, inputs.context_lens
        out, _ = decode_rows(shape, stretches, rows, rows, rows, pool, layer, table, lens, tickets)
        return out.reshape(shape.num_rows, -1)

    def mixed(
        self,
        sent,
        received,
        pool,
        layer,
        decode: DecodeInputs,
        prefill: PrefillInputs,
        heads: HeadLayout,
    ):
        stretches, counters = decode.plan
        num_rows, tokens = decode.context_lens.shape[0], received.shape[0]
        shape = self._decode_shape(sent, pool, num_rows, stretches.shape[0], heads)
        rows = sent.reshape(-1, sent.shape[3])
        results = mixed_attention(
            shape,
            DecodeOperands(stretches, rows, rows, rows, decode.page_table, decode.context_lens),
            PrefillOperands(_padded(received), prefill.plan.plan),
            pool,
            layer,
            counters,
            kv_heads=heads.kv_per_device,
            decode_sms=self.decode_sms,
            programs=self.programs,
        )
        return results.decode.reshape(num_rows, -1), results.prefill[:tokens]

    def _decode_shape(
        self, sent, pool, num_rows: int, programs: int, heads: HeadLayout
    ) -> DecodeShape:
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
            programs=programs,
            interpretable=self.interpretable,
        )

    def prefill(self, received, pool, layer, inputs: PrefillInputs, heads: HeadLayout):
        plan, programs, tickets = inputs.plan
        tokens, kv_heads = received.shape[0], heads.kv_per_device
        tuning = PrefillTuning(programs, interpretable=self.interpretable)
        rows = _padded(received)
        out, _ = prefill_attention(
            rows, pool, layer, plan, kv_heads=kv_heads, tuning=tuning, tickets=tickets
        )
        return out[:tokens]


def _padded(received):
    """To a number of rows that the kernels can have."""
    return jnp.pad(received, [(0, -received.shape[0] % ROW_GRAIN), (0, 0), (0, 0)])


def _made_once(plan: Any) -> Any:
    """Behind a barrier: not made again in every layer, and no zeros that share memory with any
    others, which counters may not."""
    return lax.optimization_barrier(plan)


def attention_options(
    execution: ExecutionConfig, device: Any, dtype: Any, head_dim: int, page_tokens: int
) -> AttentionOptions:
    """How the attention stage runs on a device. Raises ConfigError for what cannot work there."""
    kernels = choose_kernels(execution.attention, device, dtype, head_dim, page_tokens)
    options = AttentionOptions.make(execution.overlap, device.platform, kernels)
    if isinstance(kernels, HopperKernels) and not options.ordered:
        decode_sms = execution.decode_sms or DECODE_SMS
        kernels = replace(kernels, decode_sms=decode_sms, fused=options.fused)
        options = replace(options, kernels=kernels)
    return options


def decode_sms_of(options: AttentionOptions) -> int | None:
    """How many multiprocessors decode attention has while prefill attention runs beside it; None
    where they are not divided."""
    kernels = options.kernels
    return (kernels.decode_sms or None) if isinstance(kernels, HopperKernels) else None


def with_decode_sms(options: AttentionOptions, decode_sms: int) -> AttentionOptions:
    """Of options that divide the multiprocessors, the same with another division."""
    assert isinstance(options.kernels, HopperKernels) and options.kernels.decode_sms
    return replace(options, kernels=replace(options.kernels, decode_sms=decode_sms))


def choose_kernels(
    attention: str | None, device: Any, dtype: Any, head_dim: int, page_tokens: int
) -> AttentionKernels:
    """attention: `pallas`, `triton`, `xla`, or None for the first of them that the device and the
    model allow. page_tokens: of a page in decode layout. Raises ConfigError where what is asked for
    cannot work."""
    if attention == "xla":
        return XlaKernels()
    model = _model_refusal(dtype, head_dim, page_tokens)
    kernels = {"pallas": HopperKernels(), "triton": TritonKernels()}
    refusals = {
        "pallas": _hopper_refusal(device) or model,
        "triton": triton_refusal(device) or model,
    }
    if attention is None:
        return next((kernels[k] for k, refusal in refusals.items() if not refusal), XlaKernels())
    if refusal := refusals[attention]:
        raise ConfigError(f"attention: {attention} needs {refusal}. Use xla")
    return kernels[attention]


def _hopper_refusal(device: Any) -> str | None:
    """What the kernels would need of a device and do not find."""
    if getattr(device, "compute_capability", None) != HOPPER:
        return f"a Hopper GPU (H100, H200), and this is {device.device_kind!r}"
    return None


def _model_refusal(dtype: Any, head_dim: int, page_tokens: int) -> str | None:
    """What all kernels but XLA's would need of a model and its pool and do not find."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"dtype bfloat16, and this is {jnp.dtype(dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"a head_dim of 64 or 128, and this model's is {head_dim}"
    try:
        check_page_tokens(page_tokens)
    except ValueError as error:
        return f"other {error}"
    return None
