"""Records of a real run, and what becomes of them in a simulation.

`RecordingScheduler` stands between an engine, or a loop turned by hand, and its scheduler, and
keeps all that the scheduler was told and all that it planned. A scheduler is a function of these
and nothing else, so the same one, told the same, must plan the same (`replan`). With iteration
times from a calibrated profile in place of those that were measured (`ProfiledCosts`), times come
out that can be held against the real ones (`quantile_errors`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from conflux_jax.execution.limits import BatchLimits
from conflux_jax.loop import InFlight, RequestScheduler, turn
from conflux_jax.plan import Executor, IterationPlan, StepOutput
from conflux_jax.request import FinishReason, Request, TokenEvent
from conflux_jax.scheduler.estimate import Estimate
from conflux_jax.simulation.executor import work_of
from conflux_jax.simulation.results import Results
from conflux_jax.simulation.system import SimulatedRequest, Tokens
from conflux_jax.simulation.work import CostModel

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class Added(NamedTuple):
    request: Request


class Ended(NamedTuple):
    """From outside: cancelled, or by its text."""

    request_id: str


class Planned(NamedTuple):
    now_s: float
    plan: IterationPlan | None


class Committed(NamedTuple):
    """request_ids: who got a token by it."""

    now_s: float
    token_ids: np.ndarray
    elapsed_s: float
    request_ids: tuple[str, ...]


@dataclass
class Record:
    """All that happened to a scheduler, in order."""

    events: list[Added | Ended | Planned | Committed] = field(default_factory=list)

    @property
    def plans(self) -> list[IterationPlan]:
        planned = (event.plan for event in self.events if isinstance(event, Planned))
        return [plan for plan in planned if plan is not None]

    @property
    def requests(self) -> list[Request]:
        """By arrival."""
        added = [event.request for event in self.events if isinstance(event, Added)]
        return sorted(added, key=lambda request: request.arrival_s)


class RecordingScheduler:
    """A scheduler that is written down. Satisfies what loop and engine need of one."""

    def __init__(self, scheduler: RequestScheduler):
        self.record = Record()
        self._scheduler = scheduler

    def add(self, request: Request) -> None:
        self._scheduler.add(request)
        self.record.events.append(Added(request))

    def cancel(self, request_id: str) -> bool:
        self.record.events.append(Ended(request_id))
        return self._scheduler.cancel(request_id)

    def finish(self, request_id: str, reason: FinishReason) -> Any:
        self.record.events.append(Ended(request_id))
        return self._scheduler.finish(request_id, reason)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def load(self) -> Any:
        return self._scheduler.load()

    def lose_device_state(self) -> Sequence[str]:
        """Raises RuntimeError: the record has no word for what a failed step takes along."""
        raise RuntimeError("a step failed: this run cannot be replayed")

    def snapshot(self, most: int) -> Any:
        return self._scheduler.snapshot(most)

    def modelled(self, plan: IterationPlan) -> Any:
        return self._scheduler.modelled(plan)

    def estimate(self, prompt_tokens: int) -> Estimate | None:
        return self._scheduler.estimate(prompt_tokens)

    def least_s(self, prompt_tokens: int) -> float:
        return self._scheduler.least_s(prompt_tokens)

    def output_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        return self._scheduler.output_limit(prompt_tokens, max_tokens)

    def schedule(self, now: float) -> IterationPlan | None:
        plan = self._scheduler.schedule(now)
        self.record.events.append(Planned(now, plan))
        return plan

    def commit(self, plan: IterationPlan, output: StepOutput, now: float) -> list[TokenEvent]:
        events = self._scheduler.commit(plan, output, now)
        ids = tuple(event.request_id for event in events if event.token_id is not None)
        self.record.events.append(Committed(now, output.token_ids.copy(), output.elapsed_s, ids))
        return events


def drive(
    scheduler: RequestScheduler,
    executor: Executor,
    clock: Callable[[], float],
    wait_until: Callable[[float], None],
    requests: Sequence[Request],
) -> None:
    """Turn the loop by hand until all requests, in order of arrival on the clock, are over."""
    waiting = deque(requests)
    in_flight: InFlight | None = None
    while waiting or in_flight is not None or scheduler.has_work:
        while waiting and waiting[0].arrival_s <= clock():
            scheduler.add(waiting.popleft())
        if in_flight is None and not scheduler.has_work:
            wait_until(waiting[0].arrival_s)
            continue
        in_flight, _ = turn(scheduler, executor, clock, in_flight)


def replan(record: Record, scheduler: RequestScheduler) -> list[IterationPlan]:
    """The plans of a new scheduler that is told what the record's was told, by the same loop, with
    the iteration times that were measured; up to the first that is not the record's, since what
    was measured belongs to no other."""
    again = _Again()
    events = iter(record.events)
    in_flight: InFlight | None = None
    plans = []
    for event in events:
        match event:
            case Added(request):
                scheduler.add(request)
            case Ended(request_id):
                scheduler.cancel(request_id)
            case Planned(now_s, recorded):
                again.times_s.append(now_s)
                if in_flight is not None:
                    done = next(events, None)
                    if not isinstance(done, Committed):  # the run broke off within this turn
                        plans += filter(None, [scheduler.schedule(now_s)])
                        break
                    again.times_s.append(done.now_s)
                    again.output = StepOutput(done.token_ids, done.elapsed_s)
                in_flight, _ = turn(scheduler, again, again.times_s.popleft, in_flight)
                if in_flight is not None:
                    plans.append(in_flight.plan)
                if recorded != (in_flight and in_flight.plan):
                    break
            case Committed():
                raise ValueError("the record has an iteration's results without its plan")
    return plans


class _Again:
    """An executor whose answers are known, and the times at which the clock was read."""

    def __init__(self):
        self.times_s: deque[float] = deque()
        self.output = StepOutput(np.zeros(0, np.int32), 0.0)

    def launch(self, plan: IterationPlan) -> None:
        return None

    def collect(self, ticket: None) -> StepOutput:
        return self.output


class RecordedSystem:
    """Satisfies `System`: gives out a record's tokens when they came, so that a real run and a
    simulated one are counted by the same rules. Times are after the record's first arrival."""

    def __init__(self, record: Record):
        numbers, origin_s = _numbers(record), _origin_s(record)
        self._tokens = deque(
            Tokens(event.now_s - origin_s, [numbers[name] for name in event.request_ids])
            for event in record.events
            if isinstance(event, Committed) and event.request_ids
        )

    def add(self, request: SimulatedRequest) -> None:
        """It is in the record."""

    @property
    def next_s(self) -> float:
        return self._tokens[0].time_s if self._tokens else math.inf

    def step(self) -> Sequence[Tokens]:
        return (self._tokens.popleft(),)


def recorded_requests(record: Record) -> list[SimulatedRequest]:
    """The record's requests for a simulation, with as many outputs as they got there; those that
    ended before they had one are left out."""
    outputs, origin_s = _outputs(record), _origin_s(record)
    return [
        SimulatedRequest(
            number=number,
            arrival_s=request.arrival_s - origin_s,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=outputs[request.request_id],
            deadline_s=_deadline_s(request) - origin_s,
            tbt_slo_s=request.params.tbt_slo_s or math.inf,
        )
        for number, request in enumerate(_served(record))
    ]


def _deadline_s(request: Request) -> float:
    """Of the first token."""
    target_s = request.params.ttft_slo_s or math.inf
    return min(request.arrival_s + target_s, request.deadline_s)


def quantile_errors(simulated: Results, real: Results) -> dict[str, float]:
    """How far simulated times are from real ones, relative to these: at QUANTILES of TTFT and of
    the time between tokens, and, as `ttft` and `tbt`, over the whole distribution: the mean
    distance of all quantiles over the mean (Wasserstein's)."""
    errors: dict[str, float] = {}
    for name, ours, theirs in (
        ("ttft", simulated.ttft_s, real.ttft_s),
        ("tbt", np.array(simulated.gaps_s), np.array(real.gaps_s)),
    ):
        levels = np.linspace(0.0, 1.0, max(len(ours), len(theirs)))
        apart = np.abs(np.quantile(ours, levels) - np.quantile(theirs, levels))
        errors[name] = float(apart.mean() / theirs.mean())
        for level in QUANTILES:
            ratio = float(np.quantile(ours, level) / np.quantile(theirs, level))
            errors[f"{name}_p{round(100 * level)}"] = ratio - 1.0
    return errors


def iteration_ratios(
    record: Record, costs: CostModel, limits: BatchLimits
) -> dict[str, Float[np.ndarray, " iterations"]]:
    """What the record's iterations took over what `costs` says of them, in their order: of those
    with decodes only (`decode`) and of those with prefill (`prefill`)."""
    committed = [event for event in record.events if isinstance(event, Committed)]
    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    for plan, event in zip(record.plans, committed, strict=False):  # the last may not have ended
        modelled_s = costs.stages(work_of(plan, limits)).total
        kind = "prefill" if plan.chunks else "decode"
        found[kind].append(event.elapsed_s / modelled_s)
    return {kind: np.array(ratios) for kind, ratios in found.items()}


def _outputs(record: Record) -> Counter[str]:
    """Tokens by request."""
    committed = (event for event in record.events if isinstance(event, Committed))
    return Counter(chain.from_iterable(event.request_ids for event in committed))


def _served(record: Record) -> list[Request]:
    outputs = _outputs(record)
    return [request for request in record.requests if outputs[request.request_id]]


def _numbers(record: Record) -> dict[str, int]:
    return {request.request_id: number for number, request in enumerate(_served(record))}


def _origin_s(record: Record) -> float:
    return min((request.arrival_s for request in record.requests), default=0.0)
