"""How likely the model found a prompt: log-probabilities of its tokens, for requests that ask.

The logits of a whole chunk would be gigabytes, and a step that could make them would cost everyone.
So the step only hands out what its rows leave the last layer as, and programs of their own make
logits of a few rows at a time, behind it on the devices, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from conflux_jax.execution.sampling import VocabShard, alternatives, likeliest
from conflux_jax.models.decoder import TP, DecoderDims, abstract_decoder
from conflux_jax.request import PromptLogprobs

SCORED_ROWS = 128  # of a group at a time


class Scores(NamedTuple):
    """Of tokens given all before them: log-probability, rank (1: the likeliest), and the likeliest
    alternatives."""

    logprobs: Float[Array, "*groups rows"]
    ranks: Int[Array, "*groups rows"]
    top_ids: Int[Array, "*groups rows top"]
    top_logprobs: Float[Array, "*groups rows top"]


@dataclass(frozen=True)
class ScoredPrompts:
    """The rows of an iteration that are to be scored.

    blocks: for each call of the programs, rows and the tokens that came after them, int32
    `[groups, SCORED_ROWS]` each. requests: (id, index of its first token here in the prompt, tokens
    here, alternatives). places: block, group and index of each token, of one request after another.
    """

    blocks: tuple[tuple[np.ndarray, np.ndarray], ...]
    requests: tuple[tuple[str, int, int, int], ...]
    places: tuple[np.ndarray, np.ndarray, np.ndarray]

    @classmethod
    def of(cls, groups: int, parts: Sequence[tuple[str, int, int, Any, Any, Any]]) -> ScoredPrompts:
        """parts: a request's id, first token, alternatives; for each token its group, the row
        before it, and the token."""
        owners, rows, tokens = (np.concatenate([part[i] for part in parts]) for i in (3, 4, 5))
        index = np.zeros(len(owners), np.int32)
        for group in range(groups):
            own = owners == group
            index[own] = np.arange(own.sum())
        block, at = np.divmod(index, SCORED_ROWS)
        size = int(block.max(initial=-1)) + 1, groups, SCORED_ROWS
        all_rows, all_tokens = np.zeros(size, np.int32), np.zeros(size, np.int32)
        all_rows[block, owners, at] = rows
        all_tokens[block, owners, at] = tokens
        return cls(
            blocks=tuple(zip(all_rows, all_tokens, strict=True)),
            requests=tuple((name, first, len(own), top) for name, first, top, own, *_ in parts),
            places=(block, owners, at),
        )

    def by_request(self, scores: Sequence[Scores]) -> dict[str, PromptLogprobs]:
        """What each request gets of the blocks' scores."""
        if not scores:  # prompts of one token
            return {}
        whole = [np.stack(arrays)[self.places] for arrays in zip(*scores, strict=True)]
        out, at = {}, 0
        for request_id, first, length, top in self.requests:
            logprobs, ranks, ids, values = (array[at : at + length] for array in whole)
            out[request_id] = PromptLogprobs(first, logprobs, ranks, ids[:, :top], values[:, :top])
            at += length
        return out


def score(
    logits: Float[Array, "rows shard"], tokens: Int[Array, " rows"], vocab: VocabShard
) -> Scores:
    """Of one token a row. Every rank has the same result."""
    places = tokens - vocab.offset
    own = jnp.take_along_axis(logits, jnp.clip(places, 0, vocab.size - 1)[:, None], axis=1)[:, 0]
    if vocab.ranks > 1:
        mine = (places >= 0) & (places < vocab.size)
        own = lax.pmax(jnp.where(mine, own, -jnp.inf), vocab.axis)
    above = (logits > own[:, None]).sum(axis=1, dtype=jnp.int32)
    if vocab.ranks > 1:
        above = lax.psum(above, vocab.axis)
    normaliser, *best_ones = alternatives(vocab, vocab.gather(likeliest(vocab, logits)))
    return Scores(own - normaliser, above + 1, *best_ones)


def lower_pick(dims: DecoderDims, mesh: Mesh, rows: int) -> jax.stages.Lowered:
    """The program `(hidden, rows) -> hidden` that takes SCORED_ROWS of a step's rows, so that only
    this one comes in as many variants as steps do."""

    def pick(hidden, index):
        return jnp.take(hidden[0], index[0], axis=0, mode="clip")[None]

    groups, width = mesh.shape["sp"], dims.spec.hidden_size
    program = _per_group(pick, mesh, 2)
    return program.lower(
        _struct((groups, rows, width), dims.dtype, mesh),
        _struct((groups, SCORED_ROWS), jnp.int32, mesh),
    )


def lower_score(dims: DecoderDims, mesh: Mesh, vocab_limit: int) -> jax.stages.Lowered:
    """The program `(params, hidden, tokens) -> Scores` of SCORED_ROWS rows a group."""
    graphdef, abstract = abstract_decoder(dims)
    vocab = VocabShard(dims.padded_vocab // dims.heads.tp, dims.heads.tp, TP)

    def step(params, hidden, tokens):
        logits = vocab.limited(nnx.merge(graphdef, params).logits(hidden[0]), vocab_limit)
        return jax.tree.map(lambda x: x[None], score(logits, tokens[0], vocab))

    specs = nnx.get_partition_spec(abstract)
    program = _per_group(step, mesh, 2, specs)
    params = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )
    groups, width = mesh.shape["sp"], dims.spec.hidden_size
    return program.lower(
        params,
        _struct((groups, SCORED_ROWS, width), dims.dtype, mesh),
        _struct((groups, SCORED_ROWS), jnp.int32, mesh),
    )


def _per_group(function: Any, mesh: Mesh, inputs: int, *others: Any) -> Any:
    """Jitted: with `others`' partition specs for its first arguments, and `inputs` more that are
    split over the groups, as is what it returns."""
    per_group: Any = PartitionSpec("sp")
    specs = (*others, *(per_group,) * inputs)
    sharded = partial(jax.shard_map, mesh=mesh, check_vma=False)
    return jax.jit(sharded(function, in_specs=specs, out_specs=per_group))


def _struct(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("sp")))
