"""Attention kernels that stand in for those of the GPU: the right operands, little arithmetic.

What is checked with them is the step around them, which only sees a custom call: what it copies,
overlaps and launches. They are Mosaic kernels of one launch each that read every operand, the
stacked pool in place by TMA, as real ones would; their results mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from conflux_jax.models.attention import AttentionInputs, DecodeInputs, PrefillInputs
from conflux_jax.models.heads import HeadLayout

PROGRAMS = 132  # the SMs of an H100
TILE = 8  # rows of one TMA copy


@dataclass(frozen=True)
class StandInKernels:
    """Satisfies `AttentionKernels` with one launch a path."""

    streams: bool = True

    def planned(self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout):
        return inputs

    def decode(self, sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout):
        num_rows, head_dim = inputs.context_lens.shape[0], sent.shape[3]
        num_heads = sent.shape[0] * heads.q_per_device
        indices = inputs.page_table.reshape(-1), inputs.context_lens
        rows = sent.reshape(-1, head_dim)
        shape = (num_rows * num_heads, head_dim)
        out = _launch("decode_attention", shape, (rows,), pool, layer, indices)
        return out.reshape(num_rows, num_heads * head_dim)

    def prefill(self, received, pool, layer, inputs: PrefillInputs, heads: HeadLayout):
        tokens, head_dim = received.shape[0], received.shape[2]
        segments = inputs.segments
        indices = (
            inputs.received,
            inputs.compact,
            segments.starts,
            segments.context_lens,
            segments.page_table.reshape(-1),
            segments.blocks.reshape(-1),
            segments.num_blocks.reshape(1),
        )
        rows = received.reshape(-1, head_dim)
        shape = (tokens * heads.q_per_device, head_dim)
        out = _launch("prefill_attention", shape, (rows,), pool, layer, indices)
        return out.reshape(tokens, heads.q_per_device, head_dim)


def _launch(name, out_shape, rows, pool, layer, indices):
    """Each program adds a tile of every operand to tiles of the output, PROGRAMS apart."""
    head_dim = pool.shape[-1]
    num_rows = len(rows)

    def body(layer_ref, pool_ref, *refs):
        row_refs, index_refs = refs[:num_rows], refs[num_rows : num_rows + len(indices)]
        out_ref, tile, barrier = refs[num_rows + len(indices) :]
        program = lax.axis_index("program")
        start = layer_ref[0] + program
        for ref in index_refs:
            start += ref[program % ref.shape[0]]

        @pl.loop(0, pl.cdiv(out_shape[0], TILE * PROGRAMS))
        def _(step):
            at = lax.rem((step * PROGRAMS + program) * TILE, out_shape[0])
            total = jnp.zeros((TILE, head_dim), jnp.float32)
            for ref in (pool_ref, *row_refs):
                source = ref.at[pl.ds(lax.rem(start + at, ref.shape[0] - TILE), TILE)]
                plgpu.copy_gmem_to_smem(source, tile, barrier)
                plgpu.barrier_wait(barrier)
                total += tile[...].astype(jnp.float32)
            tile[...] = total.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(at, TILE)])
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, pool.dtype),
        scratch_types=[plgpu.SMEM((TILE, head_dim), pool.dtype), plgpu.Barrier()],
        grid=(PROGRAMS,),
        grid_names=("program",),
        kernel_name=name,
    )
    return kernel(layer.reshape(1), pool.reshape(-1, head_dim), *rows, *indices)
