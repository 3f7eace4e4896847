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

from collections import deque
from itertools import chain

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import (
    Admission,
    IterationPlan,
    PoolGeometry,
    PrefillChunk,
    StepOutput,
)
from conflux_jax.request import FinishReason, IdInUse, QueueFull, Request, TokenEvent
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import Budget
from conflux_jax.scheduler.candidates import Candidate, find_candidates
from conflux_jax.scheduler.draft import Draft
from conflux_jax.scheduler.estimate import Estimate, Pace
from conflux_jax.scheduler.handoff import is_nearly_done, plan_handoffs
from conflux_jax.scheduler.latency_model import LatencyPredictor, Parts
from conflux_jax.scheduler.limits import RequestLimits
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.ordering import make_ordering
from conflux_jax.scheduler.outcome import InFlight, take_in
from conflux_jax.scheduler.outlook import Load, Outlook
from conflux_jax.scheduler.pressure import secure_pages
from conflux_jax.scheduler.snapshot import Snapshot, take_snapshot
from conflux_jax.scheduler.state import Phase, RequestState, Running


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
        self._stop_token_ids: set[int] = set()  # of all requests so far
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
        self._pace = Pace()
        self._outlook = Outlook(
            self._queue,
            self._running,
            self._memory,
            self._in_flight,
            self._budget,
            self._pace,
            config.max_prefill_segments,
        )
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
            raise IdInUse("request_id", f"{request.request_id!r} is in use")
        self._limits.check(request)
        if len(self._queue) >= self._config.max_waiting:
            message = f"max_waiting: {self._config.max_waiting} requests are queued"
            raise QueueFull(message, self._outlook.retry_after_s(self._iteration))
        state = RequestState(request, self._arrivals)
        self._set_targets(state)
        self._arrivals += 1
        self._requests[request.request_id] = state
        self._stop_token_ids |= state.stop_token_ids
        self._queue.add(state)

    def _set_targets(self, state: RequestState) -> None:
        params, config = state.request.params, self._config
        ttft_slo_s = config.ttft_slo_s if params.ttft_slo_s is None else params.ttft_slo_s
        tbt_slo_s = config.tbt_slo_s if params.tbt_slo_s is None else params.tbt_slo_s
        if ttft_slo_s is not None:
            state.deadline_s = state.request.arrival_s + ttft_slo_s
        state.deadline_s = min(state.deadline_s, state.request.deadline_s)
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
        return self._outlook.load(self._preemptions)

    def snapshot(self, most: int) -> Snapshot:
        """What an onlooker may see, of at most so many running and so many waiting requests.
        Changes nothing, so that plans do not depend on who looks."""
        return take_snapshot(self._requests.values(), self._running, self._memory, most)

    def modelled(self, plan: IterationPlan) -> Parts | None:
        """What the latency model says of a plan that is under way, corrected but without margin;
        None without a model."""
        for entry in self._in_flight:
            if entry.iteration == plan.iteration and entry.shape is not None:
                return self._budget.parts(entry.shape)
        return None

    def estimate(self, prompt_tokens: int) -> Estimate | None:
        """See Outlook."""
        return self._outlook.estimate(prompt_tokens)

    def least_s(self, prompt_tokens: int) -> float:
        """See Outlook."""
        return self._outlook.least_s(prompt_tokens)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Of each group."""
        return self._outlook.free_pages

    def _end(self, state: RequestState) -> None:
        if state.phase is Phase.WAITING:
            self._queue.remove(state)
        self._running.remove(state, Phase.GONE)
        self._memory.release(state)
        del self._requests[state.request_id]
        for entry in self._in_flight:
            entry.gone.append(state)

    def _preempt(self, state: RequestState) -> None:
        """Back to the queue, to be recomputed from its prompt and what it has generated. A sample
        under way is real and will count; until it is here the request is not admitted again."""
        self._running.remove(state, Phase.WAITING)
        self._memory.release(state, for_good=False)
        state.num_preemptions += 1
        state.bypassed = 0
        self._preemptions += 1
        self._queue.add(state)

    def lose_device_state(self) -> list[str]:
        """The devices have lost all KV and the iterations under way. Ends the requests of these
        iterations, whose ids it returns; others that were admitted wait again, and are computed
        from their prompts."""
        lost: dict[int, RequestState] = {}
        for entry in self._in_flight:
            for state in chain.from_iterable(entry.samplers):
                lost[state.order] = state
            for chunk in entry.chunks:
                state = self._requests.get(chunk.request_id)
                if state is not None and state.phase is not Phase.WAITING:
                    lost[state.order] = state
        self._in_flight.clear()
        ended = [state for state in lost.values() if state.phase is not Phase.GONE]
        for state in ended:
            self._end(state)
        for state in self._running.all():
            self._preempt(state)
        return [state.request_id for state in ended]

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
        is_full = 0 < plan.prefill_room == plan.num_prefill_tokens
        samplers = [*draft.decoding, draft.prefilled]
        self._in_flight.append(
            InFlight(
                self._iteration,
                samplers,
                draft.ending,
                [],
                plan.chunks,
                draft.scored,
                draft.shape,
                is_full,
            )
        )
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
        draft.load = self._budget.decodes_of(self._running)
        loads = draft.load.loads
        draft.decodes, draft.decoding, ending = table.advance()
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
            started, self._queue, memory, config.max_bypass, most, now, self._pace.tokens_s
        )
        spans = [candidate.span for candidate in candidates]
        draft.chosen = self._budget.choose(draft.load, spans)
        for candidate, length in zip(candidates, draft.chosen.lengths, strict=True):
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
        draft.admissions.append(Admission(state.slot, state.request, state.token_ids, pages))
        return True

    def _plan_chunk(self, draft: Draft, state: RequestState, length: int) -> None:
        """The next `length` tokens of an admitted prompt."""
        is_last = length == state.prefill_left
        if state.wants_scores:
            draft.scored.append(state)
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
        per_group = self._config.handoff_pages
        nearly = is_nearly_done(pages, state.prefill_left, draft.chosen.tokens, per_group)
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
        events, ended = take_in(oldest, plan.samples, output, self._stop_token_ids)
        self._in_flight.popleft()
        self._learn(plan, oldest, output.elapsed_s)
        for state in ended:
            self._end(state)
        return events

    def _learn(self, plan: IterationPlan, entry: InFlight, elapsed_s: float) -> None:
        """From what an iteration took, where it did only what the model and the plan say."""
        if entry.scored:
            return
        if entry.shape is not None:
            self._budget.observe(entry.shape, elapsed_s)
        self._pace.observe(elapsed_s, plan.num_prefill_tokens if entry.is_full else None)
