"""What an onlooker may see of the scheduler: its requests, and which KV pages serve what.

Taken between two iterations, on the thread that plans them, so it copies as little as it can and
leaves the rest to its reader. It holds no prompt and no token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from conflux_jax.plan import Pages
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.state import Phase, RequestState, Running


class RequestView(NamedTuple):
    """prefill_left: tokens of its prompt, and of what it must compute again, still to prefill.
    group: where it decodes or will; -1: not settled. deadline_s: of its first token, infinite where
    it has none; that and arrival_s are on the clock of arrivals."""

    request_id: str
    phase: str
    group: int
    prompt_tokens: int
    prefill_left: int
    output_tokens: int
    max_output_tokens: int
    arrival_s: float
    deadline_s: float
    num_preemptions: int


@dataclass(frozen=True)
class Snapshot:
    """running: those that have been there longest; waiting: those that are due first. num_running,
    num_waiting: of all. used: whether a page of a pool belongs to a request. prefill: the pages
    among them that are in prefill layout, for each prompt and pool."""

    running: list[RequestView]
    waiting: list[RequestView]
    num_running: int
    num_waiting: int
    used: Bool[np.ndarray, "pools pages"]
    prefill: list[tuple[Pages, ...]]


def take_snapshot(
    states: Iterable[RequestState], running: Running, memory: Memory, most: int
) -> Snapshot:
    """states: all requests in order of arrival. most: how many are shown of those that run, and of
    those that wait. The waiting are sorted here: the queue's own order is kept as it is asked for,
    so to ask would change it."""
    waiting: list[RequestState] = []
    shown: list[RequestView] = []
    num_running = 0
    for state in states:
        if state.phase is Phase.WAITING:
            waiting.append(state)
            continue
        num_running += 1
        if num_running <= most:
            shown.append(_view(state))
    due = heapq.nsmallest(most, waiting, key=lambda state: (state.deadline_s, state.order))
    prompts = (*running.prefilling.values(), *running.handing.values())
    return Snapshot(
        running=shown,
        waiting=[_view(state) for state in due],
        num_running=num_running,
        num_waiting=len(waiting),
        used=memory.pool.used(),
        prefill=[state.prefill_pages for state in prompts if state.prefill_pages],
    )


def _view(state: RequestState) -> RequestView:
    is_prompt = state.phase in (Phase.WAITING, Phase.PREFILLING)
    return RequestView(
        request_id=state.request_id,
        phase=state.phase.value,
        group=state.group,
        prompt_tokens=len(state.request.prompt_token_ids),
        prefill_left=state.prefill_left if is_prompt else 0,
        output_tokens=len(state.outputs),
        max_output_tokens=state.request.max_output_tokens,
        arrival_s=state.request.arrival_s,
        deadline_s=state.deadline_s,
        num_preemptions=state.num_preemptions,
    )
