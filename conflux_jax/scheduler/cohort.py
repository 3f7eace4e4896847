"""Decodes that open their pages together.

Every decode goes forward by one token an iteration, so those whose pages are full at the same step
are so ever after, a page's tokens later. An iteration opens pages for one such cohort, at the cost
of a few operations: what each of its members got is looked up when somebody wants to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    from conflux_jax.scheduler.state import RequestState

_MOST_KEPT = 32  # openings, so that what is looked up stays short


class Where(NamedTuple):
    """Of a cohort's members, in order: their groups, as a list, and with their rows as an index of
    columns."""

    groups: list[int]
    cells: tuple[Int[np.ndarray, " members"], Int[np.ndarray, " members"]]


class Cohort:
    def __init__(self):
        self.members: list[RequestState] = []
        self._opened: list[list[int]] = []  # pages of all members, an opening each
        self._where: Where | None = None

    def add(self, state: RequestState) -> None:
        state.cohort, state.place, state.opened_before = self, len(self.members), len(self._opened)
        self.members.append(state)
        self._where = None

    def remove(self, state: RequestState) -> None:
        """Its place is the last member's then."""
        last = self.members[-1]
        self.settle(state)
        self.settle(last)
        self.members[state.place] = last
        last.place = state.place
        self.members.pop()
        state.cohort = None
        self._where = None

    def moved(self) -> None:
        """Some member has another row."""
        self._where = None

    @property
    def where(self) -> Where:
        if self._where is None:
            groups = [state.group for state in self.members]
            rows = np.array([state.row for state in self.members], np.intp)
            self._where = Where(groups, (np.array(groups, np.intp), rows))
        return self._where

    def open(self, pages: list[int]) -> None:
        """One for each member."""
        self._opened.append(pages)
        if len(self._opened) > _MOST_KEPT:
            for state in self.members:
                self.settle(state)
                state.opened_before = 0
            self._opened.clear()

    def opened(self, state: RequestState) -> list[int]:
        """A member's, that are not among its `pages` yet."""
        place = state.place
        return [pages[place] for pages in self._opened[state.opened_before :]]

    def settle(self, state: RequestState) -> None:
        """All that a member has is among its `pages`."""
        state.pages.extend(self.opened(state))
        state.opened_before = len(self._opened)
