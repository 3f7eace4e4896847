"""KV on its way from all groups to the one that will decode it: when it starts, what goes when.

A prompt decodes once all its pages are with its decode group. An iteration carries a static number
of pages to each group, hidden behind its attention, so pages go while the prompt is still being
prefilled: it is placed some chunks before its last, and from then on whatever is complete may go.
"""

from __future__ import annotations

from collections.abc import Iterable

from conflux_jax.plan import Handoff, PoolGeometry
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.state import RequestState


def is_nearly_done(pages: int, tokens_left: int, budget: int, per_group: int) -> bool:
    """Whether a prompt needs its decode group now, with the chunk that leaves `tokens_left`.

    pages: to hand over. budget: prefill tokens of an iteration, about. per_group: pages that an
    iteration can carry to one group. True from one iteration before the latest at which the
    iteration of the last chunk can still complete the hand-off: one chunk before the last for a
    prompt that an iteration can carry whole. Earlier would only bind a row, and a choice of group
    that grows stale.

    Worked, 8 pages an iteration and chunks of 100 tokens: 8 pages start with one chunk to come, 20
    pages (three iterations' worth) with three:

    >>> [is_nearly_done(8, left, 100, 8) for left in (200, 101, 100, 0)]
    [False, False, True, True]
    >>> [is_nearly_done(20, left, 100, 8) for left in (400, 301, 300, 0)]
    [False, False, True, True]
    """
    chunks_left = -(-tokens_left // max(budget, 1))
    return pages > per_group * (chunks_left - 1)


def plan_handoffs(
    states: Iterable[RequestState], memory: Memory, geometry: PoolGeometry, per_group: int
) -> tuple[list[Handoff], list[RequestState]]:
    """Up to `per_group` pages into each group; who comes first in `states` is served first. Also
    returns the states whose last page goes now.

    A page may go once all its tokens are in the pool or in this iteration's chunk; a last page that
    is not full goes when the prompt has ended, and so last.
    """
    left = [per_group] * geometry.groups
    most = sum(left)
    handoffs, complete = [], []
    for state in states:
        if not most:
            break
        if state.group < 0 or not left[state.group]:
            continue
        ready = len(state.pages)
        if state.num_tokens < len(state.token_ids):
            ready = state.num_tokens // geometry.page_tokens
        count = min(left[state.group], ready - state.num_handed)
        if count <= 0:
            continue
        left[state.group] -= count
        most -= count
        handoffs.append(
            Handoff(state.slot, state.group, state.num_handed, count, len(state.token_ids))
        )
        memory.hand_over(state, count)
        if state.num_handed == len(state.pages):
            complete.append(state)
    return handoffs, complete
