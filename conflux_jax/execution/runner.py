"""The executor on real devices: a model on a mesh, its page pool, its compiled steps."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conflux_jax.config import Config, ConfigError
from conflux_jax.execution.adjustments import (
    allocate_tables,
    lower_write,
    row_of,
    row_specs,
    slot_bytes,
)
from conflux_jax.execution.batch import Batch, BatchBuilder
from conflux_jax.execution.kv_cache import (
    CPU_POOL_BYTES,
    PoolShape,
    page_bytes,
    plan_geometry,
)
from conflux_jax.execution.limits import BatchLimits, ladders_for
from conflux_jax.execution.prompt_scores import Scores, lower_pick, lower_score
from conflux_jax.execution.sampling import Sampled
from conflux_jax.execution.step import StepState, lower_step
from conflux_jax.models.decoder import DecoderDims, abstract_decoder
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.hopper_kernels import (
    attention_options,
    decode_sms_of,
    with_decode_sms,
)
from conflux_jax.models.loading.placement import load_parameters
from conflux_jax.models.spec import ModelSpec, WeightSource
from conflux_jax.plan import Admission, Bucket, IterationPlan, PoolGeometry, StepOutput
from conflux_jax.platform import (
    available_memory_bytes,
    compiler_options,
    cpu_multiplies_bfloat16,
)
from conflux_jax.request import Logprobs, PromptLogprobs
from conflux_jax.scheduler.buckets import Ladders

COMPILE_THREADS = 2
WRITE, SCORE = "write", "score"  # programs beside the steps
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
    """A step in flight. sampled: device arrays `[groups, samples, ...]`. scores: of prompts, where
    somebody asked."""

    batch: Batch
    sampled: Sampled
    launched_s: float
    scores: tuple[Scores, ...] = ()


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
        self.is_compiling = False  # in `launch`, where warm-up has left something
        self._buffer_sharding = NamedSharding(mesh, PartitionSpec("sp"))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._compiled: dict[tuple[Bucket, int | None], jax.stages.Compiled] = {}
        self._helpers: dict[str | int, jax.stages.Compiled] = {}
        self._last_done_s = 0.0
        self._state = self._empty_state()

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
        geometry = plan_pool(dims, config, max_model_len, mesh)
        ladders = plan_ladders(config, mesh, geometry)
        limit = min(vocab_limit or spec.vocab_size, spec.vocab_size)
        return cls(params, dims, mesh, geometry, ladders, config, max_model_len, limit)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every bucket that is not yet, a few at a time; `progress(done, total)` after
        each. Then the programs beside the steps, which are small."""
        buckets = [b for b in self.ladders.all() if self._key(b) not in self._compiled]
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            helpers = pool.map(self._helper, self._helper_names(buckets))
            for done, (bucket, compiled) in enumerate(pool.map(self._compile, buckets)):
                self._compiled[self._key(bucket)] = compiled
                if progress is not None:
                    progress(done + 1, len(buckets))
            deque(helpers, maxlen=0)  # raises what one of them has

    def launch(self, plan: IterationPlan) -> Ticket:
        launched_s = time.perf_counter()
        batch = self.batch(plan)
        step = self._compiled.get(self._key(batch.bucket))
        if step is None:
            step = self._compile_late(batch.bucket)
        for admission in batch.adjusted:
            self._write_row(admission)
        buffer = jax.device_put(batch.buffer, self._buffer_sharding)
        self._state, sampled, hidden = step(self._params, self._state, buffer)
        return Ticket(batch, sampled, launched_s, self._score(batch, hidden))

    def _write_row(self, admission: Admission) -> None:
        """What a request changes in its logits, put at its slot before the step that it enters."""
        row = row_of(admission.request, admission.token_ids, self.dims.padded_vocab)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), row_specs())
        slot = jax.device_put(np.int32(admission.slot), self._replicated)
        tables = self._helper(WRITE)(self._state.tables, slot, jax.device_put(row, shardings))
        self._state = self._state._replace(tables=tables)

    def _score(self, batch: Batch, hidden: jax.Array | None) -> tuple[Scores, ...]:
        """Of prompts, a block of rows after the other: the logits of one at a time exist."""
        if batch.prompts is None or hidden is None:
            return ()
        pick, score = self._helper(batch.bucket.rows), self._helper(SCORE)
        scores = []
        for block in batch.prompts.blocks:
            rows, tokens = jax.device_put(block, self._buffer_sharding)
            scores.append(score(self._params, pick(hidden, rows), tokens))
        return tuple(scores)

    def collect(self, ticket: Ticket) -> StepOutput:
        batch, sampled = ticket.batch, ticket.sampled
        at = batch.sample_group, batch.sample_index
        token_ids = np.asarray(sampled.token_ids)[at]
        scores = jax.device_get(ticket.scores)
        done_s = time.perf_counter()
        elapsed_s = done_s - max(ticket.launched_s, self._last_done_s)
        self._last_done_s = done_s
        prompts: dict[str, PromptLogprobs] = {}
        if batch.prompts is not None:
            prompts = batch.prompts.by_request(scores)
        return StepOutput(token_ids, elapsed_s, self._logprobs(batch, sampled), prompts)

    def reset(self) -> None:
        """An empty pool, after a step that failed: it had been given the old one to write in."""
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()  # first: there may be no memory for two
        self._state = self._empty_state()
        self._batches = BatchBuilder(self.limits)

    @property
    def decode_sms(self) -> int | None:
        """Multiprocessors that decode attention has while prefill attention runs beside it; None
        where they are not divided."""
        return decode_sms_of(self.attention)

    def divide_sms(self, decode_sms: int) -> None:
        """Divides them otherwise, in steps that are launched from now on. What was compiled for
        another division is kept."""
        self.attention = with_decode_sms(self.attention, decode_sms)

    @property
    def params(self) -> nnx.State:
        """The weights on the mesh."""
        return self._params

    @property
    def state(self) -> StepState:
        """Pool and last tokens after what was launched so far. The next `launch` takes them."""
        return self._state

    def batch(self, plan: IterationPlan) -> Batch:
        """What the step would read of a plan that is next; `launch` may follow."""
        return self._batches.build(plan)

    def close(self) -> None:
        """Frees the pool and the weights."""
        for leaf in jax.tree.leaves((self._state, self._params)):
            leaf.delete()

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """The step of a bucket, lowered for the shapes and shardings that it runs with."""
        return lower_step(
            self.dims, self.mesh, self.limits, bucket, self._vocab_limit, self.attention
        )

    def _empty_state(self) -> StepState:
        slots = jnp.zeros(self.limits.max_slots, jnp.int32)
        return StepState(
            PoolShape(self.dims, self.geometry).allocate(self.mesh),
            jax.device_put(slots, self._replicated),
            allocate_tables(self.limits.max_slots, self.dims.padded_vocab, self.mesh),
        )

    def _compile_late(self, bucket: Bucket) -> jax.stages.Compiled:
        self.is_compiling = True
        try:
            _, step = self._compile(bucket)
        finally:
            self.is_compiling = False
        self._compiled[self._key(bucket)] = step
        return step

    def _key(self, bucket: Bucket) -> tuple[Bucket, int | None]:
        """Of its step: where one phase is alone, nothing is divided."""
        return bucket, self.decode_sms if bucket.prefill and bucket.decode_rows else None

    def _compile(self, bucket: Bucket) -> tuple[Bucket, jax.stages.Compiled]:
        self.num_compilations += 1
        options = compiler_options(self.mesh.devices.flat[0].platform)
        return bucket, self.lower(bucket).compile(compiler_options=options)

    def _helper_names(self, buckets: Sequence[Bucket]) -> list[str | int]:
        """The programs beside the steps; one that picks rows goes by their number."""
        return [WRITE, SCORE, *sorted({bucket.rows for bucket in buckets if bucket.prefill})]

    def _helper(self, name: str | int) -> jax.stages.Compiled:
        if name not in self._helpers:
            match name:
                case int():
                    lowered = lower_pick(self.dims, self.mesh, name)
                case "write":
                    lowered = lower_write(self.limits.max_slots, self.dims.padded_vocab, self.mesh)
                case _:
                    lowered = lower_score(self.dims, self.mesh, self._vocab_limit)
            options = compiler_options(self.mesh.devices.flat[0].platform)
            self._helpers[name] = lowered.compile(compiler_options=options)
        return self._helpers[name]

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


def plan_pool(dims: DecoderDims, config: Config, max_model_len: int, mesh: Mesh) -> PoolGeometry:
    """The pool in what memory the weights leave, less what the steps keep of each slot. Raises
    ConfigError."""
    slots = config.scheduler.max_num_seqs
    spread = config.execution.decode_attention == "spread"
    beside_bytes = slots * state_bytes(dims)
    return plan_geometry(dims, config.cache, slots * max_model_len, mesh, spread, beside_bytes)


def state_bytes(dims: DecoderDims) -> int:
    """Bytes that a device keeps of each slot beside its KV: its last token, its tables."""
    return jnp.dtype(jnp.int32).itemsize + slot_bytes(dims.padded_vocab, dims.heads.tp)


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
    slots = groups * dims.heads.tp * config.scheduler.max_num_seqs * state_bytes(dims)
    if weights + pool + slots > available:
        raise ConfigError(
            f"sp: {groups} groups hold {weights / 1e9:.1f} GB of weights, each its own, "
            f"{pool / 1e9:.1f} GB of KV and {slots / 1e9:.1f} GB of tables for max_num_seqs = "
            f"{config.scheduler.max_num_seqs}; this machine has {available / 1e9:.1f} GB left"
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
