"""The engine's own step, compiled for H100s that are not there."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from bench import hlo_counts
from conflux_jax.execution.batch import BatchLimits
from conflux_jax.execution.kv_cache import PoolShape, page_bytes
from conflux_jax.execution.runner import plan_dims
from conflux_jax.execution.step import lower_step
from conflux_jax.models.attention import AttentionOptions
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.models.known_specs import LLAMA_3_1_8B, QWEN3_14B, QWEN3_32B
from conflux_jax.plan import Bucket, PoolGeometry
from conflux_jax.platform import compiler_options
from tests.gpu_compile.stand_in import StandInKernels
from tests.gpu_compile.thunks import Thunk, parse_thunks

TARGET = Path(__file__).with_name("h100_sxm.txtpb")
MODELS = {  # on the meshes (sp, tp) that the paper runs them on
    "llama-3.1-8b": (LLAMA_3_1_8B, (4, 1)),
    "qwen3-14b": (QWEN3_14B, (4, 1)),
    "qwen3-32b": (QWEN3_32B, (4, 2)),
}
POOL_BYTES = 16 << 30  # on each device
PAGE_TOKENS = 16
BUCKET = Bucket(rows=512, decode_rows=64, prefill=True, handoff=True)


@dataclass(frozen=True)
class Program:
    dims: DecoderDims
    limits: BatchLimits
    bucket: Bucket
    text: str
    memory: Any  # jaxlib gives the type no public name
    module: hlo_counts.Module
    thunks: list[Thunk]

    @property
    def layer(self) -> hlo_counts.Loop:
        return hlo_counts.layer_loop(self.module)

    @property
    def pool_bytes(self) -> int:
        """On one device."""
        shape = PoolShape(self.dims, self.limits.geometry).shape
        shards = self.dims.heads.groups * self.dims.heads.tp
        return int(np.prod(shape)) * self.dims.dtype.itemsize // shards


@cache
def program(model: str, overlap: str) -> Program:
    spec, (sp, tp) = MODELS[model]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{sp * tp}"
    )
    devices = np.array(topology.devices).reshape(sp, tp)
    mesh = Mesh(devices, ("sp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))
    platform = devices[0, 0].platform
    dims = plan_dims(spec, mesh, jnp.dtype(jnp.bfloat16))
    limits = _limits(dims)
    options = AttentionOptions.make(overlap, platform, StandInKernels())
    lowered = lower_step(dims, mesh, limits, BUCKET, spec.vocab_size, options)
    with tempfile.TemporaryDirectory() as dump:
        compiled = lowered.compile(compiler_options=_compiler_options(platform, dump))
        (thunks,) = Path(dump).glob("*thunk_sequence_after_thunk_passes.txt")
        sequence = parse_thunks(thunks.read_text())
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    module = hlo_counts.parse(text)
    return Program(dims, limits, BUCKET, text, memory, module, sequence)


def _limits(dims: DecoderDims) -> BatchLimits:
    heads = dims.heads
    num_pages = POOL_BYTES // page_bytes(dims, PAGE_TOKENS)
    prefill_page_tokens = heads.prefill_page_tokens(PAGE_TOKENS)
    return BatchLimits(
        geometry=PoolGeometry(heads.groups, num_pages, PAGE_TOKENS, prefill_page_tokens),
        page_rows=PAGE_TOKENS * heads.kv_per_rank,
        max_slots=256,
        max_model_len=32_768,
        max_segments=8,
        handoff_pages=64,
    )


def _compiler_options(platform: str, dump: str) -> dict[str, str | int | bool]:
    """The engine's, and what a machine without a GPU needs: no tuning of matrix products."""
    engine = compiler_options(platform)
    return {**engine, "xla_gpu_enable_triton_gemm": False, "xla_dump_to": dump}
