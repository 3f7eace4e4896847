"""What the dashboard's page is told: one type an event, sent as a JSON object of the same fields.

Nothing here is of a prompt or of what was generated. Times are on the engine's clock; what has not
happened or is not set is null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from conflux_jax.config import Config
from conflux_jax.engine import Engine
from conflux_jax.recorder import IterationRecord
from conflux_jax.scheduler.outlook import Load
from conflux_jax.scheduler.snapshot import RequestView, Snapshot
from conflux_jax.serve.http_errors import to_json
from conflux_jax.serve.latency_series import WINDOW_S, LatencySeries, Point

MOST_ROWS = 100  # requests shown of those that run, and of those that wait
MOST_CELLS = 240  # of the map of one pool


@dataclass(frozen=True)
class Hello:
    """Once, at the beginning: what does not change. pool_pages: of one pool; shared_pool: there is
    one for all groups. window_s: that a point of the latencies is about."""

    model: str
    groups: int
    tp: int
    page_tokens: int
    pool_pages: int
    shared_pool: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    ttft_slo_s: float | None
    tbt_slo_s: float | None
    window_s: float

    @classmethod
    def of(cls, config: Config, engine: Engine) -> Hello:
        info, scheduler = engine.info, config.scheduler
        return cls(
            model=info.name,
            groups=info.sp,
            tp=info.tp,
            page_tokens=info.page_tokens,
            pool_pages=info.num_pages,
            shared_pool=config.execution.decode_attention == "spread",
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            ttft_slo_s=scheduler.ttft_slo_s,
            tbt_slo_s=scheduler.tbt_slo_s,
            window_s=WINDOW_S,
        )


class ShownIteration(NamedTuple):
    """See `IterationRecord`. predicted_s: null without a latency model."""

    number: int
    measured_s: float
    predicted_s: float | None
    rows: int
    level: int
    room: int
    decodes: tuple[int, ...]
    shares: tuple[int, ...]
    handoff_pages: int

    @classmethod
    def of(cls, record: IterationRecord) -> ShownIteration:
        return cls(
            number=record.number,
            measured_s=round(record.elapsed_s, 6),
            predicted_s=round(record.predicted_s, 6) or None,
            rows=record.rows,
            level=record.level,
            room=record.room,
            decodes=record.decodes,
            shares=record.shares,
            handoff_pages=record.handoff_pages,
        )


@dataclass(frozen=True)
class Now:
    """Some times a second. status: as `/health` says it, or "stalled" where the engine does not
    answer; what follows `message` is then as it was last, zeros if it never did. iterations: those
    since the event before, the last ones where they were many."""

    status: str
    message: str
    running: int
    waiting: int
    prefill_tokens_waiting: int
    preemptions: int
    group_decodes: tuple[int, ...]
    group_contexts: tuple[int, ...]
    iterations: list[dict[str, Any]]

    @classmethod
    def of(
        cls, engine: Engine, load: Load | None, status: str, records: Sequence[IterationRecord]
    ) -> Now:
        none = (0,) * engine.info.sp
        return cls(
            status=status,
            message=engine.state_message,
            running=max(0, engine.num_live - load.num_waiting) if load else 0,
            waiting=load.num_waiting if load else 0,
            prefill_tokens_waiting=load.prefill_tokens if load else 0,
            preemptions=load.num_preemptions if load else 0,
            group_decodes=load.num_decodes if load else none,
            group_contexts=load.context_tokens if load else none,
            iterations=[ShownIteration.of(record)._asdict() for record in records],
        )


class ShownRequest(NamedTuple):
    """due_s: until its first token is due, below 0 where that is over. is_late: the first token
    came late, or has not come and is overdue."""

    id: str
    phase: str
    group: int | None
    prompt_tokens: int
    prefill_left: int
    output_tokens: int
    max_output_tokens: int
    age_s: float
    due_s: float | None
    ttft_s: float | None
    is_late: bool
    preemptions: int

    @classmethod
    def of(cls, view: RequestView, now_s: float, first_s: float | None) -> ShownRequest:
        has_deadline = math.isfinite(view.deadline_s)
        return cls(
            id=view.request_id,
            phase=view.phase,
            group=view.group if view.group >= 0 else None,
            prompt_tokens=view.prompt_tokens,
            prefill_left=view.prefill_left,
            output_tokens=view.output_tokens,
            max_output_tokens=view.max_output_tokens,
            age_s=round(now_s - view.arrival_s, 3),
            due_s=round(view.deadline_s - now_s, 3) if has_deadline else None,
            ttft_s=None if first_s is None else round(first_s - view.arrival_s, 4),
            is_late=(now_s if first_s is None else first_s) > view.deadline_s,
            preemptions=view.num_preemptions,
        )


class ShownPool(NamedTuple):
    """Pages by layout; and for each cell of its map, in order, how many of its pages are in prefill
    and in decode layout."""

    prefill: int
    decode: int
    free: int
    prefill_cells: list[int]
    decode_cells: list[int]


@dataclass(frozen=True)
class Details:
    """Once or twice a second. requests: those that run, the oldest; queue: those that wait, by
    deadline. num_requests, num_queued: of all. cell_pages: pages of a cell of the pools' maps."""

    requests: list[dict[str, Any]]
    queue: list[dict[str, Any]]
    num_requests: int
    num_queued: int
    cell_pages: int
    pools: list[dict[str, Any]]

    @classmethod
    def of(cls, snapshot: Snapshot, now_s: float, first_s: dict[str, float]) -> Details:
        def shown(views: Sequence[RequestView]) -> list[dict[str, Any]]:
            return [
                ShownRequest.of(view, now_s, first_s.get(view.request_id))._asdict()
                for view in views
            ]

        cell_pages = max(1, -(-snapshot.used.shape[1] // MOST_CELLS))
        return cls(
            requests=shown(snapshot.running),
            queue=shown(snapshot.waiting),
            num_requests=snapshot.num_running,
            num_queued=snapshot.num_waiting,
            cell_pages=cell_pages,
            pools=[pool._asdict() for pool in pool_maps(snapshot, cell_pages)],
        )


@dataclass(frozen=True)
class Points:
    """New points of the latencies, oldest first; the first of these events has all there are."""

    points: list[dict[str, Any]]

    @classmethod
    def of(cls, series: LatencySeries, seen: int) -> Points:
        return cls([_rounded(point) for point in series.since(seen)])


def _rounded(point: Point) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in point._asdict().items()
    }


Event = Hello | Now | Details | Points


def as_event(event: Event) -> bytes:
    """As server-sent events are written; its name is the type's, in lower case."""
    name = type(event).__name__.lower()
    return b"event: " + name.encode() + b"\ndata: " + to_json(asdict(event)) + b"\n\n"


def pool_maps(snapshot: Snapshot, cell_pages: int) -> list[ShownPool]:
    """One for each pool.

    Worked, cells of 2 pages: pages 0, 1 and 4 of 5 are used, 1 and 4 by a prompt:

    >>> from array import array
    >>> used, prefill = np.array([[1, 1, 0, 0, 1]], bool), (array("i", [1, 4]),)
    >>> pool_maps(Snapshot([], [], 1, 0, used, [prefill]), 2)[0]
    ShownPool(prefill=2, decode=1, free=2, prefill_cells=[1, 0, 1], decode_cells=[1, 0, 0])
    """
    num_pages = snapshot.used.shape[1]
    starts = np.arange(0, num_pages, cell_pages)
    pools = []
    for pool, used in enumerate(snapshot.used):
        in_prefill = np.zeros(num_pages, np.int64)
        for pages in snapshot.prefill:
            in_prefill[list(pages[pool])] = 1
        in_decode = used & (in_prefill == 0)
        prefill, decode = int(in_prefill.sum()), int(in_decode.sum())
        pools.append(
            ShownPool(
                prefill=prefill,
                decode=decode,
                free=num_pages - prefill - decode,
                prefill_cells=_by_cell(in_prefill, starts),
                decode_cells=_by_cell(in_decode.astype(np.int64), starts),
            )
        )
    return pools


def _by_cell(marks: Int[np.ndarray, " pages"], starts: Int[np.ndarray, " cells"]) -> list[int]:
    return np.add.reduceat(marks, starts).tolist() if len(marks) else []


def status_of(engine: Engine | None) -> tuple[str, str]:
    """What `/health` says: "ok" only while new requests are taken; and why not."""
    if engine is None:
        return "loading", "the model is still loading"
    if not engine.healthy:
        return "failed", engine.state_message or "the engine makes no progress"
    if engine.state_message:
        return "draining", engine.state_message
    return "ok", ""
