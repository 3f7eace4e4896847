"""The running decodes, a column for each number that every iteration moves.

Thousands of rows go forward by a few NumPy operations; Python looks only at those to which
something happens: a page to open, an end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from conflux_jax.plan import DecodeRows

if TYPE_CHECKING:
    from conflux_jax.scheduler.state import RequestState

_SLOT, _POSITION, _NEW_PAGE, _CAPACITY, _END, _IN_USE = range(6)
_FREE_ROW = (0, 0, -1, -1, -1, 0)
_FIRST_ROWS = 16


class DecodeTable:
    """`states[group][row]` has a row: its slot, the position of its next token, the page that this
    opens (-1: none), the tokens that its pages hold, and the position at which it has all its
    samples. Who leaves is replaced by the group's last row.

    All groups are one array `[columns, groups, rows]`, since it is the number of operations that
    costs, not their size. A row that is not in use has a capacity and an end that no position
    reaches, and does not move.
    """

    def __init__(self, groups: int):
        self.states: list[list[RequestState]] = [[] for _ in range(groups)]
        self.context_tokens = [0] * groups  # that the next iteration's rows read
        self._ids: list[list[str]] = [[] for _ in range(groups)]
        self._columns = self._free_rows(_FIRST_ROWS)
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
            self._columns = np.concatenate([self._columns, self._free_rows(row)], axis=2)
            more = np.full_like(self._targets, math.inf)
            self._targets = np.concatenate([self._targets, more], axis=1)
        end = state.num_tokens + state.unplanned
        self._columns[:, group, row] = state.slot, state.num_tokens, -1, capacity, end, 1
        self._targets[group, row] = state.tbt_slo_s
        self.context_tokens[group] += state.num_tokens
        self.states[group].append(state)
        self._ids[group].append(state.request_id)
        state.table, state.row = self, row

    def leave(self, state: RequestState) -> None:
        decoded = state.num_decoded
        state.num_tokens += decoded
        state.num_planned += decoded
        group, row = state.group, state.row
        states, ids = self.states[group], self._ids[group]
        last = len(states) - 1
        self.context_tokens[group] -= state.num_tokens
        self._columns[:, group, row] = self._columns[:, group, last]
        self._columns[:, group, last] = _FREE_ROW
        self._targets[group, row] = self._targets[group, last]
        self._targets[group, last] = math.inf
        states[row], ids[row] = states[last], ids[last]
        states[row].row = row
        states.pop()
        ids.pop()
        state.table, state.row = None, -1

    def position(self, group: int, row: int) -> int:
        return int(self._columns[_POSITION, group, row])

    def full(self) -> tuple[np.ndarray, np.ndarray]:
        """Groups, rising, and rows whose next token needs a page."""
        return (self._columns[_POSITION] == self._columns[_CAPACITY]).nonzero()

    def open_pages(
        self, groups: np.ndarray, rows: np.ndarray, pages: Sequence[int], page_tokens: int
    ) -> None:
        """One page for each of some rows."""
        self._columns[_NEW_PAGE, groups, rows] = pages
        self._columns[_CAPACITY, groups, rows] += page_tokens
        for group, row, page in zip(groups.tolist(), rows.tolist(), pages, strict=True):
            self.states[group][row].pages.append(page)

    def advance(self) -> tuple[list[DecodeRows], list[RequestState]]:
        """For each group the rows of the next iteration, and all for whom it is the last."""
        columns = self._columns
        slots, positions, new_pages = columns[: _NEW_PAGE + 1].copy()
        columns[_POSITION] += columns[_IN_USE]
        columns[_NEW_PAGE] = -1
        rows = []
        for group, ids in enumerate(self._ids):
            n = len(ids)
            self.context_tokens[group] += n
            taken = slots[group, :n], positions[group, :n], new_pages[group, :n]
            rows.append(DecodeRows(tuple(ids), *taken))
        groups, at = (columns[_POSITION] == columns[_END]).nonzero()
        pairs = zip(groups.tolist(), at.tolist(), strict=True)
        return rows, [self.states[group][row] for group, row in pairs]
