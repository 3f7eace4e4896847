"""Small simulated engines, and systems without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conflux_jax.config import SchedulerConfig
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.plan import PoolGeometry
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import LatencyPredictor
from conflux_jax.simulation.system import SimulatedRequest, Tokens
from conflux_jax.simulation.systems.conflux import Blueprint
from conflux_jax.simulation.work import CostModel, Stages, Work


class PlainCosts:
    """A second for every iteration, a hundredth for each prefill token, 1e-4 for each KV token that
    the group with most reads."""

    def stages(self, work: Work) -> Stages:
        prefill = 0.01 * sum(length for _, length in work.chunks)
        decode = 1e-4 * max(work.contexts)
        return Stages(
            linear=1.0,
            prefill_attention=prefill,
            decode_attention=decode,
            attention=prefill + decode,
        )


def blueprint(
    costs: CostModel,
    groups: int = 1,
    num_pages: int = 64,
    max_model_len: int = 512,
    predictor: LatencyPredictor | None = None,
    **settings: Any,
) -> Blueprint:
    """Pages of 16 tokens; at most 64 tokens an iteration and 8 requests unless `settings` (of
    SchedulerConfig) say otherwise."""
    defaults: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "handoff_pages": 4}
    config = SchedulerConfig(**defaults | settings)
    geometry = PoolGeometry(groups, num_pages, page_tokens=16, prefill_page_tokens=16 * groups)
    limits = BatchLimits(
        geometry=geometry,
        page_rows=16,
        max_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        max_segments=config.max_prefill_segments,
        handoff_pages=config.handoff_pages,
    )
    level = -(-config.max_num_batched_tokens // groups)
    ladders = Ladders.make(config.max_num_seqs, level, 2.0, handoff=geometry.needs_handoff)
    return Blueprint(config, limits, ladders, predictor, costs)


def requests_of(
    *rows: tuple[float, int, int], deadline_s: float = math.inf, tbt_slo_s: float = math.inf
) -> list[SimulatedRequest]:
    """(arrival_s, prompt_tokens, output_tokens) each; the same targets for all of them."""
    targets = deadline_s, tbt_slo_s
    return [SimulatedRequest(number, *row, *targets) for number, row in enumerate(rows)]


@dataclass
class Scripted:
    """Satisfies `System`: gives out what it was told to, whatever was asked of it. refuses: the
    requests that it does not take."""

    given: Sequence[Tokens]
    due_s: Sequence[float] | None = None  # of each; default: the tokens' own times
    refuses: tuple[int, ...] = ()
    added: list[int] = field(default_factory=list)
    _at: int = 0

    def add(self, request: SimulatedRequest) -> None:
        if request.number in self.refuses:
            raise ValueError(f"prompt: {request.prompt_tokens} tokens are too many")
        self.added.append(request.number)

    @property
    def next_s(self) -> float:
        if self._at == len(self.given):
            return math.inf
        due_s = [tokens.time_s for tokens in self.given] if self.due_s is None else self.due_s
        return due_s[self._at]

    def step(self) -> Sequence[Tokens]:
        self._at += 1
        return (self.given[self._at - 1],)
