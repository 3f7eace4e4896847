"""A scheduler on a checking device, turned by the real loop, with its books audited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conflux_jax.config import SchedulerConfig
from conflux_jax.loop import InFlight, turn
from conflux_jax.plan import IterationPlan, PoolGeometry
from conflux_jax.request import FinishReason, Request, SamplingParams, TokenEvent
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import prefill_work
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.scheduler.state import RequestState
from tests.scheduler.checker import VOCAB, CheckingExecutor, solo

EOS = frozenset((0, 5))


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int = 16,
    ignore_eos: bool = True,
    eos: frozenset[int] = EOS,
    arrival_s: float = 0.0,
    **params: Any,
) -> Request:
    """`prompt`: its tokens, or how many (then its tokens depend on the id). `params`: more of
    SamplingParams."""
    if isinstance(prompt, int):
        start = sum(map(ord, request_id))
        prompt = [(start + i * i) % VOCAB for i in range(prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
    return Request(request_id, tuple(prompt), sampling, max_tokens, eos, 0, arrival_s)


class Harness:
    """Settings of SchedulerConfig by keyword; small by default. `events` are those that came back,
    by request; `ends` the requests that are over, each once."""

    def __init__(
        self,
        groups: int = 1,
        num_pages: int = 64,
        page_tokens: int = 4,
        prefill_page_tokens: int | None = None,
        max_model_len: int = 4096,
        max_decodes: int | None = None,
        shared: bool = False,
        **settings: Any,
    ):
        self.config = SchedulerConfig(**{"max_num_batched_tokens": 32, **settings})
        prefill_page_tokens = prefill_page_tokens or page_tokens * groups
        page_tokens = prefill_page_tokens if shared else page_tokens
        self.geometry = PoolGeometry(groups, num_pages, page_tokens, prefill_page_tokens, shared)
        level = -(-self.config.max_num_batched_tokens // groups)
        decodes = max_decodes or self.config.max_num_seqs
        self.ladders = Ladders.make(decodes, level, 2.0, handoff=self.geometry.needs_handoff)
        self.scheduler = Scheduler(self.config, self.geometry, self.ladders, max_model_len)
        self.executor = CheckingExecutor(self.config, self.geometry, self.ladders)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self._previous: InFlight | None = None
        self._time = 0.0

    @property
    def plans(self) -> list[IterationPlan]:
        return self.executor.plans

    def add(self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 16, **more):
        request = make_request(request_id, prompt, max_tokens, arrival_s=self._time, **more)
        self.scheduler.add(request)
        if request_id in self.ends:  # the id was used before
            self._check_answer(request_id)
            del self.ends[request_id]
        self.requests[request_id] = request
        self.tokens[request_id] = []
        return request

    def cancel(self, request_id: str) -> bool:
        done = self.scheduler.cancel(request_id)
        if done:
            self.executor.end(self.requests[request_id])
            self.ends[request_id] = FinishReason.ABORT
        return done

    def stop(self, request_id: str) -> bool:
        """The text side found a stop string."""
        done = self.scheduler.finish(request_id, FinishReason.STOP)
        if done:
            self.executor.end(self.requests[request_id])
            self.ends[request_id] = FinishReason.ABORT  # what came is a prefix
        return done

    def turn(self) -> list[TokenEvent]:
        idle = self._previous is None
        self._previous, events = turn(self.scheduler, self.executor, self._clock, self._previous)
        assert not (idle and self._previous is None and self.scheduler.has_work), "nothing moves"
        for event in events:
            assert event.request_id not in self.ends, "an event after the end"
            assert event.token_id is not None
            self.tokens[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason
        return events

    def _clock(self) -> float:
        self._time += 0.01
        return self._time

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def drain(self, limit: int = 10_000) -> None:
        """Run until all is over; then every answer must be the plain one and every page free."""
        while self.scheduler.has_work or self._previous is not None:
            self.turn()
            self.audit()
            limit -= 1
            assert limit > 0, "no end"
        self.check_answers()
        load = self.scheduler.load()
        assert set(load.free_pages) == {self.geometry.num_pages}
        assert not any(load.num_decodes) and not any(load.context_tokens)
        assert load.num_prefilling == load.num_waiting == load.prefill_tokens == 0

    def check_answers(self) -> None:
        for request_id in self.requests:
            self._check_answer(request_id)

    def _check_answer(self, request_id: str) -> None:
        request, reason = self.requests[request_id], self.ends[request_id]
        expected, got = solo(request), tuple(self.tokens[request_id])
        if reason is FinishReason.ABORT:
            assert got == expected[: len(got)]
            return
        assert got == expected
        stopped = expected[-1] in request.eos_token_ids and not request.params.ignore_eos
        assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    def audit(self) -> None:
        """The scheduler's books: what is held plus what is free is everything, counted once."""
        scheduler, memory = self.scheduler, self.scheduler._memory
        states = list(scheduler._requests.values())
        holding = [s for s in states if s.slot >= 0]
        for pool in range(self.geometry.num_pools):
            held = [page for s in holding for page in self._pages(s, pool)]
            assert len(set(held)) == len(held), "a page with two owners"
            free = memory.pool._stacks[pool].tolist()
            assert sorted(held + free) == list(range(self.geometry.num_pages))
            pledged = sum(s.pledge_pages for s in holding if s.pledge_pool == pool)
            assert memory._pledged[pool] == pledged
        for group in range(self.geometry.groups):
            placed = [s for s in holding if s.group == group]
            assert memory.num_rows[group] == len(placed) <= self.ladders.max_decodes
            context = sum(s.context_tokens for s in placed)
            assert memory.context_tokens[group] == context
            handing = [s for s in placed if s.phase.value in ("prefilling", "handoff")]
            unhanded = sum(len(s.pages) - s.num_handed for s in handing)
            assert memory.unhanded[group] == (unhanded if self.geometry.needs_handoff else 0)
        slots = [s.slot for s in holding] + memory._slots
        assert sorted(slots) == list(range(self.config.max_num_seqs))
        queued = list(scheduler._queue._inner.waiting(self._time, scheduler._pace.tokens_s))
        assert len(queued) == len(scheduler._queue)
        assert scheduler._queue.num_tokens == sum(s.queued_tokens for s in queued)
        assert scheduler._queue.num_pairs == sum(prefill_work(0, s.queued_tokens) for s in queued)
        rows_left = [s.unplanned for members in scheduler._running.decoding.states for s in members]
        assert sorted(scheduler._running.decoding.rows_left()) == sorted(rows_left)
        running = scheduler._running
        listed = [*queued, *running.prefilling.values(), *running.handing.values()]
        for group, members in enumerate(running.decoding.states):
            assert all(s.table is running.decoding and s.group == group for s in members)
            assert [s.row for s in members] == list(range(len(members)))
            listed += members
        listed += [s for s in states if s.phase.value == "draining"]
        assert {id(s) for s in listed} == {id(s) for s in states} and len(listed) == len(states)
        for s in states:
            parts = [part for entry in scheduler._in_flight for part in entry.samplers]
            assert s.in_flight == sum(s in part for part in parts)
            assert s.unplanned >= 0
            assert s.bypassed <= self.config.max_bypass

    def _pages(self, state: RequestState, pool: int) -> list[int]:
        prefill = list(state.prefill_pages[pool]) if state.prefill_pages else []
        placed = state.group >= 0 and self.geometry.pool_of(state.group) == pool
        return prefill + (list(state.held_pages) if placed else [])
