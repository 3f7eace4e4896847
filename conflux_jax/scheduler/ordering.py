"""Who is next. An ordering owns the waiting requests and says in which order they are looked at.

Every ordering is a rank, lowest first. Whatever it is, no request waits for ever: one that
`max_bypass` later arrivals have overtaken ranks before all others.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from conflux_jax.config import SchedulerConfig
from conflux_jax.scheduler.latency_model import prefill_work
from conflux_jax.scheduler.state import RequestState

Rank = tuple[float, float, int]  # class, place in it, arrival


@runtime_checkable
class Ordering(Protocol):
    """The waiting queue in some order of service. Adding, removing and looking at the first few
    must not cost more than the logarithm of its length (or a move of so many bytes).

    pace: prefill tokens a second that the engine reaches now.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill, over all that wait."""
        ...

    def __len__(self) -> int: ...

    def add(self, state: RequestState) -> None:
        """A request that arrives, or one that comes back preempted."""
        ...

    def remove(self, state: RequestState) -> None: ...

    def rank(self, state: RequestState, now: float, pace: float) -> Rank:
        """Of one that waits or is partly prefilled; lower is served first."""
        ...

    def waiting(self, now: float, pace: float) -> Iterator[RequestState]:
        """Those that wait, by rank. The queue must not change meanwhile."""
        ...


class FirstComeFirstServed:
    """By arrival; who comes back preempted takes the place of its arrival again."""

    def __init__(self):
        self.num_tokens = 0
        self._arrived: OrderedDict[int, RequestState] = OrderedDict()  # orders only rise
        self._returned: dict[int, RequestState] = {}  # few

    def __len__(self) -> int:
        return len(self._arrived) + len(self._returned)

    def add(self, state: RequestState) -> None:
        state.queued_tokens = state.length
        self.num_tokens += state.queued_tokens
        (self._returned if state.num_preemptions else self._arrived)[state.order] = state

    def remove(self, state: RequestState) -> None:
        self.num_tokens -= state.queued_tokens
        del (self._returned if state.order in self._returned else self._arrived)[state.order]

    def rank(self, state: RequestState, now: float, pace: float) -> Rank:
        return (0.0, 0.0, state.order)

    def waiting(self, now: float, pace: float) -> Iterator[RequestState]:
        if not self._returned:
            return iter(self._arrived.values())
        returned = [self._returned[order] for order in sorted(self._returned)]
        return heapq.merge(returned, self._arrived.values(), key=_by_arrival)


class ShortestRemainingFirst:
    """By tokens left to prefill, then by arrival."""

    def __init__(self):
        self.num_tokens = 0
        self._sorted: list[tuple[int, int]] = []  # (tokens, order)
        self._states: dict[int, RequestState] = {}  # by order

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: RequestState) -> None:
        state.queued_tokens = state.length
        self.num_tokens += state.queued_tokens
        bisect.insort(self._sorted, (state.queued_tokens, state.order))
        self._states[state.order] = state

    def remove(self, state: RequestState) -> None:
        self.num_tokens -= state.queued_tokens
        del self._states[state.order]
        _drop(self._sorted, (state.queued_tokens, state.order))

    def rank(self, state: RequestState, now: float, pace: float) -> Rank:
        return (0.0, state.prefill_left, state.order)

    def waiting(self, now: float, pace: float) -> Iterator[RequestState]:
        return (self._states[order] for _, order in self._sorted)


class EarliestDeadlineFirst:
    """First who comes back preempted: its client has had tokens and waits for the next. Then those
    that can still meet their TTFT deadline at the present pace, by deadline; no deadline is the
    latest one. Then those that cannot, shortest remaining first: they are late anyway, and so the
    fewest wait longest. Who was found late stays so, since a deadline does not come back.
    """

    def __init__(self):
        self.num_tokens = 0
        self._returned: list[tuple[float, int]] = []  # (0, order)
        self._timely: list[tuple[float, int]] = []  # (deadline, order)
        self._late: list[tuple[float, int]] = []  # (tokens, order)
        self._states: dict[int, tuple[RequestState, list[tuple[float, int]], float]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: RequestState) -> None:
        state.queued_tokens = state.length
        self.num_tokens += state.queued_tokens
        if state.num_preemptions:
            self._put(state, self._returned, 0.0)
        else:
            self._put(state, self._timely, state.deadline_s)

    def remove(self, state: RequestState) -> None:
        self.num_tokens -= state.queued_tokens
        _, queue, place = self._states.pop(state.order)
        _drop(queue, (place, state.order))

    def rank(self, state: RequestState, now: float, pace: float) -> Rank:
        if state.num_preemptions:
            return (0.0, 0.0, state.order)
        if _meets(state, now, pace):
            return (1.0, state.deadline_s, state.order)
        return (2.0, state.prefill_left, state.order)

    def waiting(self, now: float, pace: float) -> Iterator[RequestState]:
        yield from self._of(self._returned)
        late = []
        try:
            for state in self._of(self._timely):
                if _meets(state, now, pace):
                    yield state
                else:
                    late.append(state)
        finally:  # also when the caller has seen enough: nobody is found late twice
            for state in late:
                if state.order in self._states:
                    _drop(self._timely, (state.deadline_s, state.order))
                    self._put(state, self._late, state.length)
        yield from self._of(self._late)

    def _put(self, state: RequestState, queue: list[tuple[float, int]], place: float) -> None:
        bisect.insort(queue, (place, state.order))
        self._states[state.order] = state, queue, place

    def _of(self, queue: list[tuple[float, int]]) -> Iterator[RequestState]:
        return (self._states[order][0] for _, order in queue)


class BoundedBypass:
    """Any ordering, but nobody is overtaken by more than `bound` later arrivals: then it is first.

    A request is overtaken by everyone of higher order (who came after it) that is admitted while it
    has prompt tokens to go. `_admitted` are the orders of such, as far as they matter: those above
    the oldest request with prompt tokens to go.
    """

    def __init__(self, inner: Ordering, bound: int):
        self._inner, self._bound = inner, bound
        self.num_pairs = 0  # `prefill_work` of all that wait
        # By arrival, but for those in _back. Ordered: a plain dict finds its first after many left
        # only by passing all their holes.
        self._waiting: OrderedDict[int, RequestState] = OrderedDict()
        self._back: list[int] = []  # orders of those that were preempted; a heap
        self._admitted: list[int] = []  # sorted
        self._oldest_started: RequestState | None = None

    @property
    def num_tokens(self) -> int:
        return self._inner.num_tokens

    def __len__(self) -> int:
        return len(self._inner)

    def add(self, state: RequestState) -> None:
        self._inner.add(state)
        self.num_pairs += prefill_work(0, state.queued_tokens)
        self._waiting[state.order] = state
        if state.num_preemptions:
            heapq.heappush(self._back, state.order)

    def remove(self, state: RequestState) -> None:
        self._inner.remove(state)
        self.num_pairs -= prefill_work(0, state.queued_tokens)
        del self._waiting[state.order]

    def admit(self, state: RequestState) -> None:
        """As `remove`, of one that overtakes those before it."""
        self.remove(state)
        bisect.insort(self._admitted, state.order)

    def look(self, started: Iterable[RequestState]) -> None:
        """Once before each iteration. started: those that are partly prefilled."""
        oldest = self._oldest_started = min(started, key=_by_arrival, default=None)
        first = next(self._by_arrival(), None)
        if first is not None and (oldest is None or first.order < oldest.order):
            oldest = first
        past = len(self._admitted)
        if oldest is not None:
            past = bisect.bisect_right(self._admitted, oldest.order)
        del self._admitted[:past]

    def rank(self, state: RequestState, now: float, pace: float) -> Rank:
        if state is self._oldest_started and self._is_due(state, ()):
            return (-1.0, 0.0, state.order)
        return self._inner.rank(state, now, pace)

    def waiting(self, now: float, pace: float) -> Iterator[RequestState]:
        """As the inner ordering has it, each behind those before it that are due."""
        ahead: list[int] = []  # orders of those that come before, in this very iteration; sorted
        seen: set[int] = set()
        arrivals = self._by_arrival()
        first = next(arrivals, None)
        for state in self._inner.waiting(now, pace):
            if state.order in seen:
                continue
            started = self._oldest_started
            if started is not None and started.order < state.order and self._is_due(started, ahead):
                return
            while first is not None and (
                first.order in seen or (first.order < state.order and self._is_due(first, ahead))
            ):
                if first.order not in seen:
                    seen.add(first.order)
                    bisect.insort(ahead, first.order)
                    yield first
                first = next(arrivals, None)
            if state.order not in seen:
                seen.add(state.order)
                bisect.insort(ahead, state.order)
                yield state

    def _is_due(self, state: RequestState, ahead: Sequence[int]) -> bool:
        """Whether enough of later order were admitted or, in this iteration, come before it."""
        most = len(self._admitted) + len(ahead)
        if most < self._bound:
            return False
        before = bisect.bisect_right(self._admitted, state.order)
        return most - before - bisect.bisect_right(ahead, state.order) >= self._bound

    def _by_arrival(self) -> Iterator[RequestState]:
        while self._back and self._back[0] not in self._waiting:
            heapq.heappop(self._back)
        if not self._back:
            return iter(self._waiting.values())
        back = sorted(order for order in set(self._back) if order in self._waiting)
        arrived = (s for s in self._waiting.values() if not s.num_preemptions)
        return heapq.merge((self._waiting[o] for o in back), arrived, key=_by_arrival)


ORDERINGS = {
    "deadline": EarliestDeadlineFirst,
    "fcfs": FirstComeFirstServed,
    "shortest": ShortestRemainingFirst,
}


def make_ordering(config: SchedulerConfig) -> BoundedBypass:
    return BoundedBypass(ORDERINGS[config.ordering](), config.max_bypass)


def _by_arrival(state: RequestState) -> int:
    return state.order


def _meets(state: RequestState, now: float, pace: float) -> bool:
    """Whether its first token can be there by its deadline, if it had the engine to itself."""
    return now + state.prefill_left / pace <= state.deadline_s


def _drop(queue: list[tuple[float, int]] | list[tuple[int, int]], entry: tuple[float, int]) -> None:
    at = bisect.bisect_left(queue, entry)
    assert queue[at] == entry
    del queue[at]
