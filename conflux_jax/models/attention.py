"""The attention stage: where prefill and decode part, and merge again.

Decode rows attend on their own group. Prefill rows go through an all-to-all over the groups that
turns "part of the tokens, all heads" into "all tokens, part of the heads", attend, and come back by
a second one. KV that changes layout (hand-off) rides a third.

All readers see the pool as it was before this layer. Then one barrier, then one scatter writes what
the layer adds: that order is what lets XLA update the pool in place.

The attention itself is behind `AttentionKernels`: the XLA path by default, GPU kernels where there
are some. Whether the two phases may run at the same time is said by `AttentionOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Float, Int

from conflux_jax.models.heads import HeadLayout
from pallas_kernels.blockwise import Segments, decode_attention, prefill_attention

SP = "sp"
DECODE_STREAM = "gpu_stream:1"


class DecodeInputs(NamedTuple):
    """This group's decode rows, the first of the packed axis. Padded rows: context 0, and a write
    past the pool."""

    num_rows: Int[Array, ""]
    context_lens: Int[Array, " decode_rows"]
    page_table: Int[Array, "decode_rows max_pages"]
    writes: Int[Array, " decode_rows"]


class PrefillInputs(NamedTuple):
    """The chunks of all groups, the same on every device but for page ids.

    What the all-to-all brings are the rows of all groups, group by group: "received" order. In
    "compact" order the chunks' tokens lie end to end. received: for each compact token, its
    received row. compact: the inverse, for each received row its compact token. writes: for each
    received row its first pool row, past the pool where it is no chunk's. segments: on the compact
    axis.
    """

    received: Int[Array, " tokens"]
    compact: Int[Array, " tokens"]
    writes: Int[Array, " tokens"]
    segments: Segments


class HandoffInputs(NamedTuple):
    """KV on its way to decode groups, a static number of tokens for each.

    sources: for each group and token, the pool row of the token's first head here, or
    -1 - i for received row i of this iteration. writes: first pool row of each token that arrives.
    """

    sources: Int[Array, "groups handoff_tokens"]
    writes: Int[Array, " handoff_tokens"]


class AttentionInputs(NamedTuple):
    """What an iteration's program has; the parts that its bucket lacks are None."""

    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    handoff: HandoffInputs | None


_Pool = Float[Array, "layers two pages page_rows head_dim"]
_Rows = Float[Array, "tokens kv_heads head_dim"]


@runtime_checkable
class AttentionKernels(Protocol):
    """What attends: the seam between the stage and its kernels.

    Operands are what the stage has without moving anything, since a kernel can address rows by
    index but XLA cannot fuse a gather into it. So prefill gets the rows as received and answers in
    the same order, which is what is sent back; how it orders them between is its own affair.
    """

    def decode(
        self,
        q: Float[Array, "rows kv_heads q_per_kv head_dim"],
        new_k: Float[Array, "rows kv_heads head_dim"],
        new_v: Float[Array, "rows kv_heads head_dim"],
        pool: _Pool,
        layer: Int[Array, ""],
        page_table: Int[Array, "rows max_pages"],
        context_lens: Int[Array, " rows"],
    ) -> Float[Array, "rows kv_heads q_per_kv head_dim"]:
        """One query a row against its context in the pool and its own key and value, which are
        not in the pool yet."""
        ...

    def prefill(
        self,
        received: Float[Array, "tokens qkv_heads head_dim"],
        pool: _Pool,
        layer: Int[Array, ""],
        inputs: PrefillInputs,
        heads: HeadLayout,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of the chunks, to themselves and to their context in the pool. Heads of
        `received`: this device's queries, keys, values. Rows that are no chunk's may be anything
        finite."""
        ...


@dataclass(frozen=True)
class XlaKernels:
    """The XLA path, on any device: see `pallas_kernels.blockwise`."""

    def decode(self, q, new_k, new_v, pool, layer, page_table, context_lens):
        return decode_attention(q, new_k, new_v, pool, layer, page_table, context_lens)

    def prefill(self, received, pool, layer, inputs: PrefillInputs, heads: HeadLayout):
        num_q, num_kv = heads.q_per_device, heads.kv_per_device
        compact = jnp.take(received, inputs.received, axis=0, mode="clip")
        q, k, v = jnp.split(compact, (num_q, num_q + num_kv), axis=1)
        grouped = q.reshape(-1, num_kv, heads.q_per_kv, q.shape[2])
        out = prefill_attention(grouped, k, v, pool, layer, inputs.segments).reshape(q.shape)
        return jnp.take(out, inputs.compact, axis=0, mode="clip")


@dataclass(frozen=True)
class AttentionOptions:
    """How the stage runs; what it computes is the same.

    ordered: decode attention ends before the prefill path begins, so that nothing of the two
    overlaps. decode_on_stream: decode attention has a GPU stream of its own; all that it needs is
    there before the first all-to-all and its result is due after the second, so it may span both.
    """

    ordered: bool = True
    decode_on_stream: bool = False
    kernels: AttentionKernels = XlaKernels()

    @classmethod
    def make(
        cls, overlap: str | None, platform: str, kernels: AttentionKernels | None = None
    ) -> AttentionOptions:
        """overlap: `none`, `stream`, or None for what suits the platform. A CPU has no streams:
        there `stream` only drops the order."""
        on_gpu = platform in ("gpu", "cuda", "rocm")
        overlap = overlap or ("stream" if on_gpu else "none")
        return cls(overlap == "none", overlap == "stream" and on_gpu, kernels or XlaKernels())

    def decode(self, q, new_k, new_v, pool: _Pool, layer, inputs: DecodeInputs):
        """`kernels.decode`, on its stream where it has one."""
        attend: Any = self.kernels.decode
        if self.decode_on_stream:
            placed: Any = compute_on  # its stubs know only the context manager
            space = jax.memory.Space.Device
            attend = placed(attend, compute_type=DECODE_STREAM, out_memory_spaces=space)
        return attend(q, new_k, new_v, pool, layer, inputs.page_table, inputs.context_lens)


def split_attention(
    q: Float[Array, "rows groups q_heads head_dim"],
    kv: Float[Array, "rows groups kv2 head_dim"],
    pool: _Pool,
    layer: Int[Array, ""],
    inputs: AttentionInputs,
    heads: HeadLayout,
    options: AttentionOptions,
) -> tuple[Float[Array, "rows q_width"], _Pool]:
    """Attention of every row of this group, heads in the order of `q`, and the pool with the
    layer's new KV in it."""
    decode_out = prefill_out = None
    writes: list[tuple[_Rows, _Rows, Int[Array, "tokens kv_heads"]]] = []
    chunk_kv = None
    if inputs.decode is not None:
        decode_out, written = _decode_path(q, kv, pool, layer, inputs.decode, heads, options)
        writes.append(written)
        if options.ordered and inputs.prefill is not None:
            decode_out, q, kv = lax.optimization_barrier((decode_out, q, kv))
    if inputs.prefill is not None:
        prefill_out, written = _prefill_path(q, kv, pool, layer, inputs.prefill, heads, options)
        chunk_kv = written[:2]
        writes.append(written)
    if inputs.handoff is not None:
        writes.append(_hand_off(chunk_kv, pool, layer, inputs.handoff, heads))
    # Every reader of the old pool is done before the scatter below may touch it.
    pool, decode_out, prefill_out = lax.optimization_barrier((pool, decode_out, prefill_out))
    return _merge(decode_out, prefill_out, inputs.decode, q), _write(pool, layer, writes)


def spread_attention(
    q: Float[Array, "rows groups q_heads head_dim"],
    kv: Float[Array, "rows groups kv2 head_dim"],
    pool: _Pool,
    layer: Int[Array, ""],
    inputs: AttentionInputs,
    heads: HeadLayout,
    options: AttentionOptions,
) -> tuple[Float[Array, "rows q_width"], _Pool]:
    """`split_attention` as other systems have it, to measure against: decode rows go through the
    all-to-alls as well, and every device attends for all groups' decodes with its own heads."""
    rows, groups, num_q, head_dim = q.shape
    received = _to_heads(q, kv)
    out = jnp.zeros((groups, rows, num_q * head_dim), q.dtype)
    decode_out = None
    writes: list[tuple[_Rows, _Rows, Int[Array, "tokens kv_heads"]]] = []
    if inputs.decode is not None:
        decode_out, written = _attend_decodes(received, pool, layer, inputs.decode, heads, options)
        writes.append(written)
        if options.ordered and inputs.prefill is not None:
            decode_out, received = lax.optimization_barrier((decode_out, received))
    if inputs.prefill is not None:
        prefill_out, written = _attend_prefill(
            received, pool, layer, inputs.prefill, heads, options
        )
        out = prefill_out.reshape(out.shape)
        writes.append(written)
    if inputs.decode is not None:
        out = _over_first_rows(decode_out, inputs.decode, out)
    back = _all_to_all(out, split=0, concat=2).reshape(rows, -1)
    pool, back = lax.optimization_barrier((pool, back))
    return back, _write(pool, layer, writes)


def _attend_decodes(
    received, pool, layer, inputs: DecodeInputs, heads: HeadLayout, options: AttentionOptions
):
    """Decode attention of all groups' rows for this device's heads, group after group."""
    num_q, num_kv, head_dim = heads.q_per_device, heads.kv_per_device, received.shape[2]
    decode_rows = inputs.context_lens.shape[0] // heads.groups
    by_group = received.reshape(heads.groups, -1, *received.shape[1:])[:, :decode_rows]
    q, k, v = jnp.split(_flat(by_group), (num_q, num_q + num_kv), axis=1)
    grouped = q.reshape(-1, num_kv, heads.q_per_kv, head_dim)
    out = options.decode(grouped, k, v, pool, layer, inputs)
    return out, (k, v, _slots(inputs.writes, num_kv, pool))


def _over_first_rows(decode_out, inputs: DecodeInputs, out: Float[Array, "groups rows width"]):
    """`out` with each group's used decode rows in the place of its first ones."""
    groups, rows, _ = out.shape
    decoded = decode_out.reshape(groups, -1, out.shape[2])
    used = inputs.context_lens.reshape(groups, -1) > 0
    missing = rows - decoded.shape[1]
    decoded = jnp.pad(decoded, [(0, 0), (0, missing), (0, 0)])
    return jnp.where(jnp.pad(used, [(0, 0), (0, missing)])[..., None], decoded, out)


def _decode_path(
    q, kv, pool, layer, inputs: DecodeInputs, heads: HeadLayout, options: AttentionOptions
):
    """Local attention of the first rows, all heads of the rank."""
    rows, head_dim = inputs.context_lens.shape[0], q.shape[3]
    k, v = jnp.split(kv[:rows, :: heads.replicas], 2, axis=2)
    k = k.reshape(rows, heads.kv_per_rank, head_dim)
    v = v.reshape(rows, heads.kv_per_rank, head_dim)
    grouped = q[:rows].reshape(rows, heads.kv_per_rank, heads.q_per_kv_decode, head_dim)
    out = options.decode(grouped, k, v, pool, layer, inputs)
    return out.reshape(rows, -1), (k, v, _slots(inputs.writes, heads.kv_per_rank, pool))


def _prefill_path(
    q, kv, pool, layer, inputs: PrefillInputs, heads: HeadLayout, options: AttentionOptions
):
    """Attention of all groups' chunks for this device's heads, and back to this group's rows."""
    rows, groups = q.shape[:2]
    out, written = _attend_prefill(_to_heads(q, kv), pool, layer, inputs, heads, options)
    back = _all_to_all(out.reshape(groups, rows, -1), split=0, concat=2).reshape(rows, -1)
    return back, written


def _to_heads(q, kv):
    """The rows of all groups, one after the other, with this device's heads: q, k and v."""
    rows, groups, _, head_dim = q.shape
    sent = jnp.concatenate([q, kv], axis=2)
    return _all_to_all(sent, split=1, concat=0).reshape(rows * groups, -1, head_dim)


def _attend_prefill(
    received, pool, layer, inputs: PrefillInputs, heads: HeadLayout, options: AttentionOptions
):
    """Attention of all groups' chunks for this device's heads, on the rows as received."""
    num_q, num_kv = heads.q_per_device, heads.kv_per_device
    out = options.kernels.prefill(received, pool, layer, inputs, heads)
    k, v = received[:, num_q : num_q + num_kv], received[:, num_q + num_kv :]
    return out, (k, v, _slots(inputs.writes, num_kv, pool))


def _hand_off(chunk_kv, pool, layer, inputs: HandoffInputs, heads: HeadLayout):
    """Head shards of some tokens, from everywhere to the groups that will decode them."""
    num_kv, head_dim = heads.kv_per_device, pool.shape[4]
    flat = pool.reshape(pool.shape[0], 2, -1, head_dim)
    rows = _slots(jnp.maximum(inputs.sources, 0), num_kv, pool)
    shards = jnp.moveaxis(flat[layer, :, rows], 3, 0)  # [2, groups, tokens, heads, head_dim]
    if chunk_kv is not None:
        row = jnp.maximum(-1 - inputs.sources, 0)
        fresh = jnp.stack([jnp.take(x, row, axis=0, mode="clip") for x in chunk_kv])
        shards = jnp.where((inputs.sources < 0)[None, :, :, None, None], fresh, shards)
    arrived = _all_to_all(shards, split=1, concat=1)[:, :: heads.replicas]
    k, v = jnp.moveaxis(arrived, 1, 2).reshape(2, -1, heads.kv_per_rank, head_dim)
    return k, v, _slots(inputs.writes, heads.kv_per_rank, pool)


def _merge(decode_out, prefill_out, inputs: DecodeInputs | None, q):
    """Both results on the packed axis: decode rows first."""
    rows = q.shape[0]
    if prefill_out is None:
        return decode_out
    if decode_out is None or inputs is None:
        return prefill_out
    padded = jnp.pad(decode_out, [(0, rows - decode_out.shape[0]), (0, 0)])
    return jnp.where((jnp.arange(rows) < inputs.num_rows)[:, None], padded, prefill_out)


def _write(pool, layer, writes):
    """All new keys and values of the layer by one scatter; rows past the pool are dropped."""
    if not writes:
        return pool
    keys, values, slots = (jnp.concatenate([_flat(w[i]) for w in writes]) for i in range(3))
    flat = pool.reshape(pool.shape[0], 2, -1, pool.shape[4])
    new = jnp.stack([keys, values], axis=1).astype(pool.dtype)
    flat = flat.at[layer, :, slots].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)


def _flat(x):
    """Tokens and heads as one axis."""
    return x.reshape(-1, *x.shape[2:])


def _slots(
    first: Int[Array, "*tokens"], num_heads: int, pool: _Pool
) -> Int[Array, "*tokens heads"]:
    """Pool rows of a token's heads, given the first one's: a page is `[heads, tokens]`."""
    return first[..., None] + jnp.arange(num_heads) * (pool.shape[3] // num_heads)


def _all_to_all(x, split: int, concat: int):
    """Over the groups; axis `split` is theirs. A single group keeps what it has."""
    if lax.axis_size(SP) == 1:
        return x
    return lax.all_to_all(x, SP, split_axis=split, concat_axis=concat, tiled=True)
