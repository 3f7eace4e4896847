"""The running decodes, a column for each number that every iteration moves.

Thousands of rows go forward by a few NumPy operations; Python looks only at those to which
something happens: a page to open, an end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from conflux_jax.plan import DecodeRows

if TYPE_CHECKING:
    from conflux_jax.scheduler.state import RequestState

_SLOT, _POSITION, _NEW_PAGE, _CAPACITY, _END, _IN_USE = range(6)
_FREE_ROW = (0, 0, -1, -1, -1, 0)
_FIRST_ROWS, _FIRST_PAGES = 16, 8


class Members(NamedTuple):
    """Of one group, by row. Kept until somebody joins or leaves: to touch a thousand objects at
    each iteration would cost more than all that is computed for them."""

    ids: tuple[str, ...]
    states: tuple[RequestState, ...]


class DecodeTable:
    """`states[group][row]` has a row: its slot, the position of its next token, the page that this
    opens (-1: none), the tokens that its pages hold, and the position at which it has all its
    samples. Who leaves is replaced by the group's last row.

    All groups are one array `[columns, groups, rows]`, since it is the number of operations that
    costs, not their size. A row that is not in use has a capacity and an end that no position
    reaches, and does not move. Pages that a row opens are kept here, and handed to its state when
    it leaves.
    """

    def __init__(self, groups: int):
        self.states: list[list[RequestState]] = [[] for _ in range(groups)]
        self.context_tokens = [0] * groups  # that the next iteration's rows read
        self._members: list[Members | None] = [None] * groups
        self._columns = self._free_rows(_FIRST_ROWS)
        self._opened = np.zeros((groups, _FIRST_ROWS, _FIRST_PAGES), np.int32)
        self._num_opened = np.zeros((groups, _FIRST_ROWS), np.int64)
        self._targets = np.full((groups, _FIRST_ROWS), math.inf)

    def _free_rows(self, rows: int) -> np.ndarray:
        column = np.array(_FREE_ROW, np.int32)[:, None, None]
        return np.tile(column, (1, len(self.states), rows))

    @property
    def num_rows(self) -> list[int]:
        """Of each group."""
        return [len(states) for states in self.states]

    @property
    def longest_context(self) -> int:
        return int(self._columns[_POSITION].max())

    @property
    def tbt_slo_s(self) -> float:
        """The tightest target of all."""
        return float(self._targets.min())

    def join(self, state: RequestState, capacity: int) -> None:
        """capacity: tokens that its pages hold."""
        group, row = state.group, len(self.states[state.group])
        if row == self._columns.shape[2]:
            self._add_rows(row)
        end = state.num_tokens + state.unplanned
        self._columns[:, group, row] = state.slot, state.num_tokens, -1, capacity, end, 1
        self._targets[group, row] = state.tbt_slo_s
        self.context_tokens[group] += state.num_tokens
        self.states[group].append(state)
        self._members[group] = None
        state.table, state.row = self, row

    def _add_rows(self, rows: int) -> None:
        """As many as there are."""
        self._columns = np.concatenate([self._columns, self._free_rows(rows)], axis=2)
        self._targets = _doubled(self._targets, 1, math.inf)
        self._opened = _doubled(self._opened, 1)
        self._num_opened = _doubled(self._num_opened, 1)

    def leave(self, state: RequestState) -> None:
        decoded = state.num_decoded
        state.num_tokens += decoded
        state.num_planned += decoded
        group, row = state.group, state.row
        state.pages.frombytes(self.opened(group, row).tobytes())
        states = self.states[group]
        last = len(states) - 1
        self.context_tokens[group] -= state.num_tokens
        self._columns[:, group, row] = self._columns[:, group, last]
        self._columns[:, group, last] = _FREE_ROW
        self._targets[group, row] = self._targets[group, last]
        self._targets[group, last] = math.inf
        self._opened[group, row] = self._opened[group, last]
        self._num_opened[group, row] = self._num_opened[group, last]
        self._num_opened[group, last] = 0
        states[row] = states[last]
        states[row].row = row
        states.pop()
        self._members[group] = None
        state.table, state.row = None, -1

    def position(self, group: int, row: int) -> int:
        return int(self._columns[_POSITION, group, row])

    def members(self, group: int) -> Members:
        members = self._members[group]
        if members is None:
            states = tuple(self.states[group])
            members = Members(tuple([state.request_id for state in states]), states)
            self._members[group] = members
        return members

    def full(self) -> tuple[np.ndarray, np.ndarray]:
        """Groups, rising, and rows whose next token needs a page."""
        return self._at(_CAPACITY)

    def _at(self, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Groups, rising, and rows whose position is that number."""
        columns = self._columns
        reached = (columns[_POSITION] == columns[column]).ravel().nonzero()[0]
        return np.divmod(reached, columns.shape[2])

    def open_pages(
        self, groups: np.ndarray, rows: np.ndarray, pages: np.ndarray, page_tokens: int
    ) -> None:
        """One page for each of some rows."""
        self._columns[_NEW_PAGE, groups, rows] = pages
        self._columns[_CAPACITY, groups, rows] += page_tokens
        places = self._num_opened[groups, rows]
        if places.max() == self._opened.shape[2]:
            self._opened = _doubled(self._opened, 2)
        self._opened[groups, rows, places] = pages
        self._num_opened[groups, rows] = places + 1

    def opened(self, group: int, row: int) -> np.ndarray:
        """The pages that a row has opened, int32."""
        return self._opened[group, row, : self._num_opened[group, row]]

    def advance(self) -> tuple[list[DecodeRows], list[RequestState]]:
        """For each group the rows of the next iteration, and all for whom it is the last."""
        columns = self._columns
        slots, positions, new_pages = columns[: _NEW_PAGE + 1].copy()
        columns[_POSITION] += columns[_IN_USE]
        columns[_NEW_PAGE] = -1
        rows = []
        for group, states in enumerate(self.states):
            n = len(states)
            self.context_tokens[group] += n
            taken = slots[group, :n], positions[group, :n], new_pages[group, :n]
            rows.append(DecodeRows(self.members(group).ids, *taken))
        pairs = zip(*(numbers.tolist() for numbers in self._at(_END)), strict=True)
        return rows, [self.states[group][row] for group, row in pairs]


def _doubled(array: np.ndarray, axis: int, fill: float = 0) -> np.ndarray:
    """With as much again behind it."""
    return np.concatenate([array, np.full_like(array, fill)], axis=axis)
