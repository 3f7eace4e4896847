"""Which group decodes a prompt."""

from __future__ import annotations

from collections.abc import Sequence


def choose_group(
    context_tokens: Sequence[int],
    can_hold: Sequence[bool],
    num_tokens: int,
    handoff_iterations: Sequence[int],
    packed: Sequence[int] | None = None,
) -> int:
    """The group for a prompt of `num_tokens`, or -1 where no group can hold it.

    can_hold: whether a group has a row and pages for it. handoff_iterations: how many iterations it
    would take until the prompt's pages are there, behind what else is on its way to that group.
    packed: free pages of each group, when memory is short on all of them.

    Decode attention reads all of a group's context at each iteration, so the group with the most of
    it sets the pace. Where the prompt stays below that pace, the choice is free, and it goes where
    it can decode soonest, among equals where there is least context. Else it goes where there is
    least context. Ties go to the lowest index. When memory is short everywhere, it goes to the
    fullest group that can hold it, so that what is free stays in one piece for a long prompt.

    >>> choose_group((900, 300, 300, 500), (True, True, True, True), 100, (1, 2, 1, 1))
    2
    >>> choose_group((900, 300, 300, 500), (True, True, True, True), 700, (1, 2, 1, 1))
    1
    >>> choose_group((900, 300, 300, 500), (True, False, False, True), 100, (1, 1, 1, 1))
    3
    >>> choose_group((900, 300, 300, 500), (True,) * 4, 100, (1, 1, 1, 1), packed=(9, 30, 8, 40))
    2
    """
    if packed is not None:
        able = [group for group, can in enumerate(can_hold) if can]
        return min(able, key=packed.__getitem__, default=-1)
    pace = max(context_tokens)
    best, least = -1, (False, 0, 0)
    for group, context in enumerate(context_tokens):
        if not can_hold[group]:
            continue
        slows = context + num_tokens > pace
        rank = (slows, 0 if slows else handoff_iterations[group], context)
        if best < 0 or rank < least:
            best, least = group, rank
    return best
