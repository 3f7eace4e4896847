"""Looking into the step: what stands in its rows after some layers, and every row's logits.

A step gives out sampled tokens and nothing else. Here the same layers (`step.forward`) run on the
same arrays, and their results are read: for tests against other implementations, and for notebooks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Float

from conflux_jax.execution.batch import Batch, BatchBuilder, BufferLayout
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.step import StepState, forward, state_specs
from conflux_jax.models.decoder import abstract_decoder
from conflux_jax.plan import Admission, Bucket, DecodeRows, IterationPlan, PrefillChunk
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.waterfill import waterfill


class Inspector:
    """Reads what a runner's step would compute. The runner stays as it is: a plan can be looked at
    and then launched. Each bucket that is looked at is compiled once more, for this alone."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._compiled: dict[tuple[Bucket, bool], Callable[..., Any]] = {}

    def hidden(
        self, plan: IterationPlan, num_layers: int | None = None
    ) -> Float[np.ndarray, "groups rows hidden"]:
        """Float32 hidden states of the packed rows after all layers, or the first `num_layers` (0:
        the embeddings). Rows that the plan does not use may hold anything."""
        last = self._runner.dims.spec.num_layers if num_layers is None else num_layers
        batch = self._runner.batch(plan)
        return self._look(batch, self._runner.state, last, logits=False)[1]

    def logits(self, plan: IterationPlan) -> Float[np.ndarray, "groups rows vocab"]:
        """Float32 logits of the packed rows."""
        last = self._runner.dims.spec.num_layers
        batch = self._runner.batch(plan)
        return self._look(batch, self._runner.state, last, logits=True)[1]

    def prompt_hidden(
        self, token_ids: Sequence[int], num_layers: int | None = None
    ) -> Float[np.ndarray, "tokens hidden"]:
        """Of every token of a prompt that is prefilled alone, in chunks of one iteration's size, in
        a copy of the pool. Raises ValueError as `prompt_plans`."""
        last = self._runner.dims.spec.num_layers if num_layers is None else num_layers
        return self._prompt(token_ids, last, logits=False)

    def prompt_logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "tokens vocab"]:
        """Logits of every token of a prompt, prefilled as for `prompt_hidden`."""
        return self._prompt(token_ids, self._runner.dims.spec.num_layers, logits=True)

    def _prompt(self, token_ids: Sequence[int], num_layers: int, logits: bool) -> np.ndarray:
        state, rows = self._runner.state, []
        batches = BatchBuilder(self._runner.limits)  # of its own: the runner's slots stay
        for plan in prompt_plans(self._runner, token_ids):
            state, found = self._look(batches.build(plan), state, num_layers, logits)
            rows += [found[group, :share] for group, share in enumerate(plan.prefill_shares)]
        return np.concatenate(rows)

    def _look(
        self, batch: Batch, state: StepState, num_layers: int, logits: bool
    ) -> tuple[StepState, np.ndarray]:
        """The state after the batch, and its rows `[groups, rows, ...]`."""
        runner, bucket = self._runner, batch.bucket
        look = self._compiled.get((bucket, logits))
        if look is None:
            look = self._compiled[bucket, logits] = _make_look(runner, bucket, logits)
        state, found = look(runner.params, state, batch.buffer, jnp.int32(num_layers))
        groups = runner.geometry.groups
        rows = np.asarray(found, np.float32).reshape(groups, bucket.rows, -1)
        return state, rows[:, :, : runner.dims.spec.vocab_size] if logits else rows


def prompt_plans(runner: Runner, token_ids: Sequence[int]) -> Iterator[IterationPlan]:
    """Plans that prefill one prompt and do nothing else: in slot 0 and the first pages of every
    group, in chunks that fill the runner's largest bucket.

    Raises ValueError for a prompt that is longer than the pool or the model allows."""
    geometry, groups = runner.geometry, runner.geometry.groups
    most = min(runner.max_model_len, geometry.num_pages * geometry.prefill_page_tokens)
    if not 0 < len(token_ids) <= most:
        raise ValueError(f"token_ids: must be 1 to {most} tokens, got {len(token_ids)}")
    rows = runner.ladders.rows[-1]
    bucket = runner.ladders.pick(0, rows, prefill=True, handoff=False)
    request = Request("prompt", tuple(token_ids), SamplingParams(), 1)
    pages = array("i", range(geometry.prefill_pages(len(token_ids))))
    admission = Admission(0, request, list(token_ids), (pages,) * geometry.num_pools)
    for start in range(0, len(token_ids), groups * rows):
        length = min(groups * rows, len(token_ids) - start)
        yield IterationPlan(
            iteration=start,
            bucket=bucket,
            decodes=(DecodeRows.of(),) * groups,
            chunks=(PrefillChunk("prompt", 0, start, length, is_last=False),),
            prefill_shares=waterfill((0,) * groups, bucket.rows, length),
            admissions=(admission,) if start == 0 else (),
        )


def _make_look(runner: Runner, bucket: Bucket, logits: bool) -> Callable[..., Any]:
    """The jitted `(params, state, buffer, num_layers) -> (state, rows)`. Nothing is donated: the
    pool is copied, which is what leaves the runner's as it is."""
    graphdef, abstract = abstract_decoder(runner.dims)
    layout = BufferLayout.make(bucket, runner.limits)

    def look(params, state: StepState, buffer, num_layers):
        model = nnx.merge(graphdef, params)
        fields = layout.unpack(buffer[0])
        x, pool = forward(
            model, runner.dims, runner.limits, bucket, state, fields, runner.attention, num_layers
        )
        return state._replace(pool=pool), model.logits(x) if logits else x

    specs: Any = state_specs()
    sharded = jax.shard_map(
        look,
        mesh=runner.mesh,
        in_specs=(nnx.get_partition_spec(abstract), specs, PartitionSpec("sp"), PartitionSpec()),
        out_specs=(specs, PartitionSpec("sp", "tp" if logits else None)),
        check_vma=False,  # hidden states are equal on all ranks by their sums
    )
    return jax.jit(sharded)
