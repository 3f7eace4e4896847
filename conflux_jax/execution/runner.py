"""The executor on real devices: a model on a mesh, its page pool, its compiled steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conflux_jax.config import Config, ConfigError
from conflux_jax.execution.batch import Batch, BatchBuilder
from conflux_jax.execution.kv_cache import (
    CPU_POOL_BYTES,
    PoolShape,
    page_bytes,
    plan_geometry,
)
from conflux_jax.execution.limits import BatchLimits, ladders_for
from conflux_jax.execution.sampling import Sampled
from conflux_jax.execution.step import StepState, lower_step
from conflux_jax.models.decoder import DecoderDims, abstract_decoder
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.hopper_kernels import attention_options
from conflux_jax.models.loading.placement import load_parameters
from conflux_jax.models.spec import ModelSpec, WeightSource
from conflux_jax.plan import Bucket, IterationPlan, PoolGeometry, StepOutput
from conflux_jax.platform import (
    available_memory_bytes,
    compiler_options,
    cpu_multiplies_bfloat16,
)
from conflux_jax.request import Logprobs
from conflux_jax.scheduler.buckets import Ladders

COMPILE_THREADS = 2
CPU_WIDEN_ROWS = 64  # on CPUs without bfloat16 arithmetic; measured with AVX2


def make_mesh(sp: int, tp: int) -> Mesh:
    """A mesh ("sp", "tp") of the first devices. Raises ConfigError when there are too few."""
    devices = jax.devices()
    if len(devices) < sp * tp:
        raise ConfigError(
            f"sp * tp: {sp} * {tp} needs {sp * tp} devices; "
            f"{devices[0].platform} has {len(devices)}"
        )
    grid = np.array(devices[: sp * tp]).reshape(sp, tp)
    return Mesh(grid, ("sp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))


@dataclass(frozen=True)
class Ticket:
    """A step in flight. sampled: device arrays `[groups, samples, ...]`."""

    batch: Batch
    sampled: Sampled
    launched_s: float


class Runner:
    """Satisfies `plan.Executor`. `launch` returns once the step is queued; `collect` waits for its
    tokens. Every bucket is compiled by `warm_up`; after it nothing compiles."""

    def __init__(
        self,
        params: nnx.State,
        dims: DecoderDims,
        mesh: Mesh,
        geometry: PoolGeometry,
        ladders: Ladders,
        config: Config,
        max_model_len: int,
        vocab_limit: int,
    ):
        self.geometry, self.ladders, self.max_model_len = geometry, ladders, max_model_len
        self.dims, self.mesh = dims, mesh
        self.num_compilations = 0
        self.limits = plan_limits(dims, geometry, config, max_model_len)
        self._batches = BatchBuilder(self.limits)
        self._params, self._vocab_limit = params, vocab_limit
        device, page_tokens = mesh.devices.flat[0], config.cache.page_tokens
        self.attention = attention_options(
            config.execution, device, dims.dtype, dims.spec.head_dim, page_tokens
        )
        self._buffer_sharding = NamedSharding(mesh, PartitionSpec("sp"))
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}
        self._last_done_s = 0.0
        slots = jnp.zeros(self.limits.max_slots, jnp.int32)
        self._state = StepState(
            PoolShape(dims, geometry).allocate(mesh),
            jax.device_put(slots, NamedSharding(mesh, PartitionSpec())),
        )

    @classmethod
    def create(cls, source: WeightSource, config: Config, vocab_limit: int | None = None) -> Runner:
        """Loads the model onto the mesh and lays out the pool in what memory is left.

        vocab_limit: ids from here on have no token. Raises ConfigError or ModelError with the
        rule that a setting breaks."""
        spec = source.spec
        mesh = make_mesh(config.mesh.sp, config.mesh.tp)
        use_compilation_cache(config.cache.compilation_cache_dir)
        max_model_len = config.model.max_model_len or spec.max_position_embeddings
        if max_model_len > spec.max_position_embeddings:
            raise ConfigError(
                f"max_model_len: {max_model_len} is past the model's "
                f"max_position_embeddings ({spec.max_position_embeddings})"
            )
        dims = plan_dims(spec, mesh, jnp.dtype(config.model.dtype))
        _, abstract = abstract_decoder(dims)
        check_cpu_memory(abstract, dims, config, mesh)
        params = load_parameters(source, dims, abstract, mesh)
        most = config.scheduler.max_num_seqs * max_model_len
        spread = config.execution.decode_attention == "spread"
        geometry = plan_geometry(dims, config.cache, most, mesh, spread)
        ladders = plan_ladders(config, mesh, geometry)
        limit = min(vocab_limit or spec.vocab_size, spec.vocab_size)
        return cls(params, dims, mesh, geometry, ladders, config, max_model_len, limit)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every bucket, a few at a time; `progress(done, total)` after each."""
        buckets = self.ladders.all()
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for done, (bucket, compiled) in enumerate(pool.map(self._compile, buckets)):
                self._compiled[bucket] = compiled
                if progress is not None:
                    progress(done + 1, len(buckets))

    def launch(self, plan: IterationPlan) -> Ticket:
        launched_s = time.perf_counter()
        batch = self._batches.build(plan)
        step = self._compiled.get(batch.bucket)
        if step is None:
            _, step = self._compile(batch.bucket)
            self._compiled[batch.bucket] = step
        buffer = jax.device_put(batch.buffer, self._buffer_sharding)
        self._state, sampled = step(self._params, self._state, buffer)
        return Ticket(batch, sampled, launched_s)

    def collect(self, ticket: Ticket) -> StepOutput:
        batch, sampled = ticket.batch, ticket.sampled
        at = batch.sample_group, batch.sample_index
        token_ids = np.asarray(sampled.token_ids)[at]
        done_s = time.perf_counter()
        elapsed_s = done_s - max(ticket.launched_s, self._last_done_s)
        self._last_done_s = done_s
        return StepOutput(token_ids, elapsed_s, self._logprobs(batch, sampled))

    def close(self) -> None:
        """Frees the pool and the weights."""
        for leaf in jax.tree.leaves((self._state, self._params)):
            leaf.delete()

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """The step of a bucket, lowered for the shapes and shardings that it runs with."""
        return lower_step(
            self.dims, self.mesh, self.limits, bucket, self._vocab_limit, self.attention
        )

    def _compile(self, bucket: Bucket) -> tuple[Bucket, jax.stages.Compiled]:
        self.num_compilations += 1
        options = compiler_options(self.mesh.devices.flat[0].platform)
        return bucket, self.lower(bucket).compile(compiler_options=options)

    def _logprobs(self, batch: Batch, sampled: Sampled) -> dict[str, Logprobs]:
        if not batch.logprobs:
            return {}
        chosen, ids, values = (np.asarray(x) for x in sampled[1:])
        out = {}
        for request_id, (top, index) in batch.logprobs.items():
            at = batch.sample_group[index], batch.sample_index[index]
            pairs = zip(ids[at][:top].tolist(), values[at][:top].tolist(), strict=True)
            out[request_id] = Logprobs(float(chosen[at]), tuple(pairs))
        return out


def plan_dims(spec: ModelSpec, mesh: Mesh, dtype: jnp.dtype) -> DecoderDims:
    """The model on the mesh, with what suits the mesh's devices.

    Raises ModelError when the model cannot be split so."""
    sp, tp = mesh.devices.shape
    heads = HeadLayout.make(spec, sp, tp)
    if mesh.devices.flat[0].platform != "cpu":
        return DecoderDims(spec, heads, dtype, products=dtype)
    widens = dtype == jnp.bfloat16 and not cpu_multiplies_bfloat16()
    return DecoderDims(spec, heads, dtype, CPU_WIDEN_ROWS if widens else None)


def plan_limits(
    dims: DecoderDims, geometry: PoolGeometry, config: Config, max_model_len: int
) -> BatchLimits:
    """The static sizes of every step under a config."""
    return BatchLimits(
        geometry=geometry,
        page_rows=PoolShape(dims, geometry).page_rows,
        max_slots=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        max_segments=config.scheduler.max_prefill_segments,
        handoff_pages=config.scheduler.handoff_pages,
        apart=config.execution.linear == "apart",
    )


def check_cpu_memory(abstract: nnx.State, dims: DecoderDims, config: Config, mesh: Mesh) -> None:
    """Raises ConfigError where virtual CPU devices need more memory than the machine has left: each
    group holds its own weights and pool. A GPU says so itself."""
    available = available_memory_bytes()
    if mesh.devices.flat[0].platform != "cpu" or available is None:
        return
    groups = mesh.devices.shape[0]
    weights = groups * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    pool = CPU_POOL_BYTES
    if (tokens := config.cache.kv_pool_tokens) is not None:
        pool = groups * dims.heads.tp * tokens * page_bytes(dims, 1)
    if weights + pool > available:
        raise ConfigError(
            f"sp: {groups} groups hold {weights / 1e9:.1f} GB of weights, each its own, and "
            f"{pool / 1e9:.1f} GB of KV; this machine has {available / 1e9:.1f} GB left"
        )


def plan_ladders(config: Config, mesh: Mesh, geometry: PoolGeometry) -> Ladders:
    return ladders_for(config, geometry, on_cpu=mesh.devices.flat[0].platform == "cpu")


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs between runs. None: the user's cache folder; "": nowhere. Raises
    ConfigError where the folder cannot be made."""
    if directory == "":
        return
    if directory is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = str(Path(root) / "conflux_jax" / "xla")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compilation_cache_dir: {error}") from error
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
