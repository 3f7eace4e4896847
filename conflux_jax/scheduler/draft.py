"""A plan while it is put together."""

from __future__ import annotations

from collections.abc import Sequence

from conflux_jax.plan import (
    Admission,
    DecodeRows,
    Handoff,
    IterationPlan,
    Placement,
    PrefillChunk,
)
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import NO_DECODES, NO_PREFILL, Budget
from conflux_jax.scheduler.latency_model import IterationShape
from conflux_jax.scheduler.state import RequestState
from conflux_jax.scheduler.waterfill import waterfill


class Draft:
    """`decoding`, `prefilled`: who gets a token, in the order of `IterationPlan.samples`: the
    decodes of each group, then prompts with their last chunk. `ending`: those whose last sample
    this is. `handed`: those whose hand-off this completes. `scored`: those with a chunk that
    asked for log-probabilities of their prompt."""

    def __init__(self):
        self.decodes: list[DecodeRows] = []
        self.chunks: list[PrefillChunk] = []
        self.handoffs: list[Handoff] = []
        self.admissions: list[Admission] = []
        self.placements: list[Placement] = []
        self.decoding: list[Sequence[RequestState]] = []
        self.prefilled: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.handed: list[RequestState] = []
        self.scored: list[RequestState] = []
        self.preempted = False
        self.load = NO_DECODES
        self.chosen = NO_PREFILL  # the level, and what fits beside the decodes up to it
        self.shape: IterationShape | None = None  # where there is a latency model

    def add_placement(self, state: RequestState) -> None:
        self.placements.append(Placement(state.slot, state.group, state.pages[:]))

    @property
    def is_empty(self) -> bool:
        return not (any(self.decoding) or self.chunks or self.handoffs)

    def seal(self, iteration: int, budget: Budget, ladders: Ladders) -> IterationPlan:
        """The plan in the smallest bucket that holds it, and its `shape`."""
        tokens = sum([chunk.length for chunk in self.chunks])
        shares, shape, predicted_s = self.chosen.shares, self.chosen.shape, 0.0
        if shape is None or not tokens or tokens != shape.prefill_tokens:  # not what was chosen
            shares = waterfill(self.load.loads, budget.max_level, tokens)
            bucket = ladders.fit(self.load.loads, shares, bool(self.handoffs))
            chunks = [(chunk.start, chunk.length) for chunk in self.chunks]
            shape = budget.shape(self.load, chunks, bucket)
        if budget.predictor is not None:
            self.shape, predicted_s = shape, budget.predict_s(shape)
        return IterationPlan(
            iteration=iteration,
            bucket=shape.bucket,
            decodes=tuple(self.decodes),
            chunks=tuple(self.chunks),
            prefill_shares=tuple(shares),
            handoffs=tuple(self.handoffs),
            admissions=tuple(self.admissions),
            placements=tuple(self.placements),
            predicted_s=predicted_s,
            level=self.chosen.level,
            prefill_room=self.chosen.tokens,
        )
