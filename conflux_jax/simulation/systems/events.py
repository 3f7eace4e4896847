"""What the rival systems share: events on the clock that they are told, and replicas side by side.

Their schedulers take no time and see every arrival at once: nothing but the GPUs is slow.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from conflux_jax.simulation.system import SimulatedRequest, Statistics, Tokens
from conflux_jax.simulation.systems.jobs import Job, Memory

MARGIN = 4.0  # standard deviations: one iteration in 30,000 lasts longer


class EventSystem(ABC):
    """A System, and Reporting, whose parts (replicas, sides, batches) go by their own events.

    pools: all its KV memory. busy_s: seconds that its GPUs have worked, on average over them."""

    def __init__(self):
        self.now_s = 0.0
        self.pools: list[Memory] = []
        self.num_iterations, self.busy_s = 0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap; the int: order set
        self._num_events = 0
        self._given: list[Tokens] = []
        self._noise, self._random = 0.0, random.Random(0)

    @abstractmethod
    def add(self, request: SimulatedRequest) -> None: ...

    def vary(self, noise: float, seed: int) -> None:
        """Let what runs from now on depart from its price by a factor whose logarithm has this
        standard deviation. Schedulers that hold prices against TBT targets then leave MARGIN of
        these for it."""
        self._noise, self._random = noise, random.Random(seed)

    def new_job(self, request: SimulatedRequest) -> Job:
        """With the target that the scheduler goes by."""
        return Job(request, request.tbt_slo_s * math.exp(-MARGIN * self._noise))

    def factor(self) -> float:
        """By which the next thing that runs departs from its price."""
        return math.exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` then; those of one moment in the order in which they were set."""
        heapq.heappush(self._events, (time_s, self._num_events, action))
        self._num_events += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, action)

    def run(self, seconds: float, share: float, action: Callable[[], None]) -> None:
        """An iteration of that price begins on that share of the GPUs, and ends with `action`."""
        self.num_iterations += 1
        seconds *= self.factor()
        self.busy_s += seconds * share
        self.after(seconds, action)

    def new_pool(self, tokens: int) -> Memory:
        self.pools.append(Memory(tokens))
        return self.pools[-1]

    def give(self, numbers: Sequence[int]) -> None:
        """One token now to each of these requests."""
        if numbers:
            self._given.append(Tokens(self.now_s, numbers))

    @property
    def next_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def step(self) -> Sequence[Tokens]:
        """All events of the next moment, those too that they set for the same moment."""
        self._given = []
        if self._events:
            self.now_s = self._events[0][0]
        while self._events and self._events[0][0] == self.now_s:
            heapq.heappop(self._events)[2]()
        return self._given

    def statistics(self) -> Statistics:
        """Nobody is preempted: see `jobs`."""
        kv_peak = max(pool.peak_tokens / pool.capacity_tokens for pool in self.pools)
        return Statistics(self.num_iterations, self.busy_s, kv_peak, preemptions=0)


class Replica(Protocol):
    """A group of GPUs that serves requests from prompt to end."""

    @property
    def memory(self) -> Memory: ...

    @property
    def load(self) -> tuple[int, int]:
        """What it has to do: prompt tokens that wait or are being prefilled, KV tokens that its
        requests need."""
        ...

    def add(self, job: Job) -> None: ...

    def wake(self) -> None:
        """Something was added; begin if idle."""
        ...


class Replicated(EventSystem):
    """Replicas of a model side by side; each request goes to the one with least to do."""

    def __init__(self, count: int, make: Callable[[Replicated], Replica]):
        super().__init__()
        self.share = 1.0 / count  # of the GPUs, that a replica has
        self.replicas = [make(self) for _ in range(count)]

    def add(self, request: SimulatedRequest) -> None:
        job = self.new_job(request)
        check_fits(job, self.replicas[0].memory.capacity_tokens)
        replica = min(self.replicas, key=_load)
        replica.add(job)
        self.at(request.arrival_s, replica.wake)


def check_fits(job: Job, capacity_tokens: int) -> None:
    """Raises ValueError for a request that could never be served."""
    if job.kv_tokens > capacity_tokens:
        raise ValueError(
            f"request {job.number}: prompt_tokens + output_tokens is {job.kv_tokens}, but there is "
            f"KV memory for {capacity_tokens}"
        )


def _load(replica: Replica) -> tuple[int, int]:
    return replica.load
