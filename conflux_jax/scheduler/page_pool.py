"""The free lists of KV pages, one per group.

Pages have no order that matters, so a free list is a stack: taking and giving back cost O(pages
asked). One byte a page says whether it is out, so that a double free is an error where it happens
and not a wrong token much later.
"""

from __future__ import annotations

from collections.abc import Sequence


class PageError(RuntimeError):
    """The accounting of pages is wrong: a bug of the scheduler, never of a request."""


class PagePool:
    """`num_pages` pages, numbered from 0, in each of `groups` groups.

    A fresh pool hands out 0, 1, 2, ...; pages that came back are handed out first, last one first.
    """

    def __init__(self, groups: int, num_pages: int):
        self.num_pages = num_pages
        self._free = [list(range(num_pages - 1, -1, -1)) for _ in range(groups)]
        self._out = [bytearray(num_pages) for _ in range(groups)]

    def num_free(self, group: int) -> int:
        return len(self._free[group])

    def allocate(self, group: int, count: int) -> tuple[int, ...]:
        """Take `count` pages. Raises PageError when there are fewer: callers look first."""
        free = self._free[group]
        if not 0 <= count <= len(free):
            raise PageError(f"group {group}: {count} pages asked, {len(free)} are free")
        if count == 0:
            return ()
        pages = tuple(free[: -count - 1 : -1])
        del free[-count:]
        out = self._out[group]
        for page in pages:
            out[page] = 1
        return pages

    def free(self, group: int, pages: Sequence[int]) -> None:
        """Give pages back. Raises PageError, at the first that is not out, for a page freed twice
        or one that this pool does not have."""
        out = self._out[group]
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise PageError(f"group {group}: page {page} is not of this pool")
            if not out[page]:
                raise PageError(f"group {group}: page {page} is free already")
            out[page] = 0
        self._free[group].extend(reversed(pages))
