"""Who is next. An ordering owns the waiting requests and says in which order they are looked at."""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Protocol, runtime_checkable

from conflux_jax.scheduler.state import RequestState

_by_arrival = attrgetter("order")


@runtime_checkable
class Ordering(Protocol):
    """The waiting queue in some order of service. Adding, removing and looking at the first few
    must not cost more than the logarithm of its length."""

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill, over all that wait."""
        ...

    def __len__(self) -> int: ...

    def add(self, state: RequestState) -> None:
        """A request that arrives, or one that comes back preempted."""
        ...

    def remove(self, state: RequestState) -> None: ...

    def waiting(self, now: float) -> Iterator[RequestState]:
        """Those that wait, first to be served first. The queue must not change meanwhile."""
        ...

    def started(self, states: Iterable[RequestState], now: float) -> list[RequestState]:
        """Partly prefilled requests, first to be served first."""
        ...


class FirstComeFirstServed:
    """By arrival; who comes back preempted takes the place of its arrival again."""

    def __init__(self):
        self.num_tokens = 0
        self._arrived: OrderedDict[int, RequestState] = OrderedDict()  # orders only rise
        self._returned: list[RequestState] = []  # few; kept sorted by order

    def __len__(self) -> int:
        return len(self._arrived) + len(self._returned)

    def add(self, state: RequestState) -> None:
        state.queued_tokens = state.length
        self.num_tokens += state.queued_tokens
        if state.num_preemptions:
            bisect.insort(self._returned, state, key=_by_arrival)
        else:
            self._arrived[state.order] = state

    def remove(self, state: RequestState) -> None:
        self.num_tokens -= state.queued_tokens
        if self._arrived.pop(state.order, None) is None:
            del self._returned[bisect.bisect_left(self._returned, state.order, key=_by_arrival)]

    def waiting(self, now: float) -> Iterator[RequestState]:
        if not self._returned:
            return iter(self._arrived.values())
        return heapq.merge(self._returned, self._arrived.values(), key=_by_arrival)

    def started(self, states: Iterable[RequestState], now: float) -> list[RequestState]:
        return sorted(states, key=_by_arrival)
