"""The free lists of KV pages, one per group.

Pages have no order that matters, so a free list is a stack: taking and giving back move one piece
of memory, however many pages there are. A mark for each page that is out makes a double free an
error where it happens and not a wrong token much later.
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
        self._first = np.arange(groups)[:, None] * num_pages  # of a group, in `_out`
        self._out = bytearray(groups * num_pages)
        self._marks = np.frombuffer(self._out, np.bool)  # the same memory
        self._of_group = list(self._marks.reshape(groups, num_pages))

    def num_free(self, group: int) -> int:
        return len(self._stacks[group])

    def free_pages(self) -> list[int]:
        """Of every group."""
        return [len(stack) for stack in self._stacks]

    def allocate_each(self, groups: Sequence[int]) -> list[int]:
        """A page of each of some groups, which may be named more than once; they must have them."""
        stacks, out, num_pages = self._stacks, self._out, self.num_pages
        pages = [stacks[group].pop() for group in groups]
        for group, page in zip(groups, pages, strict=True):
            out[group * num_pages + page] = True
        return pages

    def used(self) -> Bool[np.ndarray, "groups pages"]:
        """Which pages are out; a copy."""
        return self._marks.reshape(len(self._stacks), -1).copy()

    def allocate(self, group: int, count: int) -> Pages:
        """Take `count` pages. Raises PageError when there are fewer: callers look first."""
        self._check(group, count)
        pages = self._pop(group, count)
        self._of_group[group][_numbers(pages)] = True
        return pages

    def allocate_all(self, count: int) -> tuple[Pages, ...]:
        """As many of every group."""
        groups = range(len(self._stacks))
        for group in groups:
            self._check(group, count)
        pages = tuple([self._pop(group, count) for group in groups])
        self._marks[self._places_of(pages)] = True
        return pages

    def free(self, group: int, pages: Pages) -> None:
        """Give pages back. Raises PageError, and takes none of them, for a page freed twice or one
        that this pool does not have."""
        marks, given = self._of_group[group], _numbers(pages)
        try:
            all_out = marks[given].all()
        except IndexError:
            unknown = next(page for page in pages if not 0 <= page < self.num_pages)
            raise PageError(f"page {unknown} is not of this pool") from None
        if not all_out or len(set(pages)) < len(pages):
            again = next(p for at, p in enumerate(pages) if not marks[p] or p in pages[:at])
            raise PageError(f"group {group}: page {again} is free already")
        marks[given] = False
        self._push(group, pages)

    def free_all(self, pages: Sequence[Pages]) -> None:
        """As `free`, of what `allocate_all` gave: that no page is named twice is known."""
        places = self._places_of(pages)
        out = self._marks[places]
        if not out.all():
            group, page = divmod(int(places[out.argmin()]), self.num_pages)
            raise PageError(f"group {group}: page {page} is free already")
        self._marks[places] = False
        for group, given in enumerate(pages):
            self._push(group, given)

    def _check(self, group: int, count: int) -> None:
        free = len(self._stacks[group])
        if not 0 <= count <= free:
            raise PageError(f"group {group}: {count} pages asked, {free} are free")

    def _pop(self, group: int, count: int) -> Pages:
        stack = self._stacks[group]
        first = len(stack) - count
        pages = stack[first:]
        del stack[first:]
        pages.reverse()
        return pages

    def _push(self, group: int, pages: Pages) -> None:
        self._stacks[group].extend(pages[::-1])

    def _places_of(self, pages: Sequence[Pages]) -> np.ndarray:
        """In `_out`, of as many pages of each group."""
        numbers = np.frombuffer(b"".join(pages), np.int32)
        return (numbers.reshape(len(pages), -1) + self._first).ravel()


def _numbers(pages: Pages) -> np.ndarray:
    """Unsigned, so that none is taken to count from the end."""
    return np.frombuffer(pages, np.uint32)
