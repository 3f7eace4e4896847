"""Who comes when: a counter in global memory that programs of a launch draw tickets from.

Inline PTX, which the GPU interpreter cannot run: what rests on it is interpreted by variants.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Int

from pallas_kernels.building_blocks import Ref

TICKET_WORDS = 2  # int32 of shared memory that `draw_ticket` needs


def ticket_box() -> Any:
    """Shared memory for `draw_ticket`."""
    return plgpu.SMEM((TICKET_WORDS,), jnp.int32)


def draw_ticket(counter: Ref, last: Int[Array, ""] | int, box: Ref) -> Int[Array, ""]:
    """A warpgroup's ticket: 0 for the first that draws, up to `last`, with which the counter is 0
    again, as it must be at first. counter: int32 `[1]` in global memory.

    What the warpgroup wrote before, by itself or by finished copies, is seen by whoever draws a
    later ticket."""
    box[1] = jnp.int32(last)

    def draw(_, counter, box):
        i32 = ir.IntegerType.get_signless(32)
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            address = utils.memref_ptr(box)
            bound = utils.inline_ptx(
                "ld.shared.u32 $0, [$1 + 4];", address, result_types=i32, has_side_effects=True
            )
            ticket = utils.inline_ptx(
                "atom.acq_rel.gpu.inc.u32 $0, [$1], $2;",
                utils.memref_ptr(counter),
                bound,
                result_types=i32,
                has_side_effects=True,
            )
            utils.inline_ptx("st.shared.u32 [$0], $1;", address, ticket, has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    inline(draw)(counter, box)
    return box[0]
