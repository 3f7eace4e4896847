"""The last iterations of an engine, boiled down to numbers: for a timeline, and for who looks on.

Plans themselves are not kept: they hold prompts and a column for every decode.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, Request
from conflux_jax.scheduler.latency_model import Parts


class IterationRecord(NamedTuple):
    """number: that of the plan. end_s: when its results reached the host, on the recorder's clock;
    elapsed_s: as measured. predicted_s: with the margin that holds targets, 0 without a latency
    model. rows: of the bucket, a group. level, room: see `IterationPlan`. decodes, contexts (KV
    tokens that those read), shares (prefill tokens): one number a group. parts: what the latency
    model says, without the margin."""

    number: int
    end_s: float
    elapsed_s: float
    predicted_s: float
    rows: int
    level: int
    room: int
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    shares: tuple[int, ...]
    num_chunks: int
    handoff_pages: int
    parts: Parts | None

    @property
    def start_s(self) -> float:
        return self.end_s - self.elapsed_s


class Recorder:
    """An `Observer`. most: iterations that are kept, the newest. modelled: `Engine.modelled`."""

    def __init__(
        self,
        most: int,
        clock: Callable[[], float],
        modelled: Callable[[IterationPlan], Parts | None],
    ):
        self._clock, self._modelled = clock, modelled
        self._lock = threading.Lock()
        self._records: deque[IterationRecord] = deque(maxlen=most)

    def records(self, after: int = -1) -> list[IterationRecord]:
        """Those with a higher number, oldest first. On any thread."""
        with self._lock:
            records = list(self._records)
        first = len(records)
        while first and records[first - 1].number > after:
            first -= 1
        return records[first:]

    def collected(self, plan: IterationPlan, elapsed_s: float) -> None:
        groups = len(plan.decodes)
        record = IterationRecord(
            number=plan.iteration,
            end_s=self._clock(),
            elapsed_s=elapsed_s,
            predicted_s=plan.predicted_s,
            rows=plan.bucket.rows,
            level=plan.level,
            room=plan.prefill_room,
            decodes=tuple([len(rows) for rows in plan.decodes]),
            contexts=tuple([int(rows.positions.sum()) for rows in plan.decodes]),
            shares=plan.prefill_shares or (0,) * groups,
            num_chunks=len(plan.chunks),
            handoff_pages=sum([handoff.num_pages for handoff in plan.handoffs]),
            parts=self._modelled(plan),
        )
        with self._lock:
            self._records.append(record)

    def launched(self, plan: IterationPlan) -> None:
        pass

    def delivered(
        self, requests: Sequence[Request], reasons: Sequence[FinishReason | None], now_s: float
    ) -> None:
        pass

    def ended(self, request: Request, reason: FinishReason) -> None:
        pass
