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
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Float, Int

from conflux_jax.config import ConfigError
from conflux_jax.models.heads import HeadLayout
from conflux_jax.platform import GPU_PLATFORMS
from pallas_kernels.blockwise import Segments, decode_attention, prefill_attention

SP = "sp"
DECODE_STREAM = "gpu_stream:1"


class DecodeInputs(NamedTuple):
    """This group's decode rows, the first of the packed axis. Padded rows: context 0, and a write
    past the pool. plan: what the kernels have made of it before the layers."""

    num_rows: Int[Array, ""]
    context_lens: Int[Array, " decode_rows"]
    page_table: Int[Array, "decode_rows max_pages"]
    writes: Int[Array, " decode_rows"]
    plan: Any = None


class PrefillInputs(NamedTuple):
    """The chunks of all groups, the same on every device but for page ids.

    What the all-to-all brings are the rows of all groups, group by group: "received" order. In
    "compact" order the chunks' tokens lie end to end. received: for each compact token, its
    received row. compact: the inverse, for each received row its compact token. writes: for each
    received row its first pool row, past the pool where it is no chunk's. segments: on the compact
    axis. plan: what the kernels have made of it before the layers.
    """

    received: Int[Array, " tokens"]
    compact: Int[Array, " tokens"]
    writes: Int[Array, " tokens"]
    segments: Segments
    plan: Any = None


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

    Operands are whole arrays that exist anyway, with the indices of what to use: a kernel can
    address rows and heads as it likes, while XLA would have to launch a copy for every slice or
    gather in front of it or behind it. Both methods see queries, keys and values of a token as
    consecutive heads.
    """

    @property
    def streams(self) -> bool:
        """Whether `decode` can be put on a GPU stream of its own. XLA takes kernel launches and
        single `lax` operations there, but no loops and no nested jit."""
        ...

    def planned(
        self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout
    ) -> AttentionInputs:
        """`inputs` with whatever `decode` and `prefill` want made once, before the layers."""
        ...

    def decode(
        self,
        sent: Float[Array, "groups rows qkv_heads head_dim"],
        pool: _Pool,
        layer: Int[Array, ""],
        inputs: DecodeInputs,
        heads: HeadLayout,
    ) -> Float[Array, "decode_rows q_width"]:
        """One query a row against its context in the pool and its own key and value, which are
        not in the pool yet. The rows are the first of `sent`; its groups are shares of heads. The
        result has the heads in the order `[group][head]`."""
        ...

    def prefill(
        self,
        received: Float[Array, "tokens qkv_heads head_dim"],
        pool: _Pool,
        layer: Int[Array, ""],
        inputs: PrefillInputs,
        heads: HeadLayout,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of the chunks, to themselves and to their context in the pool, in
        received order. Rows that are no chunk's may hold anything, but their values are finite."""
        ...


@runtime_checkable
class FusedKernels(AttentionKernels, Protocol):
    """Kernels that can attend for both phases at once."""

    def mixed(
        self,
        sent: Float[Array, "groups rows qkv_heads head_dim"],
        received: Float[Array, "tokens qkv_heads head_dim"],
        pool: _Pool,
        layer: Int[Array, ""],
        decode: DecodeInputs,
        prefill: PrefillInputs,
        heads: HeadLayout,
    ) -> tuple[Float[Array, "decode_rows q_width"], Float[Array, "tokens q_heads head_dim"]]:
        """`decode` and `prefill` in one launch."""
        ...


@dataclass(frozen=True)
class XlaKernels:
    """The XLA path, on any device: see `pallas_kernels.blockwise`."""

    streams: bool = False

    def planned(self, inputs: AttentionInputs, heads: HeadLayout, decode_heads: HeadLayout):
        return inputs

    def decode(self, sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout):
        table, context_lens = inputs.page_table, inputs.context_lens
        q, k, v = decode_qkv(sent, context_lens.shape[0], heads)
        out = decode_attention(q, k, v, pool, layer, table, context_lens)
        return out.reshape(q.shape[0], -1)

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
    fused: one launch attends for both phases, between the all-to-alls.
    """

    ordered: bool = True
    decode_on_stream: bool = False
    fused: bool = False
    kernels: AttentionKernels = XlaKernels()

    @property
    def overlap(self) -> str:
        """As the config has it."""
        return "none" if self.ordered else "fused" if self.fused else "stream"

    @classmethod
    def make(
        cls, overlap: str | None, platform: str, kernels: AttentionKernels | None = None
    ) -> AttentionOptions:
        """overlap: `none`, `stream`, `fused`, or None for what platform and kernels can do: streams
        or nothing. A CPU has neither streams nor kernels for both phases: there the two only drop
        the order. Raises ConfigError where it cannot work."""
        kernels = kernels or XlaKernels()
        on_gpu = platform in GPU_PLATFORMS
        overlap = overlap or ("stream" if on_gpu and kernels.streams else "none")
        streams = overlap == "stream" and on_gpu
        if streams and not kernels.streams:
            raise ConfigError(
                "overlap: stream needs attention kernels that run on a stream of their own; "
                f"{type(kernels).__name__} have loops. Use none"
            )
        fused = overlap == "fused" and on_gpu
        if fused and not isinstance(kernels, FusedKernels):
            raise ConfigError(
                "overlap: fused needs attention kernels with one launch for both phases; "
                f"{type(kernels).__name__} have none. Use stream or none"
            )
        return cls(overlap == "none", streams, fused, kernels)


def split_attention(
    qkv: Float[Array, "rows groups qkv_heads head_dim"],
    pool: _Pool,
    layer: Int[Array, ""],
    inputs: AttentionInputs,
    heads: HeadLayout,
    options: AttentionOptions,
) -> tuple[Float[Array, "rows q_width"], _Pool]:
    """Attention of every row of this group, query heads in the order of `qkv`, and the pool with
    the layer's new KV in it. `qkv`: for each share of the heads its queries, keys and values."""
    # Made once: its readers shall not each rotate the projection again.
    sent = lax.optimization_barrier(jnp.moveaxis(qkv, 1, 0))
    decode_out = back = chunk_kv = None
    writes: list[tuple[_Rows, _Rows, Int[Array, "tokens kv_heads"]]] = []
    fused = options.fused and inputs.decode is not None and inputs.prefill is not None
    if fused:
        decode_out, back, writes = _fused_path(sent, pool, layer, inputs, heads, options)
        chunk_kv = writes[-1][:2]
    if inputs.decode is not None and not fused:
        decode_out, written = _decode_path(sent, pool, layer, inputs.decode, heads, options)
        writes.append(written)
        if options.ordered and inputs.prefill is not None:
            decode_out, sent = lax.optimization_barrier((decode_out, sent))
    if inputs.prefill is not None and not fused:
        back, written = _prefill_path(sent, pool, layer, inputs.prefill, heads, options)
        chunk_kv = written[:2]
        writes.append(written)
    if inputs.handoff is not None:
        writes.append(_hand_off(chunk_kv, pool, layer, inputs.handoff, heads))
    # Every reader of the old pool is done before the scatter below may touch it.
    pool, decode_out, back = lax.optimization_barrier((pool, decode_out, back))
    return _merge(decode_out, back, inputs.decode, qkv.shape[0]), _write(pool, layer, writes)


def spread_attention(
    qkv: Float[Array, "rows groups qkv_heads head_dim"],
    pool: _Pool,
    layer: Int[Array, ""],
    inputs: AttentionInputs,
    heads: HeadLayout,
    options: AttentionOptions,
) -> tuple[Float[Array, "rows q_width"], _Pool]:
    """`split_attention` as other systems have it, to measure against: decode rows go through the
    all-to-alls as well, and every device attends for all groups' decodes with its own heads."""
    groups, rows, own = heads.groups, qkv.shape[0], heads.alone
    sent = lax.optimization_barrier(jnp.moveaxis(qkv, 1, 0))
    received = _all_to_all(sent, axis=0)
    decode_out = None
    out = jnp.zeros((groups, rows, heads.q_per_device * qkv.shape[3]), qkv.dtype)
    writes: list[tuple[_Rows, _Rows, Int[Array, "tokens kv_heads"]]] = []
    if inputs.decode is not None:
        decode_rows = inputs.decode.context_lens.shape[0] // groups
        first = received[:, :decode_rows].reshape(1, groups * decode_rows, *received.shape[2:])
        decode_out, written = _decode_path(first, pool, layer, inputs.decode, own, options)
        writes.append(written)
        if options.ordered and inputs.prefill is not None:
            decode_out, received = lax.optimization_barrier((decode_out, received))
    if inputs.prefill is not None:
        out, written = _attend_chunks(received, pool, layer, inputs.prefill, heads, options)
        writes.append(written)
    if inputs.decode is not None:
        out = _over_first_rows(decode_out, inputs.decode, out)
    pool, back = lax.optimization_barrier((pool, _all_to_all(out, axis=0)))
    return jnp.moveaxis(back, 0, 1).reshape(rows, -1), _write(pool, layer, writes)


def _over_first_rows(decode_out, inputs: DecodeInputs, out: Float[Array, "groups rows width"]):
    """`out` with each group's used decode rows in the place of its first ones."""
    groups, rows, _ = out.shape
    decoded = decode_out.reshape(groups, -1, out.shape[2])
    used = inputs.context_lens.reshape(groups, -1) > 0
    missing = rows - decoded.shape[1]
    decoded = jnp.pad(decoded, [(0, 0), (0, missing), (0, 0)])
    return jnp.where(jnp.pad(used, [(0, 0), (0, missing)])[..., None], decoded, out)


def _decode_path(
    sent, pool, layer, inputs: DecodeInputs, heads: HeadLayout, options: AttentionOptions
):
    """Local attention of the first rows, all heads of the rank."""
    attend: Any = partial(options.kernels.decode, heads=heads)
    if options.decode_on_stream:
        space = jax.memory.Space.Device
        attend = compute_on(attend, compute_type=DECODE_STREAM, out_memory_spaces=space)
    return attend(sent, pool, layer, inputs), _decode_writes(sent, pool, inputs, heads)


def _decode_writes(sent, pool, inputs: DecodeInputs, heads: HeadLayout):
    k, v = _decode_kv(sent, inputs.writes.shape[0], heads)
    return k, v, _slots(inputs.writes, heads.kv_per_rank, pool)


def decode_qkv(
    sent: Float[Array, "groups rows qkv_heads head_dim"], rows: int, heads: HeadLayout
) -> tuple[Float[Array, "decode_rows kv_heads q_per_kv head_dim"], _Rows, _Rows]:
    """Queries, keys and values of the first rows, by the KV heads of the rank."""
    q = jnp.moveaxis(sent[:, :rows, : heads.q_per_device], 0, 1)
    q = q.reshape(rows, heads.kv_per_rank, heads.q_per_kv_decode, sent.shape[3])
    return q, *_decode_kv(sent, rows, heads)


def _decode_kv(sent, rows: int, heads: HeadLayout) -> tuple[_Rows, _Rows]:
    """Keys and values of the first rows, each KV head of the rank once."""
    kv = jnp.moveaxis(sent[:: heads.replicas, :rows, heads.q_per_device :], 0, 1)
    k, v = jnp.split(kv, 2, axis=2)
    shape = rows, heads.kv_per_rank, sent.shape[3]
    return k.reshape(shape), v.reshape(shape)


def _prefill_path(
    sent, pool, layer, inputs: PrefillInputs, heads: HeadLayout, options: AttentionOptions
):
    """Attention of all groups' chunks for this device's heads, and back to this group's rows:
    `[groups, rows, width]`, for each group what its share of the heads says."""
    received = _all_to_all(sent, axis=0)
    out, written = _attend_chunks(received, pool, layer, inputs, heads, options)
    return _all_to_all(out, axis=0), written


def _attend_chunks(
    received, pool, layer, inputs: PrefillInputs, heads: HeadLayout, options: AttentionOptions
):
    """Attention of all groups' rows for this device's heads: `[groups, rows, width]`."""
    groups, rows, _, head_dim = received.shape
    flat = received.reshape(groups * rows, -1, head_dim)
    out = options.kernels.prefill(flat, pool, layer, inputs, heads)
    return out.reshape(groups, rows, -1), _prefill_writes(flat, pool, inputs, heads)


def _prefill_writes(received, pool, inputs: PrefillInputs, heads: HeadLayout):
    num_q, num_kv = heads.q_per_device, heads.kv_per_device
    k, v = received[:, num_q : num_q + num_kv], received[:, num_q + num_kv :]
    return k, v, _slots(inputs.writes, num_kv, pool)


def _fused_path(
    sent, pool, layer, inputs: AttentionInputs, heads: HeadLayout, options: AttentionOptions
):
    """Both paths with one launch for their attention: (decode's result, prefill's back on its
    groups, what each writes)."""
    assert inputs.decode is not None and inputs.prefill is not None
    received = _all_to_all(sent, axis=0)
    groups, rows, _, head_dim = received.shape
    flat = received.reshape(groups * rows, -1, head_dim)
    kernels = options.kernels
    assert isinstance(kernels, FusedKernels)  # `AttentionOptions.make` saw to it
    decode_out, out = kernels.mixed(sent, flat, pool, layer, inputs.decode, inputs.prefill, heads)
    writes = [
        _decode_writes(sent, pool, inputs.decode, heads),
        _prefill_writes(flat, pool, inputs.prefill, heads),
    ]
    return decode_out, _all_to_all(out.reshape(groups, rows, -1), axis=0), writes


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
    arrived = _all_to_all(shards, axis=1)[:, :: heads.replicas]
    k, v = jnp.moveaxis(arrived, 1, 2).reshape(2, -1, heads.kv_per_rank, head_dim)
    return k, v, _slots(inputs.writes, heads.kv_per_rank, pool)


def _merge(decode_out, back, inputs: DecodeInputs | None, rows: int):
    """Both results on the packed axis: decode rows first."""
    if back is None:
        return decode_out
    # Only now, behind the barrier, so that one kernel turns the rows around and merges them.
    prefill_out = jnp.moveaxis(back, 0, 1).reshape(rows, -1)
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


def _all_to_all(x, axis: int):
    """Over the groups, for which `axis` has a place each. A single group keeps what it has."""
    if lax.axis_size(SP) == 1:
        return x
    return lax.all_to_all(x, SP, split_axis=axis, concat_axis=axis, tiled=True)
