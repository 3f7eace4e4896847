"""Pages for what runs already, by arrival; where there are none, the youngest give theirs up.

No livelock: who needs a page takes it from a younger request, so the oldest of all never waits for
another one, and alone it fits (admission made sure).
"""

from __future__ import annotations

from collections.abc import Callable

from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.state import RequestState, Running


def secure_pages(
    running: Running, memory: Memory, preempt: Callable[[RequestState], None]
) -> list[RequestState]:
    """Open a page for each decode whose next token needs one, and place the prompts that wait for a
    decode group. Returns those placed.

    Runs before anything else of an iteration is planned and goes by arrival, so a request that is
    preempted here has no work in this iteration yet, and its pages may be used in it at once.
    """
    unplaced = [state for state in running.handing.values() if state.group < 0]
    if not unplaced and memory.grow_all(running.decoding):
        return []
    needy = running.decoding.full().members + unplaced
    needy.sort(key=lambda state: state.order)
    placed: list[RequestState] = []
    waits = False  # whether an older prompt than the present one found no group
    for state in needy:
        if state.slot < 0:
            continue  # preempted for an older one
        if state.group >= 0:
            _grow(state, running, memory, preempt)
        elif memory.place(state) or (not waits and _force(state, running, memory, preempt)):
            placed.append(state)
        else:
            waits = True
    return placed


def _grow(
    state: RequestState,
    running: Running,
    memory: Memory,
    preempt: Callable[[RequestState], None],
) -> None:
    """A page for a decode, from the youngest where need be; if that is the decode, it goes."""
    while not memory.grow(state):
        victim = running.youngest_holder(state.group)
        preempt(victim)
        if victim is state:
            return


def _force(
    state: RequestState,
    running: Running,
    memory: Memory,
    preempt: Callable[[RequestState], None],
) -> bool:
    """Place the oldest prompt that waits for a group: on pages that were pledged to others, else on
    those of younger requests in the group where fewest are missing. False where even these are too
    few, or no group has a free row: what is older will end."""
    if not memory.geometry.needs_handoff:
        return False  # it has its pages; rows are what it waits for
    if memory.place(state, keep_pledges=False):
        return True
    need = memory.geometry.decode_pages(len(state.token_ids))
    group, most = -1, -1
    for candidate, free in enumerate(memory.free_pages()):
        if memory.num_rows[candidate] < memory.max_rows and free > most:
            younger = (s for s in running.holders(candidate) if s.order > state.order)
            if free + sum(s.pages_in(candidate) for s in younger) >= need:
                group, most = candidate, free
    if group < 0:
        return False
    while memory.pool.num_free(group) < need:
        preempt(running.youngest_holder(group))
    return memory.place(state, keep_pledges=False)
