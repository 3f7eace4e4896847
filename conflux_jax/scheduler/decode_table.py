"""The running decodes of one group, a column for each number that every iteration moves.

A thousand rows go forward by a few NumPy operations; Python looks only at those to which something
happens: a page to open, an end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from conflux_jax.plan import DecodeRows

if TYPE_CHECKING:
    from conflux_jax.scheduler.state import RequestState

_SLOT, _POSITION, _NEW_PAGE, _CAPACITY, _END = range(5)
_FIRST_ROWS = 16
NO_ROWS = DecodeRows.of()


class DecodeTable:
    """`states[i]` has row i: its slot, the position of its next token, the page that this opens
    (-1: none), the tokens that its pages hold, and the position at which it has all its samples.
    Who leaves is replaced by the last row.
    """

    def __init__(self):
        self.states: list[RequestState] = []
        self._ids: list[str] = []
        self._columns = np.zeros((5, _FIRST_ROWS), np.int32)
        self._targets = np.zeros(_FIRST_ROWS)
        self.context_tokens = 0  # that the next iteration's rows read

    def __len__(self) -> int:
        return len(self.states)

    def join(self, state: RequestState, capacity: int) -> None:
        """capacity: tokens that its pages hold."""
        row = len(self.states)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._targets = np.concatenate([self._targets, np.zeros_like(self._targets)])
        end = state.num_tokens + state.unplanned
        self._columns[:, row] = state.slot, state.num_tokens, -1, capacity, end
        self._targets[row] = state.tbt_slo_s
        self.context_tokens += state.num_tokens
        self.states.append(state)
        self._ids.append(state.request_id)
        state.table, state.row = self, row

    def leave(self, state: RequestState) -> None:
        decoded = state.num_decoded
        state.num_tokens += decoded
        state.num_planned += decoded
        row, last = state.row, len(self.states) - 1
        self.context_tokens -= state.num_tokens
        self._columns[:, row] = self._columns[:, last]
        self._targets[row] = self._targets[last]
        self.states[row], self._ids[row] = self.states[last], self._ids[last]
        self.states[row].row = row
        self.states.pop()
        self._ids.pop()
        state.table, state.row = None, -1

    @property
    def longest_context(self) -> int:
        n = len(self.states)
        return int(self._columns[_POSITION, :n].max()) if n else 0

    @property
    def tbt_slo_s(self) -> float:
        """The tightest target of these decodes."""
        n = len(self.states)
        return float(self._targets[:n].min()) if n else math.inf

    def position(self, row: int) -> int:
        return int(self._columns[_POSITION, row])

    def full(self) -> np.ndarray:
        """Rows whose next token needs a page."""
        n = len(self.states)
        positions, capacities = self._columns[_POSITION, :n], self._columns[_CAPACITY, :n]
        return (positions == capacities).nonzero()[0]

    def open_pages(self, rows: np.ndarray, pages: Sequence[int], page_tokens: int) -> None:
        """One page for each of some rows."""
        self._columns[_NEW_PAGE, rows] = pages
        self._columns[_CAPACITY, rows] += page_tokens
        for row, page in zip(rows.tolist(), pages, strict=True):
            self.states[row].pages.append(page)

    def advance(self) -> tuple[DecodeRows, list[RequestState]]:
        """A row of the next iteration for everyone, and for whom it is the last."""
        n = len(self.states)
        if not n:
            return NO_ROWS, []
        slots, positions, new_pages = self._columns[: _NEW_PAGE + 1, :n].copy()
        self._columns[_POSITION, :n] += 1
        self.context_tokens += n
        self._columns[_NEW_PAGE, :n] = -1
        ends = (self._columns[_POSITION, :n] == self._columns[_END, :n]).nonzero()[0]
        ending = [self.states[row] for row in ends.tolist()]
        return DecodeRows(tuple(self._ids), slots, positions, new_pages), ending
