"""Which units of a launch's work a program does: a share fixed before, or what it takes from a
queue, one unit whenever it has done the last.

In a program one warpgroup takes a unit and tells the others through shared memory. The queue is a
ticket counter (`tickets.py`). Where there are none, in the interpreter, which runs one program
after the other, a trace says who takes what: written down before, as if others had run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.building_blocks import Ref
from pallas_kernels.tickets import TICKET_WORDS, draw_ticket

SLOTS = 2  # units on their way from the taker to the others


@runtime_checkable
class Units(Protocol):
    """Which of the launch's units a program works on: it is number `program` of `programs`."""

    @property
    def program(self) -> Any: ...

    @property
    def programs(self) -> int: ...

    def unit(self, n: Int[Array, ""]) -> Int[Array, ""]:
        """The program's n-th; past the last one any number from that of all units on. Asked for
        once each, in order, by each warpgroup."""
        ...

    def finish(self, taken: Int[Array, ""]) -> None:
        """After the last of `taken` units."""
        ...


@dataclass(frozen=True)
class Share:
    """`Units` divided before the launch."""

    program: Any
    programs: Any

    def unit(self, n: Int[Array, ""]) -> Int[Array, ""]:
        """The program's n-th. Every second round goes in reverse, so that who had the longest unit
        of one round has the shortest of the next."""
        ahead = jnp.where(n % 2 == 0, self.program, self.programs - 1 - self.program)
        return n * self.programs + ahead

    def finish(self, taken: Int[Array, ""]) -> None:
        """Nothing is left to be done."""


@dataclass(frozen=True)
class Queue:
    """`Units` from 0 to `size` - 1, as the warpgroup sees them that takes from the queue.

    counter: int32 `[1]` in global memory, 0 when a launch begins and when it ends; or None, and
    trace: int32 `[programs, takes]`, what each program gets one after the other; `size` at last.
    slots, box: of `slots_and_box`. full, free: of `queue_barriers`. Every program must take until
    it gets `size` or more, and then no more.
    """

    size: Int[Array, ""]
    program: Int[Array, ""]
    programs: int
    counter: Ref | None
    trace: Ref | None
    slots: Ref
    box: Ref
    full: Ref
    free: Ref

    def unit(self, n: Int[Array, ""]) -> Int[Array, ""]:
        """Takes the program's n-th unit, and tells the others."""
        slot = lax.rem(n, jnp.int32(SLOTS))

        @pl.when(n >= SLOTS)
        def _():
            plgpu.barrier_wait(self.free.at[slot])

        if self.counter is None:
            assert self.trace is not None
            taken = self.trace[self.program, n]
        else:
            taken = draw_ticket(self.counter, self.size + (self.programs - 1), self.box)
        self.slots[slot] = taken
        plgpu.barrier_arrive(self.full.at[slot])
        return taken

    def finish(self, taken: Int[Array, ""]) -> None:
        """Waits until the others have heard of everything."""

        @pl.loop(jnp.maximum(taken + 1 - SLOTS, 0), taken + 1)
        def _(n):
            plgpu.barrier_wait(self.free.at[lax.rem(n, jnp.int32(SLOTS))])


@dataclass(frozen=True)
class Listener:
    """`Units` as the other warpgroups see them: what theirs has taken."""

    program: Int[Array, ""]
    programs: int
    slots: Ref
    full: Ref
    free: Ref

    def unit(self, n: Int[Array, ""]) -> Int[Array, ""]:
        """The program's n-th unit, or the queue's size or more."""
        slot = lax.rem(n, jnp.int32(SLOTS))
        plgpu.barrier_wait(self.full.at[slot])
        taken = self.slots[slot]
        plgpu.barrier_arrive(self.free.at[slot])
        return taken

    def finish(self, taken: Int[Array, ""]) -> None:
        """Nothing is left to be done."""


def queue_barriers(listeners: int) -> dict[str, Any]:
    """Of a queue to which so many warpgroups listen."""
    return {
        "full": plgpu.Barrier(num_barriers=SLOTS),
        "free": plgpu.Barrier(num_arrivals=listeners, num_barriers=SLOTS),
    }


def queue_words(queues: int) -> Any:
    """Shared memory of that many queues: one piece, since every piece begins at a kilobyte."""
    return plgpu.SMEM((queues * (SLOTS + TICKET_WORDS),), jnp.int32)


def slots_and_box(words: Ref, queue: int) -> tuple[Ref, Ref]:
    """A queue's part of the words."""
    first = queue * (SLOTS + TICKET_WORDS)
    return words.at[pl.ds(first, SLOTS)], words.at[pl.ds(first + SLOTS, TICKET_WORDS)]
