"""A plan while it is put together."""

from __future__ import annotations

from conflux_jax.plan import (
    Admission,
    DecodeRows,
    Handoff,
    IterationPlan,
    Placement,
    PrefillChunk,
)
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import NO_DECODES, Budget
from conflux_jax.scheduler.latency_model import IterationShape
from conflux_jax.scheduler.state import RequestState
from conflux_jax.scheduler.waterfill import waterfill


class Draft:
    """`decoding`, `prefilled`: who gets a token, in the order of `IterationPlan.samples`: the
    decodes of each group, then prompts with their last chunk. `ending`: those whose last sample
    this is. `handed`: those whose hand-off this completes."""

    def __init__(self):
        self.decodes: list[DecodeRows] = []
        self.chunks: list[PrefillChunk] = []
        self.handoffs: list[Handoff] = []
        self.admissions: list[Admission] = []
        self.placements: list[Placement] = []
        self.decoding: list[tuple[RequestState, ...]] = []
        self.prefilled: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.handed: list[RequestState] = []
        self.preempted = False
        self.load = NO_DECODES
        self.budget = 0  # prefill tokens that fit beside the decodes
        self.shape: IterationShape | None = None  # where there is a latency model

    def add_placement(self, state: RequestState) -> None:
        self.placements.append(Placement(state.slot, state.group, state.pages[:]))

    @property
    def is_empty(self) -> bool:
        return not (any(self.decoding) or self.chunks or self.handoffs)

    def seal(self, iteration: int, budget: Budget, ladders: Ladders) -> IterationPlan:
        """The plan in the smallest bucket that holds it, and its `shape`."""
        shares = waterfill(self.load.loads, budget.max_level, sum(c.length for c in self.chunks))
        moves, predicted_s = bool(self.handoffs), 0.0
        bucket = ladders.fit(self.load.loads, shares, moves)
        if budget.predictor is not None:
            chunks = [(chunk.start, chunk.length) for chunk in self.chunks]
            self.shape = budget.shape(self.load, chunks, bucket)
            predicted_s = budget.predict_s(self.shape)
        return IterationPlan(
            iteration=iteration,
            bucket=bucket,
            decodes=tuple(self.decodes),
            chunks=tuple(self.chunks),
            prefill_shares=shares,
            handoffs=tuple(self.handoffs),
            admissions=tuple(self.admissions),
            placements=tuple(self.placements),
            predicted_s=predicted_s,
        )
