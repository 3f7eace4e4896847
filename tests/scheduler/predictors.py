"""Latency models for tests, and the shape of a plan worked out from the plan alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from conflux_jax.config import SchedulerConfig
from conflux_jax.loop import InFlight, turn
from conflux_jax.plan import IterationPlan, PoolGeometry, StepOutput
from conflux_jax.request import Request
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import IterationShape, LatencyPredictor, prefill_work
from conflux_jax.scheduler.scheduler import Scheduler
from tests.scheduler.harness import make_request


@dataclass(frozen=True)
class Linear:
    """base + rows of the bucket + query-key pairs + context of the fullest group, each at a price.
    A row of prefill and a row of decode cost the same."""

    base_s: float = 0.0
    per_row_s: float = 0.0
    per_pair_s: float = 0.0
    per_context_s: float = 0.0

    def of(self, rows: int, pairs: int, context: int) -> float:
        return (
            self.base_s
            + self.per_row_s * rows
            + self.per_pair_s * pairs
            + self.per_context_s * context
        )

    def predict_s(self, shape: IterationShape) -> float:
        return self.of(shape.bucket.rows, shape.prefill_work, shape.context_tokens)


def shape_of(plan: IterationPlan) -> IterationShape:
    """Of groups with a pool each."""
    contexts = [sum(row.position for row in rows) for rows in plan.decodes]
    return IterationShape(
        bucket=plan.bucket,
        context_tokens=max(contexts),
        all_context_tokens=sum(contexts),
        longest_context=max((row.position for rows in plan.decodes for row in rows), default=0),
        num_chunks=len(plan.chunks),
        prefill_tokens=plan.num_prefill_tokens,
        prefill_work=sum(prefill_work(chunk.start, chunk.length) for chunk in plan.chunks),
    )


class Clocked:
    """A scheduler on a device that is nothing but a clock: an iteration takes `step_s(plan)`.

    Settings of SchedulerConfig by keyword. `took` are the iterations' seconds, `ends` who is over.
    """

    def __init__(
        self,
        predictor: LatencyPredictor,
        step_s: Callable[[IterationPlan], float],
        groups: int,
        **settings: Any,
    ):
        config = SchedulerConfig(**settings)
        geometry = PoolGeometry(groups, 8192 // groups, 16, 16 * groups)
        level = -(-config.max_num_batched_tokens // groups)
        self.ladders = Ladders.make(config.max_num_seqs, level, 1.25, geometry.needs_handoff)
        self.scheduler = Scheduler(config, geometry, self.ladders, 8192, predictor)
        self.step_s = step_s
        self.plans: list[IterationPlan] = []
        self.took: list[float] = []
        self.requests: dict[str, Request] = {}
        self.ends: set[str] = set()
        self._now = 0.0
        self._previous: InFlight | None = None

    def launch(self, plan: IterationPlan) -> IterationPlan:
        self.plans.append(plan)
        return plan

    def collect(self, ticket: IterationPlan) -> StepOutput:
        self.took.append(self.step_s(ticket))
        self._now += self.took[-1]
        return StepOutput(np.full(len(ticket.samples), 7, np.int32), self.took[-1])

    def add(self, request_id: str, prompt: int, max_tokens: int, **params: Any) -> None:
        request = make_request(request_id, prompt, max_tokens, arrival_s=self._now, **params)
        self.requests[request_id] = request
        self.scheduler.add(request)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self._previous, events = turn(self.scheduler, self, lambda: self._now, self._previous)
            self.ends |= {event.request_id for event in events if event.finish_reason}

    def drain(self) -> None:
        while self.scheduler.has_work or self._previous is not None:
            self.run(1)
