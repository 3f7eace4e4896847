"""Which group decodes a prompt that has finished."""

from __future__ import annotations

from collections.abc import Sequence


def choose_group(
    context_tokens: Sequence[int],
    num_rows: Sequence[int],
    max_rows: int,
    free_pages: Sequence[int],
    pages: int,
) -> int:
    """The group with the least decode context that has a free decode row and `pages` free pages,
    or -1. Ties go to the lowest index.

    Decode attention reads all of a group's context at each iteration, so the group with the most of
    it sets the pace: the next request goes where there is least.

    >>> choose_group((900, 300, 300, 500), (4, 1, 1, 2), 8, (9, 9, 9, 9), 2)
    1
    >>> choose_group((900, 300, 300, 500), (4, 1, 8, 2), 8, (9, 1, 9, 9), 2)
    3
    """
    best = -1
    for group, context in enumerate(context_tokens):
        if num_rows[group] >= max_rows or free_pages[group] < pages:
            continue
        if best < 0 or context < context_tokens[best]:
            best = group
    return best
