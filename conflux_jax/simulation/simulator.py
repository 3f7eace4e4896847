"""Runs requests through a system on a virtual clock, and keeps what each of them saw.

Events happen in time order: an arrival is told to the system before anything that is due later, and
also before what is due at that very moment. The simulator knows nothing of a system but
`system.System`, and checks what it is given: every request gets exactly its tokens, at times that
do not fall.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from conflux_jax.simulation.results import Results
from conflux_jax.simulation.system import (
    Reporting,
    SimulatedRequest,
    Statistics,
    System,
    Tokens,
)

LOOK_EVERY = 256  # steps between two looks at how many requests are late or done
SETTLE_EVERY = 256  # steps whose tokens are entered into the books at once
STEPS_WITHOUT_TOKENS = 100_000  # in a row, after which a system counts as stuck


class SimulationError(RuntimeError):
    """A system broke the rules of `system.System`: a bug of it, never of a request."""


class Moment(NamedTuple):
    """How far a run is: requests that are over, of how many, on which time."""

    done: int
    total: int
    now_s: float


def simulate(
    system: System,
    requests: Sequence[SimulatedRequest],
    progress: Callable[[Moment], None] | None = None,
    most_late: int | None = None,
) -> Results:
    """Run all requests to their ends; they are numbered in order of arrival.

    most_late: give up once more requests than that are certain to miss a target; the results then
    say that they are not complete. Raises SimulationError where the system breaks its rules,
    ValueError where the requests are not in order.
    """
    ledger = _Ledger(requests)
    arrivals = iter(requests)
    arriving = next(arrivals, None)
    step = idle_steps = 0
    complete = True
    now_s = end_s = 0.0
    while True:
        due_s = system.next_s
        while arriving is not None and arriving.arrival_s <= due_s:
            ledger.admit(system, arriving)
            arriving = next(arrivals, None)
            due_s = system.next_s
        if math.isinf(due_s):
            break
        if due_s < now_s:
            raise SimulationError(f"a step is due at {due_s:g} s, but it is {now_s:g} s")
        now_s = due_s
        given = system.step()
        for tokens in given:
            ledger.note(tokens, now_s)
            end_s = max(end_s, tokens.time_s)
        idle_steps = 0 if given else idle_steps + 1
        if idle_steps > STEPS_WITHOUT_TOKENS:
            raise SimulationError(f"{idle_steps} steps without a token, at {now_s:g} s")
        step += 1
        if step % LOOK_EVERY == 0:
            if progress is not None:
                progress(Moment(ledger.num_done, len(requests), now_s))
            if most_late is not None and ledger.num_late(now_s) > most_late:
                complete = False
                break
    if complete:
        ledger.check_all_given()
    if progress is not None:
        progress(Moment(len(requests), len(requests), now_s))
    statistics = system.statistics() if isinstance(system, Reporting) else None
    return ledger.results(end_s, complete, statistics)


class _Ledger:
    """A column for each number that is kept of every request; times are NaN until they are known.

    Tokens are entered for many steps at once, by a few operations on arrays, since a run of an hour
    gives out millions in steps of few.
    """

    def __init__(self, requests: Sequence[SimulatedRequest]):
        self._requests = requests
        arrivals = _column(request.arrival_s for request in requests)
        if (np.diff(arrivals) < 0).any():
            raise ValueError("requests: must be in order of arrival")
        if [request.number for request in requests] != list(range(len(requests))):
            raise ValueError("requests: must be numbered from 0 in order of arrival")
        self._deadlines_s = _column(request.deadline_s for request in requests)
        self._tbt_slos_s = _column(request.tbt_slo_s for request in requests)
        self._left = np.array([request.output_tokens for request in requests], np.int64)
        self._first_s = np.full(len(requests), np.nan)
        self._latest_s = np.full(len(requests), np.nan)
        self._worst_gap_s = np.zeros(len(requests))
        self._gaps_s = array("d")
        self._pending: list[Tokens] = []
        self._refused: dict[int, str] = {}

    def admit(self, system: System, request: SimulatedRequest) -> None:
        try:
            system.add(request)
        except ValueError as error:
            self._refused[request.number] = str(error)
            self._left[request.number] = 0

    def note(self, tokens: Tokens, now_s: float) -> None:
        """Raises SimulationError where a token comes before its time."""
        if not tokens.time_s >= now_s:
            raise SimulationError(f"a token of {tokens.time_s:g} s was given out at {now_s:g} s")
        self._pending.append(tokens)
        if len(self._pending) >= SETTLE_EVERY:
            self.settle()

    def settle(self) -> None:
        """Enter what was noted. Each request's tokens are brought together, in the order in which
        they were given. Raises SimulationError where a request has one too many, or one that comes
        before its last."""
        numbers = list(chain.from_iterable([tokens.numbers for tokens in self._pending]))
        if not numbers:
            self._pending = []
            return
        counts = [len(tokens.numbers) for tokens in self._pending]
        times_s = np.repeat([tokens.time_s for tokens in self._pending], counts)
        self._pending = []
        at = np.array(numbers, np.intp)
        order = np.argsort(at, kind="stable")
        at, times_s = at[order], times_s[order]
        begins = np.flatnonzero(np.diff(at, prepend=-1))  # of each request's tokens
        who, latest_s = at[begins], times_s[np.append(begins[1:], len(at)) - 1]
        gaps_s = np.diff(times_s, prepend=np.nan)
        gaps_s[begins] = times_s[begins] - self._latest_s[who]
        left = self._left[who] - np.diff(begins, append=len(at))
        if left.min() < 0:
            number = int(who[left.argmin()])
            asked = 0 if number in self._refused else self._requests[number].output_tokens
            raise SimulationError(
                f"request {number} got one too many: {asked - left.min()} tokens came for {asked}"
            )
        if (gaps_s < 0).any():
            raise SimulationError(f"tokens of {times_s[gaps_s < 0][0]:g} s come after later ones")
        self._latest_s[who], self._left[who] = latest_s, left
        is_first = np.isnan(gaps_s)
        self._first_s[at[is_first]] = times_s[is_first]
        worst_s = np.maximum.reduceat(np.where(is_first, 0.0, gaps_s), begins)
        self._worst_gap_s[who] = np.maximum(self._worst_gap_s[who], worst_s)
        self._gaps_s.frombytes(gaps_s[~is_first].tobytes())

    @property
    def num_done(self) -> int:
        self.settle()
        return int(np.count_nonzero(self._left == 0))

    def num_late(self, now_s: float) -> int:
        """Requests that have missed a target by now, whatever happens to them from here on."""
        self.settle()
        no_token = np.isnan(self._first_s) & (self._deadlines_s < now_s)
        late = no_token | (self._first_s > self._deadlines_s)
        late |= self._worst_gap_s > self._tbt_slos_s
        late[list(self._refused)] = True
        return int(np.count_nonzero(late))

    def check_all_given(self) -> None:
        """Raises SimulationError where a request did not get all of its tokens."""
        self.settle()
        if (missing := np.flatnonzero(self._left)).size:
            number = int(missing[0])
            raise SimulationError(
                f"nothing is due any more, but request {number} lacks {self._left[number]} tokens "
                f"of {self._requests[number].output_tokens}; so do {missing.size - 1} others"
            )

    def results(self, end_s: float, complete: bool, statistics: Statistics | None) -> Results:
        self.settle()
        return Results(
            requests=self._requests,
            first_s=self._first_s,
            last_s=np.where(self._left == 0, self._latest_s, np.nan),
            worst_gap_s=self._worst_gap_s,
            gaps_s=self._gaps_s,
            refused=self._refused,
            end_s=end_s,
            complete=complete,
            statistics=statistics,
        )


def _column(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), np.float64)
