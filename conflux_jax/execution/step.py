"""One iteration on the devices: a single program under `shard_map`, per bucket.

It takes the weights, the page pool and the last token of every slot (both donated), and one int32
buffer that says what this iteration does. A decode row reads its input token from the slot that
the previous step wrote, so the host need not have seen it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from conflux_jax.execution.adjustments import (
    RowAdjustments,
    SlotTables,
    TableAdjustment,
    count,
    note,
    table_shapes,
    table_specs,
)
from conflux_jax.execution.batch import BufferLayout
from conflux_jax.execution.kv_cache import POOL_SPEC, PoolShape
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.sampling import Sampled, SamplingInputs, VocabShard, sample
from conflux_jax.models.attention import (
    SP,
    AttentionInputs,
    AttentionOptions,
    DecodeInputs,
    HandoffInputs,
    PrefillInputs,
    split_attention,
    spread_attention,
)
from conflux_jax.models.decoder import TP, DecoderDims, abstract_decoder
from conflux_jax.models.layers import rope_inv_freq, rope_tables
from conflux_jax.plan import Bucket
from pallas_kernels.blockwise import Segments


class StepState(NamedTuple):
    """What one step hands to the next on the devices. last_tokens: by slot, on every device.
    tables: what the slots' requests change in their logits."""

    pool: jax.Array
    last_tokens: jax.Array
    tables: SlotTables


def state_specs() -> StepState:
    """How the state lies on the mesh: a PartitionSpec for each field."""
    specs: Any = POOL_SPEC, PartitionSpec(), table_specs()
    return StepState(*specs)


def state_shapes(dims: DecoderDims, limits: BatchLimits, mesh: Mesh) -> StepState:
    """Shapes, types and shardings of the state, over the whole mesh."""
    pool = PoolShape(dims, limits.geometry).shape
    shaped: Any = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            (pool, dims.dtype, POOL_SPEC),
            ((limits.max_slots,), jnp.int32, PartitionSpec()),
        )
    )
    pool_shape, tokens_shape = shaped
    tables: Any = table_shapes(limits.max_slots, dims.padded_vocab, mesh)
    return StepState(pool_shape, tokens_shape, tables)


def make_step(
    graphdef: nnx.GraphDef,
    abstract: nnx.State,
    dims: DecoderDims,
    mesh: Mesh,
    limits: BatchLimits,
    bucket: Bucket,
    vocab_limit: int,
    attention: AttentionOptions,
) -> Callable[..., tuple[StepState, Sampled, jax.Array | None]]:
    """The jitted step `(params, state, buffer) -> (state, sampled, hidden)` of a bucket.

    buffer: int32 `[groups, layout.size]`, split over groups. sampled: each field `[groups, ...]`.
    hidden: what the rows leave the last layer as, `[groups, rows, hidden]`, for prompt_scores;
    None where there is no prefill. Token ids from `vocab_limit` on have no token and are never
    sampled.
    """
    layout = BufferLayout.make(bucket, limits)
    vocab = VocabShard(dims.padded_vocab // dims.heads.tp, dims.heads.tp, TP)

    def step(params, state: StepState, buffer):
        model = nnx.merge(graphdef, params)
        fields = layout.unpack(buffer[0])
        x, pool = forward(model, dims, limits, bucket, state, fields, attention)
        rows = jnp.take(x, fields["sample_rows"], axis=0, mode="clip")
        logits = vocab.limited(model.logits(rows), vocab_limit)
        adjustment = TableAdjustment(_row_adjustments(fields), state.tables, vocab)
        sampled = sample(logits, _sampling_inputs(fields), vocab, adjustment)
        at = fields["sample_slots"], fields["sample_positions"]
        state, sampled = _remember(state._replace(pool=pool), *at, sampled, vocab)
        return state, *jax.tree.map(lambda x: x[None], (sampled, x if bucket.prefill else None))

    per_group: Any = PartitionSpec(SP)
    specs = state_specs()
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(abstract), specs, per_group),
        out_specs=(specs, per_group, per_group),
        check_vma=False,  # the last tokens are equal on all devices by the all-gather
    )
    return jax.jit(sharded, donate_argnums=(1,))


def lower_step(
    dims: DecoderDims,
    mesh: Mesh,
    limits: BatchLimits,
    bucket: Bucket,
    vocab_limit: int,
    attention: AttentionOptions,
) -> jax.stages.Lowered:
    """The step of a bucket, lowered for the shapes and shardings that it runs with.

    Needs neither weights nor devices that exist, so a program for other hardware can be looked at.
    """
    graphdef, abstract = abstract_decoder(dims)
    step: Any = make_step(graphdef, abstract, dims, mesh, limits, bucket, vocab_limit, attention)

    def shaped(shape, dtype, spec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    specs = nnx.get_partition_spec(abstract)
    params = jax.tree.map(lambda x, spec: shaped(x.shape, x.dtype, spec), abstract, specs)
    size = BufferLayout.make(bucket, limits).size
    buffer = shaped((limits.geometry.groups, size), jnp.int32, PartitionSpec(SP))
    return step.lower(params, state_shapes(dims, limits, mesh), buffer)


def forward(
    model: Any,
    dims: DecoderDims,
    limits: BatchLimits,
    bucket: Bucket,
    state: StepState,
    fields: dict,
    options: AttentionOptions,
    num_layers: int | Int[Array, ""] | None = None,
):
    """Hidden states of the packed rows after all layers, or the first `num_layers`, and the pool
    with their KV."""
    token_ids = fields["token_ids"]
    if bucket.decode_rows:
        fed = jnp.take(state.last_tokens, fields["decode_slots"], axis=0, mode="clip")
        fed = jnp.pad(fed, (0, bucket.rows - bucket.decode_rows))
        token_ids = jnp.where(jnp.arange(bucket.rows) < fields["num_decodes"], fed, token_ids)
    decode_heads = dims.heads.alone if limits.geometry.shared else dims.heads
    inputs = _attention_inputs(bucket, fields)
    inputs = options.kernels.planned(inputs, dims.heads, decode_heads)
    tables = rope_tables(fields["positions"], rope_inv_freq(dims.spec))
    cos, sin = lax.optimization_barrier(tables)  # made once, not in every layer
    layer_def, layer_state = nnx.split(model.layers)

    attend = spread_attention if limits.geometry.shared else split_attention
    cut = bucket.decode_rows if limits.apart and bucket.prefill else 0

    def body(carry):
        index, x, pool = carry
        parameters = jax.tree.map(partial(_of_layer, index=index), layer_state)
        layer = nnx.merge(layer_def, parameters)
        qkv = _by_phase(layer.qkv, cut, x, cos, sin)
        attention, pool = attend(qkv, pool, index, inputs, dims.heads, options)
        x = _by_phase(layer.finish, cut, x, attention)
        # XLA then counts on when all readers of the index are done: in place. Beside the last sum
        # over ranks it would count before some of them, and copy the index for these.
        x, pool = lax.optimization_barrier((x, pool))
        return index + 1, x, pool

    # Not `lax.scan`: its own counter cannot be read, and a second one costs launches per layer.
    start = (jnp.int32(0), model.embed(token_ids), state.pool)
    last = dims.spec.num_layers if num_layers is None else num_layers
    return lax.while_loop(lambda carry: carry[0] < last, body, start)[1:]


def _of_layer(stacked: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(
        stacked, index, axis=0, keepdims=False, allow_negative_indices=False
    )


def _by_phase(rows_function: Callable[..., Any], cut: int, *rows: jax.Array) -> Any:
    """`rows_function` of packed rows; with a `cut`, of those before it, then of the others."""
    if not cut:
        return rows_function(*rows)
    first = rows_function(*(x[:cut] for x in rows))
    first, others = lax.optimization_barrier((first, tuple(x[cut:] for x in rows)))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), first, rows_function(*others))


def _attention_inputs(bucket: Bucket, f: dict) -> AttentionInputs:
    decode = prefill = handoff = None
    if bucket.decode_rows:
        decode = DecodeInputs(
            f["num_decodes"], f["context_lens"], f["decode_table"], f["decode_writes"]
        )
    if bucket.prefill:
        segments = Segments(
            f["segment_starts"],
            f["segment_contexts"],
            f["prefill_table"],
            f["blocks"],
            f["num_blocks"],
        )
        prefill = PrefillInputs(f["received"], f["compact"], f["prefill_writes"], segments)
    if bucket.handoff:
        handoff = HandoffInputs(f["handoff_sources"], f["handoff_writes"])
    return AttentionInputs(decode, prefill, handoff)


def _as_float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _sampling_inputs(f: dict) -> SamplingInputs:
    return SamplingInputs(
        temperature=_as_float(f["temperature"]),
        top_k=f["top_k"],
        top_p=_as_float(f["top_p"]),
        min_p=_as_float(f["min_p"]),
        seed=lax.bitcast_convert_type(f["seed"], jnp.uint32),
        position=f["sample_positions"],
        wants_logprobs=f["wants_logprobs"] > 0,
    )


def _row_adjustments(f: dict) -> RowAdjustments:
    return RowAdjustments(
        slots=f["sample_slots"],
        listed=f["listed"],
        position=f["sample_positions"],
        presence=_as_float(f["presence"]),
        frequency=_as_float(f["frequency"]),
        repetition=_as_float(f["repetition"]),
        biased=f["biased"] > 0,
        penalised=f["penalised"] > 0,
    )


def _remember(
    state: StepState,
    slots: Int[Array, " samples"],
    positions: Int[Array, " samples"],
    sampled: Sampled,
    vocab: VocabShard,
) -> tuple[StepState, Sampled]:
    """Every group's new tokens at their slots, on every group; slots past the end are dropped."""
    # All that reads these is done before they are written, or they would be copied.
    written = state.tables.marks, state.tables.recent
    (marks, recent), sampled = lax.optimization_barrier((written, sampled))
    # One exchange of all: that of the slots alone would depend on nothing in the step, and could
    # wait for others on threads of a CPU that the layers' exchanges need to get there.
    rows = jnp.stack([slots, positions, sampled.token_ids], axis=1)
    slots, positions, token_ids = lax.all_gather(rows, axis_name=SP, tiled=True).T
    tables = state.tables._replace(
        marks=count(marks, slots, token_ids, vocab),
        recent=note(recent, slots, positions, token_ids),
    )
    last_tokens = state.last_tokens.at[slots].set(token_ids, mode="drop")
    return state._replace(last_tokens=last_tokens, tables=tables), sampled
