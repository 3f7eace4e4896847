"""The running decodes, a column for each number that every iteration moves.

Thousands of rows go forward by a few NumPy operations. Python looks only at those to which
something happens, a page to open or an end; when that is, is known from the start, since every row
goes forward by one token an iteration, and stands in a calendar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from conflux_jax.plan import DecodeRows
from conflux_jax.scheduler.cohort import Cohort
from conflux_jax.scheduler.least import Least

if TYPE_CHECKING:
    from conflux_jax.scheduler.state import RequestState

_SLOT, _POSITION, _NEW_PAGE, _IN_USE = range(4)
_FREE_ROW = (0, 0, -1, 0)
_FIRST_ROWS = 16


class Members(NamedTuple):
    """Of one group, by row. Kept until somebody joins or leaves: to touch a thousand objects at
    each iteration would cost more than all that is computed for them."""

    ids: tuple[str, ...]
    states: tuple[RequestState, ...]


class Calendar:
    """Who is due at which step."""

    def __init__(self):
        self._days: dict[int, dict[RequestState, None]] = {}

    def add(self, step: int, state: RequestState) -> None:
        day = self._days.get(step)
        if day is None:
            self._days[step] = {state: None}
        else:
            day[state] = None

    def remove(self, step: int, state: RequestState) -> None:
        """Nothing happens where it is not there (any more)."""
        day = self._days.get(step)
        if day is not None:
            day.pop(state, None)
            if not day:
                del self._days[step]

    def steps(self) -> Iterator[int]:
        """Of everybody."""
        return (step for step, day in self._days.items() for _ in day)

    def take(self, step: int) -> list[RequestState]:
        """They are not in it any more."""
        return list(self._days.pop(step, ()))


class DecodeTable:
    """`states[group][row]` has a row: its slot, the position of its next token, and the page that
    this opens (-1: none). Who leaves is replaced by the group's last row.

    All groups are one array `[columns, groups, rows]`, since it is the number of operations that
    costs, not their size. A row that is not in use does not move. step: iterations so far.
    page_tokens: of a page that opens.
    """

    def __init__(self, groups: int, page_tokens: int):
        self.states: list[list[RequestState]] = [[] for _ in range(groups)]
        self.context_tokens = [0] * groups  # that the next iteration's rows read
        self.step = 0
        self._ids: list[list[str]] = [[] for _ in range(groups)]
        self._members: list[Members | None] = [None] * groups
        self._columns = self._free_rows(_FIRST_ROWS)
        self._targets_s = Least()
        self._lengths = Least()  # negative, as at step 0: all grow alike
        self._cohorts = [Cohort() for _ in range(page_tokens)]  # by the step modulo their number
        self._joins = Calendar()  # their cohort, by the step whose token is the first without page
        self._ends = Calendar()  # by the step after the last token

    def _free_rows(self, rows: int) -> np.ndarray:
        column = np.array(_FREE_ROW, np.int32)[:, None, None]
        return np.tile(column, (1, len(self.states), rows))

    @property
    def num_rows(self) -> list[int]:
        """Of each group."""
        return [len(states) for states in self.states]

    @property
    def longest_context(self) -> int:
        return self.step - int(self._lengths.value) if any(self.states) else 0

    @property
    def tbt_slo_s(self) -> float:
        """The tightest target of all."""
        return self._targets_s.value

    def join(self, state: RequestState, capacity: int) -> None:
        """capacity: tokens that its pages hold."""
        group, row = state.group, len(self.states[state.group])
        if row == self._columns.shape[2]:
            self._columns = np.concatenate([self._columns, self._free_rows(row)], axis=2)
        self._columns[:, group, row] = state.slot, state.num_tokens, -1, 1
        self._targets_s.add(state.tbt_slo_s)
        self._lengths.add(self.step - state.num_tokens)
        self.context_tokens[group] += state.num_tokens
        self.states[group].append(state)
        self._ids[group].append(state.request_id)
        self._members[group] = None
        state.full_at = self.step + capacity - state.num_tokens
        state.ends_at = self.step + state.unplanned
        self._joins.add(state.full_at, state)
        self._ends.add(state.ends_at, state)
        state.table, state.row, state.joined_at = self, row, self.step

    def leave(self, state: RequestState) -> None:
        decoded = state.num_decoded
        state.num_tokens += decoded
        state.num_planned += decoded
        if state.cohort is None:
            self._joins.remove(state.full_at, state)
        else:
            state.cohort.remove(state)
        self._ends.remove(state.ends_at, state)
        group, row = state.group, state.row
        states, ids = self.states[group], self._ids[group]
        last = len(states) - 1
        self.context_tokens[group] -= state.num_tokens
        self._columns[:, group, row] = self._columns[:, group, last]
        self._columns[:, group, last] = _FREE_ROW
        self._targets_s.remove(state.tbt_slo_s)
        self._lengths.remove(self.step - state.num_tokens)
        states[row], ids[row] = states[last], ids[last]
        states[row].row = row
        if (cohort := states[row].cohort) is not None:
            cohort.moved()
        states.pop()
        ids.pop()
        self._members[group] = None
        state.table, state.row = None, -1

    def full(self) -> Cohort:
        """Those whose next token needs a page; before they advance all must have one, or leave."""
        cohort = self._cohorts[self.step % len(self._cohorts)]
        for state in self._joins.take(self.step):
            cohort.add(state)
        return cohort

    def rows_left(self) -> list[int]:
        """Of every row, how many the next iterations can still have; in no order."""
        return [step - self.step for step in self._ends.steps()]

    def open_page(self, state: RequestState, page: int) -> None:
        """A page for one of those that are full, while others of them may have to leave."""
        assert state.cohort is not None
        state.cohort.settle(state)
        state.pages.append(page)
        self._columns[_NEW_PAGE, state.group, state.row] = page

    def open_pages(self, cohort: Cohort, pages: list[int]) -> None:
        """A page for each of those that are full."""
        self._columns[_NEW_PAGE, *cohort.where.cells] = pages
        cohort.open(pages)

    def advance(self) -> tuple[list[DecodeRows], list[Sequence[RequestState]], list[RequestState]]:
        """For each group the rows of the next iteration and whose they are; and all for whom it is
        the last."""
        columns = self._columns
        taken = columns[: _NEW_PAGE + 1].copy()
        columns[_POSITION] += columns[_IN_USE]
        columns[_NEW_PAGE] = -1
        self.step += 1
        rows, samplers = [], []
        for group in range(len(self.states)):
            ids, states = self._of(group)
            n = len(ids)
            self.context_tokens[group] += n
            rows.append(DecodeRows(ids, taken[:, group, :n]))
            samplers.append(states)
        return rows, samplers, self._ends.take(self.step)

    def _of(self, group: int) -> Members:
        members = self._members[group]
        if members is None:
            members = Members(tuple(self._ids[group]), tuple(self.states[group]))
            self._members[group] = members
        return members
