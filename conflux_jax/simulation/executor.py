"""The executor of a simulation: a plan takes as long as a cost model says, on a virtual clock.

The real scheduler and loop run on it as they do on devices. It keeps the devices' timeline: an
iteration begins when it is launched, or when the one before it ends where that is later.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from conflux_jax.execution.limits import BatchLimits
from conflux_jax.plan import IterationPlan, StepOutput
from conflux_jax.scheduler.latency_model import num_samples
from conflux_jax.simulation.system import Iteration, Observer
from conflux_jax.simulation.work import CostModel, Work


class VirtualClock:
    """Stands still until it is set."""

    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Ticket(NamedTuple):
    end_s: float
    elapsed_s: float
    num_samples: int


class ModelledExecutor:
    """Satisfies `plan.Executor`. `collect` sets the clock to the iteration's end, as waiting for a
    device would. Every token has the id 0: who wants a request to end says so by its length.

    noise: standard deviation of the logarithm of the factor by which an iteration departs from the
    cost model; its median is 1, and `seed` says which factors come.
    """

    def __init__(
        self,
        costs: CostModel,
        clock: VirtualClock,
        limits: BatchLimits,
        noise: float = 0.0,
        seed: int = 0,
    ):
        self.observer: Observer | None = None  # is told of every iteration
        self.busy_s = 0.0
        self.num_iterations = 0
        self._costs, self._clock, self._limits = costs, clock, limits
        self._noise, self._random = noise, random.Random(seed)
        self._contexts = Contexts(limits.geometry.groups)
        self._free_s = 0.0
        self._tokens = np.zeros(0, np.int32)

    def launch(self, plan: IterationPlan) -> Ticket:
        work = work_of(plan, self._limits, self._contexts)
        stages = self._costs.stages(work)
        elapsed_s = stages.total
        if self._noise:
            elapsed_s *= math.exp(self._random.gauss(0.0, self._noise))
        start_s = max(self._clock.now_s, self._free_s)
        end_s = self._free_s = start_s + elapsed_s
        self.busy_s += elapsed_s
        self.num_iterations += 1
        if self.observer is not None:
            self.observer(Iteration(plan.iteration, start_s, elapsed_s, work, stages))
        ends = sum([chunk.is_last for chunk in plan.chunks])
        return Ticket(end_s, elapsed_s, sum(work.decodes) + ends)

    def collect(self, ticket: Ticket) -> StepOutput:
        clock = self._clock
        clock.now_s = max(clock.now_s, ticket.end_s)
        if len(self._tokens) < ticket.num_samples:
            self._tokens = np.zeros(2 * ticket.num_samples, np.int32)
        return StepOutput(self._tokens[: ticket.num_samples], ticket.elapsed_s)


class Contexts:
    """KV tokens that the decodes of each group read, from plan to plan of one scheduler.

    Most of the time the same rows decode again, each one token further: `DecodeRows.request_ids` is
    then the object that it was, and positions need not be looked at. Rows are added up else.
    """

    def __init__(self, groups: int):
        self._ids: list[tuple[str, ...]] = [()] * groups
        self._totals, self._longest = [0] * groups, [0] * groups

    def of(self, plan: IterationPlan) -> tuple[tuple[int, ...], int]:
        """Of each group, and of the longest decode. Every plan must be told, in order."""
        for group, rows in enumerate(plan.decodes):
            ids = rows.request_ids
            if ids is not self._ids[group]:
                self._ids[group] = ids
                self._totals[group] = int(np.add.reduce(rows.positions, dtype=np.int64))
                self._longest[group] = int(rows.positions.max()) if ids else 0
            elif ids:
                self._totals[group] += len(ids)
                self._longest[group] += 1
        return tuple(self._totals), max(self._longest)


def work_of(plan: IterationPlan, limits: BatchLimits, contexts: Contexts | None = None) -> Work:
    """What a plan makes the devices do. Static parts count in full, used or not, since that is what
    a compiled step runs: the bucket's rows, the rows that may sample, the pages of a hand-off.

    contexts: that was told of all plans before; without one, rows are added up.
    """
    bucket = plan.bucket
    totals, longest = (contexts or Contexts(len(plan.decodes))).of(plan)
    return Work(
        rows=bucket.rows,
        decodes=tuple([len(rows.request_ids) for rows in plan.decodes]),
        contexts=totals,
        longest=longest,
        chunks=tuple([(chunk.start, chunk.length) for chunk in plan.chunks]),
        shares=plan.prefill_shares,
        samples=num_samples(bucket, limits.max_segments),
        handoff_tokens=handoff_tokens(limits) if bucket.handoff else 0,
    )


def handoff_tokens(limits: BatchLimits) -> int:
    """Tokens whose KV a step with hand-off moves to each group, used or not."""
    return limits.handoff_pages * limits.geometry.page_tokens
