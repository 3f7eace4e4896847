"""The free lists of KV pages, one per group.

Pages have no order that matters, so a free list is a stack: taking and giving back move one piece
of memory, however many pages there are. A mark for each page that is out makes a double free an
error where it happens and not a wrong token much later.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from conflux_jax.plan import Pages


class PageError(RuntimeError):
    """The accounting of pages is wrong: a bug of the scheduler, never of a request."""


class PagePool:
    """`num_pages` pages, numbered from 0, in each of `groups` groups.

    A fresh pool hands out 0, 1, 2, ...; pages that came back are handed out first, last one first.
    """

    def __init__(self, groups: int, num_pages: int):
        self.num_pages = num_pages
        self._stacks = np.tile(np.arange(num_pages - 1, -1, -1, dtype=np.int32), (groups, 1))
        self._free = [num_pages] * groups  # heights of the stacks
        self._out = np.zeros(groups * num_pages, bool)
        self._first = np.arange(groups)[:, None] * num_pages  # of a group, in `_out`
        self._places = np.zeros(groups * num_pages, np.int32)  # scratch: finds pages named twice

    def num_free(self, group: int) -> int:
        return self._free[group]

    def allocate(self, group: int, count: int) -> Pages:
        """Take `count` pages. Raises PageError when there are fewer: callers look first."""
        self._check_one(group, count)
        pages = self._pop(group, count)
        self._out[pages + group * self.num_pages] = True
        return array("i", pages.tobytes())

    def allocate_each(self, counts: Sequence[int]) -> np.ndarray:
        """counts[group] pages of each group, one group after the other: int32 [sum of counts]."""
        self._check(counts)
        taken = [self._pop(group, count) for group, count in enumerate(counts)]
        pages = np.concatenate(taken)
        self._out[pages + np.repeat(self._first[:, 0], counts)] = True
        return pages

    def allocate_all(self, count: int) -> np.ndarray:
        """As many of every group: int32 [groups, count]."""
        self._check([count] * len(self._free))
        pages = np.stack([self._pop(group, count) for group in range(len(self._free))])
        self._out[pages + self._first] = True
        return pages

    def free(self, group: int, pages: Pages) -> None:
        """Give pages back. Raises PageError, and takes none of them, for a page freed twice or one
        that this pool does not have."""
        given = np.array(pages, np.int32)
        self._take_back(given + group * self.num_pages, given)
        self._push(group, given)

    def free_all(self, pages: np.ndarray) -> None:
        """As `free`, of what `allocate_all` gave."""
        self._take_back((pages + self._first).ravel(), pages.ravel())
        for group, given in enumerate(pages):
            self._push(group, given)

    def _check(self, counts: Sequence[int]) -> None:
        for group, count in enumerate(counts):
            self._check_one(group, count)

    def _check_one(self, group: int, count: int) -> None:
        if not 0 <= count <= self._free[group]:
            free = self._free[group]
            raise PageError(f"group {group}: {count} pages asked, {free} are free")

    def _pop(self, group: int, count: int) -> np.ndarray:
        free = self._free[group]
        self._free[group] = free - count
        return self._stacks[group, free - count : free][::-1]

    def _push(self, group: int, pages: np.ndarray) -> None:
        free = self._free[group]
        self._stacks[group, free : free + len(pages)] = pages[::-1]
        self._free[group] = free + len(pages)

    def _take_back(self, marks: np.ndarray, pages: np.ndarray) -> None:
        """marks: places in `_out` of `pages`."""
        known = (pages >= 0) & (pages < self.num_pages)
        if not known.all():
            raise PageError(f"page {pages[~known][0]} is not of this pool")
        order = np.arange(len(marks), dtype=np.int32)
        self._places[marks] = order
        once = self._out[marks] & (self._places[marks] == order)
        if not once.all():
            at = int((~once).argmax())
            group = int(marks[at]) // self.num_pages
            raise PageError(f"group {group}: page {pages[at]} is free already")
        self._out[marks] = False
