"""The free lists of KV pages, one per group.

Pages have no order that matters, so a free list is a stack: taking and giving back cost O(pages
asked). The set of pages that are out makes a double free an error where it happens and not a wrong
token much later.
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
        self._out: list[set[int]] = [set() for _ in range(groups)]

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
        self._out[group].update(pages)
        return pages

    def free(self, group: int, pages: Sequence[int]) -> None:
        """Give pages back. Raises PageError, and takes none of them, for a page freed twice or one
        that this pool does not have."""
        out, given = self._out[group], set(pages)
        if len(given) < len(pages) or not given <= out:
            raise self._refusal(group, pages)
        out -= given
        self._free[group].extend(reversed(pages))

    def _refusal(self, group: int, pages: Sequence[int]) -> PageError:
        """That names the first page which cannot be given back."""
        left = set(self._out[group])
        first = next(page for page in pages if page not in left or left.remove(page))
        problem = "is free already" if 0 <= first < self.num_pages else "is not of this pool"
        return PageError(f"group {group}: page {first} {problem}")
