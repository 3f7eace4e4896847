"""Our own system in a simulation: the real scheduler and the real loop, one iteration ahead, on
modelled devices.

Only the devices are modelled; `conflux_design` lays them out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from conflux_jax.config import SchedulerConfig
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.loop import InFlight, turn
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import LatencyPredictor
from conflux_jax.scheduler.outlook import Load
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.simulation.executor import ModelledExecutor, VirtualClock
from conflux_jax.simulation.system import Observer, SimulatedRequest, Statistics, Tokens
from conflux_jax.simulation.work import CostModel

ITERATION_NOISE = 0.02  # of an iteration's time: the logarithm's standard deviation
NO_LIMIT = 1 << 30  # requests that may wait
LOOK_EVERY = 16  # iterations; memory fills and empties over hundreds

_request_id = attrgetter("request_id")


@dataclass(frozen=True)
class Blueprint:
    """All that a system is built from; one serves for any number of runs.

    predictor: what the scheduler believes. costs: what is so.
    """

    config: SchedulerConfig
    limits: BatchLimits
    ladders: Ladders
    predictor: LatencyPredictor | None
    costs: CostModel


class ConfluxSystem:
    """Satisfies `System`, `Reporting` and `Observable`. seed: of the noise on iterations' times."""

    def __init__(
        self,
        blueprint: Blueprint,
        ordering: str | None = None,
        noise: float = ITERATION_NOISE,
        seed: int = 0,
    ):
        config = dataclasses.replace(
            blueprint.config,
            max_waiting=NO_LIMIT,
            ordering=ordering or blueprint.config.ordering,
        )
        limits = blueprint.limits
        self._clock = VirtualClock()
        self._geometry = limits.geometry
        self._scheduler = Scheduler(
            config, limits.geometry, blueprint.ladders, limits.max_model_len, blueprint.predictor
        )
        self._executor = ModelledExecutor(blueprint.costs, self._clock, limits, noise, seed)
        self._in_flight: InFlight | None = None
        self._next_s = math.inf
        self._least_free = limits.geometry.num_pages
        self._turns = 0

    def add(self, request: SimulatedRequest) -> None:
        self._scheduler.add(scheduled(request))
        if math.isinf(self._next_s):
            self._next_s = max(self._clock.now_s, request.arrival_s)

    @property
    def next_s(self) -> float:
        """The loop turns when an iteration has ended: it then plans the one after the next."""
        return self._next_s

    def step(self) -> Sequence[Tokens]:
        clock, previous = self._clock, self._in_flight
        clock.now_s = self._next_s
        self._in_flight, events = turn(self._scheduler, self._executor, clock, previous)
        self._turns += 1
        if self._turns % LOOK_EVERY == 0:
            self._look()
        goes_on = self._in_flight is not None or (previous is not None and self._scheduler.has_work)
        self._next_s = clock.now_s if goes_on else math.inf
        if not events:
            return ()
        return (Tokens(clock.now_s, list(map(int, map(_request_id, events)))),)

    def load(self) -> Load:
        return self._scheduler.load()

    def observe(self, observer: Observer) -> None:
        """Satisfies `Observable`."""
        self._executor.observer = observer

    def _look(self) -> None:
        """At the memory in use."""
        self._least_free = min(self._least_free, *self._scheduler.free_pages)

    def statistics(self) -> Statistics:
        """kv_peak is that of every LOOK_EVERY-th iteration."""
        return Statistics(
            iterations=self._executor.num_iterations,
            busy_s=self._executor.busy_s,
            kv_peak=1.0 - self._least_free / self._geometry.num_pages,
            preemptions=self._scheduler.load().num_preemptions,
        )


def scheduled(request: SimulatedRequest) -> Request:
    """As the scheduler takes it. Its tokens are numbers that nobody reads; it ends by its length
    alone. Raises InvalidRequest for a deadline before its arrival."""
    ttft_slo_s = request.deadline_s - request.arrival_s
    params = SamplingParams(
        max_tokens=request.output_tokens,
        temperature=0.0,
        ignore_eos=True,
        ttft_slo_s=None if math.isinf(ttft_slo_s) else ttft_slo_s,
        tbt_slo_s=None if math.isinf(request.tbt_slo_s) else request.tbt_slo_s,
    )
    return Request(
        str(request.number),
        range(request.prompt_tokens),
        params,
        request.output_tokens,
        arrival_s=request.arrival_s,
    )
