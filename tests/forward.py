"""Logits of every token of a sequence, through the real step's layers: for tests against truth."""

from __future__ import annotations

from array import array

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from conflux_jax.config import Config
from conflux_jax.execution.batch import BufferLayout
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.step import StepState, forward, state_specs
from conflux_jax.models.decoder import abstract_decoder
from conflux_jax.models.spec import WeightSource
from conflux_jax.plan import Admission, DecodeRows, IterationPlan, PrefillChunk
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.waterfill import waterfill


def forward_logits(
    source: WeightSource, token_ids: list[int], sp: int = 1, tp: int = 1, chunk: int = 64
) -> np.ndarray:
    """Float32 logits `[tokens, vocab]` of a prompt that is prefilled chunk by chunk over `sp`
    groups of `tp` devices."""
    config = Config.from_flat(
        sp=sp,
        tp=tp,
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        rows_ladder=(chunk,),
        max_prefill_segments=1,
        kv_pool_tokens=4 * (len(token_ids) + 64),
        compilation_cache_dir="",
    )
    runner = Runner.create(source, config)
    bucket = runner.ladders.pick(0, -(-chunk // sp), prefill=True, handoff=False)
    step = _logits_step(runner, bucket)
    geometry = runner.geometry
    request = Request("prompt", tuple(token_ids), SamplingParams(), 1)
    pages = array("i", range(geometry.prefill_pages(len(token_ids))))
    admission = Admission(0, request, token_ids, (pages,) * sp)
    out, state = [], runner._state
    for start in range(0, len(token_ids), chunk):
        length = min(chunk, len(token_ids) - start)
        shares = waterfill((0,) * sp, bucket.rows, length)
        plan = IterationPlan(
            iteration=start,
            bucket=bucket,
            decodes=(DecodeRows.of(),) * sp,
            chunks=(PrefillChunk("prompt", 0, start, length, False),),
            prefill_shares=shares,
            admissions=(admission,) if start == 0 else (),
        )
        batch = runner._batches.build(plan)
        state, logits = step(runner._params, state, batch.buffer)
        rows = np.asarray(logits).reshape(sp, bucket.rows, -1)
        out += [rows[group, :share] for group, share in enumerate(shares)]
    return np.concatenate(out)[:, : source.spec.vocab_size]


def _logits_step(runner: Runner, bucket):
    graphdef, abstract = abstract_decoder(runner.dims)
    layout = BufferLayout.make(bucket, runner.limits)

    def step(params, state, buffer):
        model = nnx.merge(graphdef, params)
        fields = layout.unpack(buffer[0])
        x, pool = forward(
            model, runner.dims, runner.limits, bucket, state, fields, runner.attention
        )
        return StepState(pool, state.last_tokens), model.logits(x)

    specs = state_specs()
    sharded = jax.shard_map(
        step,
        mesh=runner.mesh,
        in_specs=(nnx.get_partition_spec(abstract), specs, PartitionSpec("sp")),
        out_specs=(specs, PartitionSpec("sp", "tp")),
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=(1,))
