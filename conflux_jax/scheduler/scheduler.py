"""The scheduler: requests in, a plan for each iteration out, results back in.

Pure host Python: no JAX, no clock (`now` is an argument), no threads; so the same object runs under
the engine and under the simulator, and the same inputs give the same plans.

**One iteration ahead.** `schedule()` for iteration N+1 is called before `commit()` of N. Lengths
are known without the tokens, so it moves every request forward as if N had run, and `commit` brings
the tokens. Only a stop that depends on a token comes late: its request may have one more row under
way, whose result `commit` drops. Results belong to the request that was planned, not to its id or
slot, which may be another's by then.

**Freed means free at once.** The device runs plans in order, so what is freed while plan N is under
way can be used from N+1 on. Hence the last step of a pass, `_settle`: what a plan itself still
reads is freed only when that plan is complete.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import (
    Admission,
    IterationPlan,
    PoolGeometry,
    PrefillChunk,
    StepOutput,
)
from conflux_jax.request import FinishReason, InvalidRequest, QueueFull, Request, TokenEvent
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import Budget, Decodes
from conflux_jax.scheduler.candidates import Candidate, find_candidates
from conflux_jax.scheduler.draft import Draft
from conflux_jax.scheduler.handoff import is_nearly_done, plan_handoffs
from conflux_jax.scheduler.latency_model import IterationShape, LatencyPredictor
from conflux_jax.scheduler.limits import RequestLimits
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.ordering import make_ordering
from conflux_jax.scheduler.pressure import secure_pages
from conflux_jax.scheduler.state import Phase, RequestState, Running


@dataclass(frozen=True)
class Load:
    """How busy the engine is. Tuples have one entry per group; a request counts in its group from
    its placement on, with all tokens of its prompt, though its first decode row may be a few
    iterations away."""

    num_decodes: tuple[int, ...]
    context_tokens: tuple[int, ...]  # KV tokens of those
    free_pages: tuple[int, ...]
    num_prefilling: int
    num_waiting: int
    prefill_tokens: int  # not prefilled yet, of the waiting and the partly prefilled
    num_preemptions: int  # since the start
    # Measured over predicted seconds, of iterations without and with prefill; 1 without a model.
    latency_corrections: tuple[float, float]


PACE_STEP = 0.1  # share of the newest iteration in the mean pace


class InFlight(NamedTuple):
    """What is kept of a plan until its results are here. samplers: in the order of its samples,
    some at a time. is_full: prefill used all its budget."""

    iteration: int
    samplers: list[Sequence[RequestState]]
    shape: IterationShape | None
    is_full: bool


class Scheduler:
    """See the module. Raises ValueError when ladders, pool and limits do not belong together.

    max_model_len: most tokens of prompt plus output of one request. predictor: the latency model;
    None: iterations are filled to max_num_batched_tokens, whatever targets requests have.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        geometry: PoolGeometry,
        ladders: Ladders,
        max_model_len: int,
        predictor: LatencyPredictor | None = None,
    ):
        self._config = config
        self._geometry = geometry
        self._ladders = ladders
        self._budget = Budget(geometry, ladders, config.max_num_batched_tokens, predictor)
        self._check_ladders()
        self._limits = RequestLimits(max_model_len, geometry)
        self._requests: dict[str, RequestState] = {}
        self._queue = make_ordering(config)
        self._running = Running(geometry)
        self._memory = Memory(
            geometry,
            config.max_num_seqs,
            ladders.max_decodes,
            config.handoff_pages,
            config.packing_threshold,
        )
        self._in_flight: deque[InFlight] = deque()
        self._pace = math.inf  # prefill tokens a second, of iterations with all they had room for
        self._iteration = 0
        self._arrivals = 0
        self._preemptions = 0

    def _check_ladders(self) -> None:
        level = self._budget.max_level
        if self._ladders.rows[-1] < level:
            raise ValueError(f"rows ladder ends at {self._ladders.rows[-1]}, below {level}")
        if self._geometry.needs_handoff != self._ladders.handoff:
            raise ValueError("ladders have hand-off variants exactly where KV is handed over")
        if self._geometry.groups == 1 and self._ladders.max_decodes < self._config.max_num_seqs:
            raise ValueError("one group needs a decode row for each of max_num_seqs")

    # Requests

    def output_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """`Request.max_output_tokens` for a prompt; see RequestLimits. Safe on any thread."""
        return self._limits.output_limit(prompt_tokens, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, OutOfRange (naming field and limit) or QueueFull;
        then nothing has changed."""
        if request.request_id in self._requests:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        self._limits.check(request)
        if len(self._queue) >= self._config.max_waiting:
            raise QueueFull(f"max_waiting: {self._config.max_waiting} requests are queued")
        state = RequestState(request, self._arrivals)
        self._set_targets(state)
        self._arrivals += 1
        self._requests[request.request_id] = state
        self._queue.add(state)

    def _set_targets(self, state: RequestState) -> None:
        params, config = state.request.params, self._config
        ttft_slo_s = config.ttft_slo_s if params.ttft_slo_s is None else params.ttft_slo_s
        tbt_slo_s = config.tbt_slo_s if params.tbt_slo_s is None else params.tbt_slo_s
        if ttft_slo_s is not None:
            state.deadline_s = state.request.arrival_s + ttft_slo_s
        if tbt_slo_s is not None:
            state.tbt_slo_s = tbt_slo_s

    def cancel(self, request_id: str) -> bool:
        """End a request now, in any phase: what it holds is free, and no event of it comes after.
        False where there is none (any more)."""
        state = self._requests.get(request_id)
        if state is not None:
            self._end(state)
        return state is not None

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason that only its text shows (a stop string). As `cancel`."""
        return self.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def load(self) -> Load:
        prefilling = self._running.prefilling.values()
        started = sum(state.prefill_left for state in prefilling)
        corrections = self._budget.corrections
        return Load(
            num_decodes=tuple(self._memory.num_rows),
            context_tokens=tuple(self._memory.context_tokens),
            free_pages=self._free_pages(),
            num_prefilling=len(prefilling),
            num_waiting=len(self._queue),
            prefill_tokens=started + self._queue.num_tokens,
            num_preemptions=self._preemptions,
            latency_corrections=(corrections[False].ratio, corrections[True].ratio),
        )

    def _free_pages(self) -> tuple[int, ...]:
        pools, geometry = self._memory.free_pages(), self._geometry
        return tuple(pools[geometry.pool_of(group)] for group in range(geometry.groups))

    def _end(self, state: RequestState) -> None:
        if state.phase is Phase.WAITING:
            self._queue.remove(state)
        self._running.remove(state, Phase.GONE)
        self._memory.release(state)
        del self._requests[state.request_id]

    def _preempt(self, state: RequestState) -> None:
        """Back to the queue, to be recomputed from its prompt and what it has generated. A sample
        under way is real and will count; until it is here the request is not admitted again."""
        self._running.remove(state, Phase.WAITING)
        self._memory.release(state, for_good=False)
        state.num_preemptions += 1
        state.bypassed = 0
        self._preemptions += 1
        self._queue.add(state)

    # One iteration

    def schedule(self, now: float) -> IterationPlan | None:
        """Plan the next iteration; None when there is nothing to run. Deterministic."""
        draft = Draft()
        self._secure_pages(draft)
        self._plan_decodes(draft)
        self._plan_prefill(draft, now)
        self._plan_handoffs(draft)
        self._settle(draft)
        if draft.is_empty:
            return None
        plan = draft.seal(self._iteration, self._budget, self._ladders)
        is_full = draft.budget > 0 and plan.num_prefill_tokens == draft.budget
        samplers = [*draft.decoding, draft.prefilled]
        self._in_flight.append(InFlight(self._iteration, samplers, draft.shape, is_full))
        self._iteration += 1
        return plan

    def _secure_pages(self, draft: Draft) -> None:
        before = self._preemptions
        for state in secure_pages(self._running, self._memory, self._preempt):
            self._note_placed(draft, state)
        draft.preempted = self._preemptions > before

    def _plan_decodes(self, draft: Draft) -> None:
        """One row for every running decode."""
        table = self._running.decoding
        longest, target_s = 0, math.inf
        if self._budget.predictor is not None:
            handing = self._running.handing.values()
            target_s = min([table.tbt_slo_s, *(state.tbt_slo_s for state in handing)])
            longest = table.longest_context
        loads = table.num_rows
        draft.load = Decodes(loads, list(table.context_tokens), longest, target_s)
        draft.decoding = [table.members(group).states for group in range(len(loads))]
        draft.decodes, ending = table.advance()
        draft.ending += ending
        for group, load in enumerate(loads):
            self._memory.context_tokens[group] += load

    def _plan_prefill(self, draft: Draft, now: float) -> None:
        """Chunks up to the budget, of the partly prefilled and the waiting, by order."""
        config, started = self._config, list(self._running.prefilling.values())
        self._queue.look(started)
        # After a preemption memory is short: to admit another one now would only bring the next.
        admits = not draft.preempted and self._memory.has_slot and len(self._queue)
        most = config.max_prefill_segments, self._budget.most_room(draft.load.loads)
        memory = self._memory if admits else None
        candidates = find_candidates(
            started, self._queue, memory, config.max_bypass, most, now, self._pace
        )
        chosen = self._budget.choose(draft.load, [candidate.span for candidate in candidates])
        draft.budget = chosen.tokens
        for candidate, length in zip(candidates, chosen.lengths, strict=True):
            if length and (
                candidate.state.phase is not Phase.WAITING or self._admit(draft, candidate)
            ):
                self._plan_chunk(draft, candidate.state, length)

    def _admit(self, draft: Draft, candidate: Candidate) -> bool:
        """Out of the queue into a slot; False where a placement of this pass took the pages."""
        state = candidate.state
        if not self._memory.room().fits(state):
            return False
        for overtaken in candidate.overtakes:
            overtaken.bypassed += 1
        self._queue.admit(state)
        self._memory.admit(state)
        self._running.enter(state, Phase.PREFILLING)
        state.bypassed = 0
        pages = state.prefill_pages
        assert pages is not None
        tables = tuple(array("i", pool.tobytes()) for pool in pages)
        draft.admissions.append(Admission(state.slot, state.request, state.token_ids, tables))
        return True

    def _plan_chunk(self, draft: Draft, state: RequestState, length: int) -> None:
        """The next `length` tokens of an admitted prompt."""
        is_last = length == state.prefill_left
        draft.chunks.append(
            PrefillChunk(state.request_id, state.slot, state.num_tokens, length, is_last)
        )
        state.num_tokens += length
        if is_last:
            self._complete_prefill(draft, state)
        else:
            self._place_early(draft, state)

    def _place_early(self, draft: Draft, state: RequestState) -> None:
        """A decode group for a prompt that is nearly done, so that its pages can go meanwhile. Only
        where that takes nothing from anyone; else it is tried again with the next chunk."""
        if not self._geometry.needs_handoff or state.group >= 0 or state.unplanned <= 1:
            return
        pages = self._geometry.decode_pages(len(state.token_ids))
        nearly = is_nearly_done(pages, state.prefill_left, draft.budget, self._config.handoff_pages)
        if nearly and self._memory.place(state):
            draft.add_placement(state)

    def _complete_prefill(self, draft: Draft, state: RequestState) -> None:
        """The last chunk samples; what follows it needs a decode group, if anything does."""
        draft.prefilled.append(state)
        state.num_planned += 1
        if not state.unplanned:
            draft.ending.append(state)
            return
        self._running.enter(state, Phase.HANDOFF)
        if state.group < 0 and self._memory.place(state):
            self._note_placed(draft, state)

    def _note_placed(self, draft: Draft, state: RequestState) -> None:
        draft.add_placement(state)
        if not self._geometry.needs_handoff:
            draft.handed.append(state)  # its KV lies where it decodes

    def _plan_handoffs(self, draft: Draft) -> None:
        """Pages on their way: first of the prompts that wait for nothing else to decode."""
        if not self._geometry.needs_handoff:
            return
        handing = self._running.handing.values()
        waiting = chain(handing, self._running.prefilling.values())
        draft.handoffs, complete = plan_handoffs(
            waiting, self._memory, self._geometry, self._config.handoff_pages
        )
        draft.handed += [state for state in complete if state.phase is Phase.HANDOFF]

    def _settle(self, draft: Draft) -> None:
        """Free what this plan is the last to use; let those that are handed over decode."""
        for state in draft.handed:
            self._memory.release_prefill(state)
            self._running.enter(state, Phase.DECODING)
        for state in draft.ending:
            self._running.remove(state, Phase.DRAINING)
            self._memory.release(state)

    def commit(self, plan: IterationPlan, output: StepOutput, now: float) -> list[TokenEvent]:
        """Take the results of the oldest plan under way; one event for each that still counts.

        Raises ValueError when `plan` is not that plan, or `output` not of its size.
        """
        oldest = self._in_flight[0] if self._in_flight else None
        if oldest is None or plan.iteration != oldest.iteration:
            expected = None if oldest is None else oldest.iteration
            raise ValueError(f"iteration {plan.iteration} committed, {expected} is the oldest")
        samplers = oldest.samplers
        token_ids: list[int] = output.token_ids.tolist()
        if len(token_ids) != (expected := sum(map(len, samplers))):
            raise ValueError(f"{len(token_ids)} tokens came back for {expected} samples")
        self._in_flight.popleft()
        self._learn(plan, oldest, output.elapsed_s)
        gone, logprobs = Phase.GONE, output.logprobs
        events = []
        for state, token_id in zip(chain.from_iterable(samplers), token_ids, strict=True):
            if state.phase is gone:
                continue
            outputs = state.outputs
            outputs.append(token_id)
            reason = None
            if token_id in state.stop_token_ids:
                reason = FinishReason.STOP
            elif len(outputs) == state.request.max_output_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._end(state)
            report = logprobs.get(state.request_id) if logprobs else None
            events.append(TokenEvent(state.request_id, token_id, reason, report))
        return events

    def _learn(self, plan: IterationPlan, entry: InFlight, elapsed_s: float) -> None:
        """From what an iteration took."""
        if entry.shape is not None:
            self._budget.observe(entry.shape, elapsed_s)
        if entry.is_full and elapsed_s > 0.0:
            pace = plan.num_prefill_tokens / elapsed_s
            known = not math.isinf(self._pace)
            self._pace = self._pace + PACE_STEP * (pace - self._pace) if known else pace
