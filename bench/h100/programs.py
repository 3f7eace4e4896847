"""The engine's own step, compiled for H100s that are not there.

Needs JAX's CUDA plugin and ptxas (`make .venv-gpu/.gpu`), no driver and no GPU. The attention
kernels are stand-ins (`stand_in.py`); all else is what the engine would run.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from bench import hlo_counts
from bench.h100.stand_in import StandInKernels
from bench.h100.thunks import Thunk, parse_thunks
from conflux_jax.config import Config
from conflux_jax.execution.kv_cache import PoolShape, page_bytes, plan_geometry
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.runner import plan_dims, plan_ladders, plan_limits
from conflux_jax.execution.step import lower_step
from conflux_jax.models.attention import AttentionKernels, AttentionOptions
from conflux_jax.models.decoder import DecoderDims
from conflux_jax.models.spec import ModelSpec
from conflux_jax.plan import Bucket
from conflux_jax.platform import compiler_options
from conflux_jax.scheduler.buckets import Ladders

TARGET = Path(__file__).with_name("h100_sxm.txtpb")
POOL_BYTES = 16 << 30  # on each device
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Setup:
    """A model under a config on a mesh of H100s, with all that the engine would derive from it.

    The pool has `POOL_BYTES` on each device, whatever the config says.
    """

    spec: ModelSpec
    config: Config
    mesh: Mesh
    dims: DecoderDims
    limits: BatchLimits
    ladders: Ladders

    @classmethod
    def make(cls, spec: ModelSpec, config: Config) -> Setup:
        """Raises ModelError or ConfigError where the model cannot be split so."""
        mesh = make_mesh(config.mesh.sp, config.mesh.tp)
        dims = plan_dims(spec, mesh, DTYPE)
        page_tokens = config.cache.page_tokens
        pool_tokens = POOL_BYTES // page_bytes(dims, page_tokens) * page_tokens
        config = Config.from_flat(config, kv_pool_tokens=pool_tokens)
        spread = config.execution.decode_attention == "spread"
        geometry = plan_geometry(dims, config.cache, pool_tokens, mesh, spread)
        max_model_len = config.model.max_model_len or spec.max_position_embeddings
        limits = plan_limits(dims, geometry, config, max_model_len)
        ladders = plan_ladders(config, mesh, geometry)
        return cls(spec, config, mesh, dims, limits, ladders)


@dataclass(frozen=True)
class Program:
    """A compiled step. text: its scheduled HLO. thunks: what XLA says that it launches."""

    setup: Setup
    bucket: Bucket
    text: str
    memory: Any  # jaxlib gives the type no public name
    module: hlo_counts.Module
    thunks: list[Thunk]

    @property
    def dims(self) -> DecoderDims:
        return self.setup.dims

    @property
    def limits(self) -> BatchLimits:
        return self.setup.limits

    @property
    def layer(self) -> hlo_counts.Loop:
        return hlo_counts.layer_loop(self.module)

    @property
    def pool_bytes(self) -> int:
        """On one device."""
        shape = PoolShape(self.dims, self.limits.geometry).shape
        return int(np.prod(shape)) * self.dims.dtype.itemsize // self.dims.shards


def make_mesh(sp: int, tp: int) -> Mesh:
    """A mesh ("sp", "tp") of H100s that are only described.

    Raises RuntimeError where this Python has no CUDA plugin for JAX."""
    shape = f"1x1x{sp * tp}"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=TARGET.read_text(), topology=shape
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "this Python has no CUDA plugin for JAX; `make .venv-gpu/.gpu` makes one that has"
        ) from error
    devices = np.array(topology.devices).reshape(sp, tp)
    return Mesh(devices, ("sp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))


def compile_step(setup: Setup, bucket: Bucket, kernels: AttentionKernels | None = None) -> Program:
    """The step of a bucket as XLA makes it for the mesh; seconds of compilation. Without `kernels`
    the attention is a stand-in's."""
    platform = setup.mesh.devices.flat[0].platform
    overlap = setup.config.execution.overlap
    options = AttentionOptions.make(overlap, platform, kernels or StandInKernels())
    lowered = lower_step(
        setup.dims, setup.mesh, setup.limits, bucket, setup.spec.vocab_size, options
    )
    with tempfile.TemporaryDirectory() as dump:
        compiled = lowered.compile(compiler_options=_compiler_options(platform, dump))
        (thunks,) = Path(dump).glob("*thunk_sequence_after_thunk_passes.txt")
        sequence = parse_thunks(thunks.read_text())
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    return Program(setup, bucket, text, memory, hlo_counts.parse(text), sequence)


def _compiler_options(platform: str, dump: str) -> dict[str, str | int | bool]:
    """The engine's, and what a machine without a GPU needs: no tuning of matrix products."""
    engine = compiler_options(platform)
    return {**engine, "xla_gpu_enable_triton_gemm": False, "xla_dump_to": dump}
