"""The free lists of KV pages, one per group.

Pages have no order that matters, so a free list is a stack: taking and giving back move one piece
of memory, however many pages there are.

A *holding* is what one call has allocated, with the single pages that were opened for it since, and
comes back whole. It is known by its first page. So one that is freed twice is an error where it
happens, and not a wrong token much later: either its first page is free, or it has more pages than
are out beside all other holdings. Which pages follow the first is not looked at; a mark for each
would cost a pass of the scheduler a fifth of its time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from conflux_jax.plan import Pages


class PageError(RuntimeError):
    """The accounting of pages is wrong: a bug of the scheduler, never of a request."""


class PagePool:
    """`num_pages` pages, numbered from 0, in each of `groups` groups.

    A fresh pool hands out 0, 1, 2, ...; pages that came back are handed out first, last one first.
    """

    def __init__(self, groups: int, num_pages: int):
        self.num_pages = num_pages
        self._stacks = [array("i", range(num_pages - 1, -1, -1)) for _ in range(groups)]
        # First page of each, and how many were allocated with it; and of all of a group.
        self._holdings: list[dict[int, int]] = [{} for _ in range(groups)]
        self._allocated = [0] * groups

    def num_free(self, group: int) -> int:
        return len(self._stacks[group])

    def free_pages(self) -> list[int]:
        """Of every group."""
        return [len(stack) for stack in self._stacks]

    def used(self) -> Bool[np.ndarray, "groups pages"]:
        """Which pages are out."""
        used = np.ones((len(self._stacks), self.num_pages), np.bool)
        for out, stack in zip(used, self._stacks, strict=True):
            out[np.array(stack, np.intp)] = False
        return used

    def allocate(self, group: int, count: int) -> Pages:
        """Take `count` pages. Raises PageError when there are fewer: callers look first."""
        self._check(group, count)
        return self._pop(group, count)

    def allocate_all(self, count: int) -> tuple[Pages, ...]:
        """As many of every group."""
        groups = range(len(self._stacks))
        for group in groups:
            self._check(group, count)
        return tuple([self._pop(group, count) for group in groups])

    def open(self, groups: Sequence[int]) -> list[int]:
        """A page of each of some groups, which may be named more than once and must have them: each
        for a holding there, at whose end it is put."""
        stacks = self._stacks
        return [stacks[group].pop() for group in groups]

    def free(self, group: int, pages: Pages) -> None:
        """Give a holding back. Raises PageError, and takes nothing, where it is none (any more)."""
        self._check_held(group, pages)
        self._push(group, pages)

    def free_all(self, pages: Sequence[Pages]) -> None:
        """As `free`, of every group."""
        for group, given in enumerate(pages):
            self._check_held(group, given)
        for group, given in enumerate(pages):
            self._push(group, given)

    def _check(self, group: int, count: int) -> None:
        free = len(self._stacks[group])
        if not 0 <= count <= free:
            raise PageError(f"group {group}: {count} pages asked, {free} are free")

    def _check_held(self, group: int, pages: Pages) -> None:
        if not pages:
            return
        allocated = self._holdings[group].get(pages[0])
        if allocated is None:
            raise PageError(f"group {group}: no holding begins with page {pages[0]}")
        if len(pages) < allocated:
            raise PageError(f"group {group}: {len(pages)} pages of a holding of {allocated}")
        others = self._allocated[group] - allocated
        out = self.num_pages - len(self._stacks[group])
        if len(pages) > out - others:
            raise PageError(f"group {group}: {len(pages)} pages, of {out - others} that may be its")

    def _pop(self, group: int, count: int) -> Pages:
        stack = self._stacks[group]
        first = len(stack) - count
        pages = stack[first:]
        del stack[first:]
        pages.reverse()
        if count:
            self._holdings[group][pages[0]] = count
            self._allocated[group] += count
        return pages

    def _push(self, group: int, pages: Pages) -> None:
        if pages:
            self._allocated[group] -= self._holdings[group].pop(pages[0])
        self._stacks[group].extend(pages[::-1])
