"""Decode and prefill attention on Hopper in one launch, the multiprocessors divided between them.

The first `decode_sms` programs begin with decode attention, the others with prefill attention, each
taking units from its queue. Who finds its queue empty goes on with the other's: so both sides end
at about the same time, whatever the estimate was that `decode_sms` came from. Decode attention
reads memory and prefill attention multiplies, so each has what the other leaves.

The bodies are those of the kernels for one side. A side has the shared memory for itself while it
runs: the two lie over each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import decode_kernel, prefill_kernel
from pallas_kernels.building_blocks import LN_2, SMS, Ref, check_pool
from pallas_kernels.decode_attention import merge_divided, result_types
from pallas_kernels.decode_kernel import DecodeShape, Results, Scratch, decode_scratch
from pallas_kernels.prefill_attention import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    PrefillTuning,
    check_prefill,
    merge_divided_keys,
    prefill_operands,
    prefill_shape,
)
from pallas_kernels.prefill_memory import CONSUMERS, PrefillRefs, PrefillShape, prefill_scratch
from pallas_kernels.prefill_plan import PrefillPlan
from pallas_kernels.work_queue import Listener, Queue, queue_barriers, queue_words, slots_and_box

STRETCHES = 4  # of decode work for each program, so that none is long when the others are done
DECODE, PREFILL = range(2)  # queues: the counters' places, and the traces'


class DecodeOperands(NamedTuple):
    """As `decode_attention.decode_rows` has them. plan: of as many stretches as its shape's
    `programs`, usually STRETCHES for each of the launch's."""

    plan: Int[Array, "stretches fields"]
    q: Float[Array, "q_rows head_dim"]
    new_k: Float[Array, "k_rows head_dim"]
    new_v: Float[Array, "v_rows head_dim"]
    page_table: Int[Array, "rows max_pages"]
    context_lens: Int[Array, " rows"]


class PrefillOperands(NamedTuple):
    """As `prefill_attention.prefill_attention` has them."""

    qkv: Float[Array, "tokens qkv_heads head_dim"]
    plan: PrefillPlan


class MixedResults(NamedTuple):
    """Of `decode_rows` and of `prefill_attention`."""

    decode: Float[Array, "rows kv_heads q_per_kv head_dim"]
    decode_lse: Float[Array, "rows kv_heads q_per_kv"]
    prefill: Float[Array, "tokens q_heads head_dim"]
    prefill_lse: Float[Array, "q_heads block_rows"]


@dataclass(frozen=True)
class MixedShape:
    """What a mixed kernel is compiled for. programs: of the launch, one an SM. decode_sms: how many
    of them begin with decode attention."""

    decode: DecodeShape
    prefill: PrefillShape
    programs: int
    decode_sms: int

    @property
    def interpretable(self) -> bool:
        return self.decode.interpretable


def num_counters(stretches: int, prefill_tickets: int) -> int:
    """Length of `mixed_attention`'s counters. prefill_tickets: `num_tickets` of its plan."""
    return 2 + stretches + prefill_tickets


def mixed_attention(
    shape: DecodeShape,
    decode: DecodeOperands,
    prefill: PrefillOperands,
    pool: Float[Array, "layers two pages page_rows head_dim"],
    layer: Int[Array, ""],
    queues: Int[Array, " counters"] | Int[Array, "two programs takes"],
    *,
    kv_heads: int,
    decode_sms: int,
    programs: int = SMS,
) -> MixedResults:
    """`decode_rows` and `prefill_attention` on the same pool, with the same results.

    shape: of the decode side; `interpretable` counts for both. kv_heads: of prefill's `qkv`.
    queues: int32 zeros, `num_counters` of them, in memory of their own, in which the kernel counts
    and which it leaves as they were; where interpretable, instead who takes what: for decode's
    stretches and for prefill's units (items times query heads) what each program gets one after the
    other, everything once, then their number. Then further launches merge both sides' results.
    Raises ValueError that names the argument that breaks a limit.
    """
    check_pool(pool, shape.kv_heads)
    shape.check()
    check_prefill(prefill.qkv, pool, kv_heads)
    if not 0 <= decode_sms <= programs:
        raise ValueError(f"decode_sms: must be 0 to {programs} (programs), got {decode_sms}")
    tuning = PrefillTuning(programs, interpretable=shape.interpretable)
    mixed = MixedShape(
        replace(shape, merges=not shape.interpretable),
        prefill_shape(prefill.qkv, pool, prefill.plan, kv_heads, tuning),
        programs,
        decode_sms,
    )
    expected = num_counters(shape.programs, mixed.prefill.half_parts)
    if not shape.interpretable and queues.shape != (expected,):
        raise ValueError(f"queues: must be {expected} counters, got {queues.shape}")
    decode_types, part_types = result_types(mixed.decode)
    launch = plgpu.kernel(
        partial(_mixed_kernel, mixed, pool.shape),
        out_type=(*decode_types, *part_types, *mixed.prefill.result_types),
        scratch_types=_scratch(mixed),
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="mixed_attention",
    )
    rows = decode.q, decode.new_k, decode.new_v
    operands = prefill_operands(prefill.qkv, pool, layer, prefill.plan)
    results = launch(queues, decode.plan, decode.context_lens, decode.page_table, *rows, *operands)
    out, lse, parts, part_lse, *prefill_results = results
    if shape.interpretable:
        out, lse = merge_divided(
            mixed.decode, decode.plan, decode.context_lens, out, lse, parts, part_lse
        )
    if shape.interpretable and mixed.prefill.parts:
        prefill_results = merge_divided_keys(
            mixed.prefill, programs, prefill.plan, operands, prefill_results
        )
    by_head = shape.num_rows, shape.kv_heads, shape.group
    lse = lse[:, : shape.group].reshape(by_head) * LN_2
    return MixedResults(out.reshape(*by_head, pool.shape[4]), lse, *prefill_results[:2])


def _scratch(shape: MixedShape) -> dict[str, Any]:
    """Memory of both sides, in the same place; barriers of each; and `side_done`, at which the
    warpgroups meet before it changes hands."""
    decode, prefill = decode_scratch(shape.decode), prefill_scratch(shape.prefill)
    decode_memory, decode_barriers = _by_kind(decode._asdict())
    prefill_memory, prefill_barriers = _by_kind(prefill)
    return {
        "memory": plgpu.RefUnion(decode_memory, prefill_memory),
        "decode_barriers": decode_barriers,
        "prefill_barriers": prefill_barriers,
        "queue_words": queue_words(2),
        "queue_barriers": (queue_barriers(listeners=1), queue_barriers(listeners=CONSUMERS)),
        "side_done": plgpu.Barrier(num_arrivals=CONSUMERS + 1),
    }


def _by_kind(scratch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(memory, barriers), without what is None."""
    barriers = {k: v for k, v in scratch.items() if isinstance(v, plgpu.Barrier)}
    return {k: v for k, v in scratch.items() if v is not None and k not in barriers}, barriers


def _mixed_kernel(
    shape: MixedShape, pool_shape: tuple[int, ...], *refs: Ref, memory: Ref, **scratch: Any
) -> None:
    (queues, plan, lens, table, q, new_k, new_v, layer), refs = refs[:8], refs[8:]
    items, num_items, runs, prefill_table, qkv, pool, *results = refs
    decode_memory, prefill_memory = memory
    smem = Scratch(**{"weights": None, **decode_memory, **scratch["decode_barriers"]})
    tickets = None
    if shape.prefill.parts and not shape.interpretable:
        tickets = queues.at[pl.ds(2 + shape.decode.programs, shape.prefill.half_parts)]
    prefill_refs = PrefillRefs(
        *(layer, items, num_items, runs, prefill_table, qkv, pool, *results[4:]),
        scratch={**prefill_memory, **scratch["prefill_barriers"]},
        tickets=tickets,
    )
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    side = partial(_units, shape, queues, program, scratch)
    stretches = jnp.int32(shape.decode.programs)
    begins_with_decode = program < shape.decode_sms

    def in_turn(decode, prefill) -> None:
        """Both sides, in the program's order. All warpgroups are done with one before the next."""

        def meet() -> None:
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["side_done"])
            plgpu.barrier_wait(scratch["side_done"])

        pl.when(begins_with_decode)(decode)
        meet()
        prefill()
        meet()
        pl.when(jnp.logical_not(begins_with_decode))(decode)

    def attend_stretch(stretch) -> None:
        rows, decode_results = (q, new_k, new_v), Results(*results[:4])
        tickets = queues.at[pl.ds(2, shape.decode.programs)] if shape.decode.merges else None
        decode_kernel.consume(
            shape.decode, stretch, plan, lens, rows, decode_results, smem, tickets
        )

    def load_stretch(stretch) -> None:
        decode_kernel.produce(
            shape.decode, pool_shape, stretch, plan, lens, table, layer, pool, smem
        )

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def decode() -> None:  # one consumer keeps up with memory; the other rests
            @pl.when(warpgroup == 0)
            def _():
                _for_stretches(side(DECODE, stretches, False), attend_stretch, stretches)

        def prefill() -> None:
            units = side(PREFILL, num_items[0] * shape.prefill.q_heads, False)
            prefill_kernel.consume(shape.prefill, prefill_refs, warpgroup, units)

        in_turn(decode, prefill)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def decode() -> None:
            _for_stretches(side(DECODE, stretches, True), load_stretch, stretches)

        def prefill() -> None:
            units = side(PREFILL, num_items[0] * shape.prefill.q_heads, True)
            prefill_kernel.produce(shape.prefill, prefill_refs, units)

        in_turn(decode, prefill)


def _units(
    shape: MixedShape, queues: Ref, program, scratch: dict[str, Any], side: int, size, takes: bool
):
    """A side's queue, as the warpgroup sees it that `takes`, or as the others do."""
    slots, box = slots_and_box(scratch["queue_words"], side)
    barriers = scratch["queue_barriers"][side]
    if not takes:
        return Listener(program, shape.programs, slots, **barriers)
    counter = None if shape.interpretable else queues.at[pl.ds(side, 1)]
    trace = queues.at[side] if shape.interpretable else None
    return Queue(size, program, shape.programs, counter, trace, slots, box, **barriers)


def _for_stretches(units: Queue | Listener, work, stretches) -> None:
    """`work(stretch)` for all that the program gets."""

    def one(carry):
        n, stretch = carry
        work(stretch)
        return n + 1, units.unit(n + 1)

    zero = jnp.int32(0)
    n, _ = lax.while_loop(lambda c: c[1] < stretches, one, (zero, units.unit(zero)))
    units.finish(n)
