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
from conflux_jax.scheduler.state import RequestState
from conflux_jax.scheduler.waterfill import waterfill


class Draft:
    """`samplers`: who gets a token, in the order of `IterationPlan.samples`. `ending`: those whose
    last sample this is. `handed`: those whose hand-off this completes."""

    def __init__(self):
        self.decodes: list[DecodeRows] = []
        self.chunks: list[PrefillChunk] = []
        self.handoffs: list[Handoff] = []
        self.admissions: list[Admission] = []
        self.placements: list[Placement] = []
        self.samplers: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.handed: list[RequestState] = []
        self.preempted = False
        self.budget = 0  # prefill tokens that fit beside the decodes

    def add_placement(self, state: RequestState) -> None:
        self.placements.append(Placement(state.slot, state.group, tuple(state.pages)))

    def seal(self, iteration: int, ladders: Ladders, level: int) -> IterationPlan | None:
        """The plan in the smallest bucket that holds it; None if there is nothing to do."""
        if not (self.samplers or self.chunks or self.handoffs):
            return None
        loads = [len(rows) for rows in self.decodes]
        shares = waterfill(loads, level, sum(chunk.length for chunk in self.chunks))
        return IterationPlan(
            iteration=iteration,
            bucket=ladders.fit(loads, shares, handoff=bool(self.handoffs)),
            decodes=tuple(self.decodes),
            chunks=tuple(self.chunks),
            prefill_shares=shares,
            handoffs=tuple(self.handoffs),
            admissions=tuple(self.admissions),
            placements=tuple(self.placements),
        )
