"""What a simulated serving system is: requests in, tokens out, on a clock that it is told.

The simulator knows no more of a system than this, so ours (the real scheduler and loop) and its
rivals run on the same requests and are counted by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from conflux_jax.simulation.work import Stages, Work


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """number: from 0, in order of arrival. deadline_s: on the simulation's clock, by when the first
    token is on time. tbt_slo_s: the longest gap between two tokens that is."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    deadline_s: float = math.inf
    tbt_slo_s: float = math.inf
    prefix_hashes: tuple[int, ...] = ()


class Tokens(NamedTuple):
    """One token each of some requests (their numbers), all at one moment."""

    time_s: float
    numbers: Sequence[int]


class System(Protocol):
    """Holds requests from `add` until it has given out `output_tokens` tokens for each."""

    def add(self, request: SimulatedRequest) -> None:
        """A request has arrived; the clock is at its `arrival_s`. Raises ValueError, naming the
        limit, for one that can never be served."""
        ...

    @property
    def next_s(self) -> float:
        """When `step` is due: it may not be called before, and whatever arrives until then is added
        before. Infinite while there is nothing to do; never in the past of what was given out."""
        ...

    def step(self) -> Sequence[Tokens]:
        """Do what is due at `next_s`. Tokens carry their own times, at or after `next_s`; between
        calls those times do not fall for any one request."""
        ...


class Statistics(NamedTuple):
    """Of a run so far. busy_s: that the GPUs worked, on average over them. kv_peak: largest share
    of KV memory in use at once, of the GPUs with most. preemptions: requests that lost their KV and
    were computed again."""

    iterations: int
    busy_s: float
    kv_peak: float
    preemptions: int


@runtime_checkable
class Reporting(Protocol):
    """A system that also says how it fared."""

    def statistics(self) -> Statistics: ...


class Iteration(NamedTuple):
    """One that was priced, for who looks on. elapsed_s: with noise, unlike `stages`."""

    number: int
    start_s: float
    elapsed_s: float
    work: Work
    stages: Stages


Observer = Callable[[Iteration], None]


@runtime_checkable
class Observable(Protocol):
    """A system that tells somebody of every iteration, as it begins."""

    def observe(self, observer: Observer) -> None: ...
