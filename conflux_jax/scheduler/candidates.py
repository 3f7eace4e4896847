"""Which prompts could have a chunk in this iteration, first served first."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.ordering import Ordering
from conflux_jax.scheduler.state import RequestState

LOOK_PAST = 64  # so that a pass stays short while memory is


class Candidate(NamedTuple):
    """overtakes: waiting requests before it in order for which memory is short."""

    state: RequestState
    overtakes: tuple[RequestState, ...] = ()

    @property
    def span(self) -> tuple[int, int]:
        """(tokens done, tokens left)."""
        return self.state.num_tokens, self.state.prefill_left


def find_candidates(
    started: list[RequestState],
    queue: Ordering,
    memory: Memory | None,
    bound: int,
    most: tuple[int, int],
    now: float,
    pace: float,
) -> list[Candidate]:
    """Of the partly prefilled (`started`) and the waiting that memory has room for, the first by
    rank: at most so many, and no more once they have so many tokens left (`most`). memory: None
    admits nobody. bound: `max_bypass`. Nothing is changed."""

    def rank(state: RequestState):
        return queue.rank(state, now, pace)

    pending = sorted(started, key=rank, reverse=True)
    found: list[Candidate] = []
    count, tokens = most
    with closing(_admissible(queue, memory, bound, now, pace)) as waiting:
        head = next(waiting, None)
        while len(found) < count and tokens > 0 and (pending or head is not None):
            if head is None or (pending and rank(pending[-1]) <= rank(head.state)):
                found.append(Candidate(pending.pop()))
                tokens -= found[-1].state.prefill_left
            else:
                found.append(head)
                tokens -= head.state.prefill_left
                head = next(waiting, None) if len(found) < count and tokens > 0 else None
    return found


def _admissible(
    queue: Ordering, memory: Memory | None, bound: int, now: float, pace: float
) -> Generator[Candidate]:
    """Waiting requests that fit one after the other, each beside those before it.

    One for which memory is short may be overtaken by `bound` others, counted on itself; then none
    is admitted before it. At most LOOK_PAST entries behind the first such one are looked at.
    """
    if memory is None:
        return
    room = memory.room()
    skipped: list[RequestState] = []
    passes: list[int] = []
    looked = 0
    for state in queue.waiting(now, pace):
        if looked > min(bound, LOOK_PAST) or not room.slots:
            return
        if state.in_flight or not room.fits(state):
            if state.bypassed >= bound:
                return
            skipped.append(state)
            passes.append(state.bypassed)
            looked += 1
            continue
        room.take(state)
        yield Candidate(state, tuple(skipped))
        looked += bool(skipped)
        passes = [count + 1 for count in passes]
        if any(count >= bound for count in passes):
            return
