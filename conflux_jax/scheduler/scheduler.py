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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
from conflux_jax.scheduler.draft import Draft
from conflux_jax.scheduler.handoff import is_nearly_done, plan_handoffs
from conflux_jax.scheduler.limits import RequestLimits
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.ordering import FirstComeFirstServed, Ordering
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


class Scheduler:
    """See the module. Raises ValueError when ladders, pool and limits do not belong together.

    max_model_len: most tokens of prompt plus output of one request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        geometry: PoolGeometry,
        ladders: Ladders,
        max_model_len: int,
        ordering: Ordering | None = None,
    ):
        self._config = config
        self._geometry = geometry
        self._ladders = ladders
        self._level = -(-config.max_num_batched_tokens // geometry.groups)
        self._check_ladders()
        self._limits = RequestLimits(max_model_len, geometry)
        self._requests: dict[str, RequestState] = {}
        self._queue: Ordering = FirstComeFirstServed() if ordering is None else ordering
        self._running = Running(geometry)
        self._memory = Memory(
            geometry, config.max_num_seqs, ladders.max_decodes, config.handoff_pages
        )
        self._in_flight: deque[tuple[int, list[RequestState]]] = deque()
        self._iteration = 0
        self._arrivals = 0
        self._preemptions = 0

    def _check_ladders(self) -> None:
        if self._ladders.rows[-1] < self._level:
            raise ValueError(f"rows ladder ends at {self._ladders.rows[-1]}, below {self._level}")
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
        self._arrivals += 1
        self._requests[request.request_id] = state
        self._queue.add(state)

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
        started = sum(len(state.token_ids) - state.num_tokens for state in prefilling)
        return Load(
            num_decodes=tuple(self._memory.num_rows),
            context_tokens=tuple(self._memory.context_tokens),
            free_pages=self._free_pages(),
            num_prefilling=len(prefilling),
            num_waiting=len(self._queue),
            prefill_tokens=started + self._queue.num_tokens,
            num_preemptions=self._preemptions,
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
        plan = draft.seal(self._iteration, self._ladders, self._level)
        if plan is not None:
            self._in_flight.append((plan.iteration, draft.samplers))
            self._iteration += 1
        return plan

    def _secure_pages(self, draft: Draft) -> None:
        before = self._preemptions
        for state in secure_pages(self._running, self._memory, self._preempt):
            self._note_placed(draft, state)
        draft.preempted = self._preemptions > before

    def _plan_decodes(self, draft: Draft) -> None:
        """One row for every running decode."""
        for group, table in enumerate(self._running.decoding):
            draft.samplers += table.states
            rows, ending = table.advance()
            draft.decodes.append(rows)
            draft.ending += ending
            self._memory.context_tokens[group] += len(rows)

    def _prefill_budget(self, loads: Sequence[int]) -> int:
        """Prefill tokens that fit beside `loads` decodes: up to the level in each group, and up to
        max_num_batched_tokens in all. Where decodes alone use that, prefill waits for some to end.

        Worked: decodes 40, 10, 10, 0 and 1,200 batched tokens: a level of 300 leaves 260 + 290 +
        290 + 300 = 1,140, which is also 1,200 - 60. Decodes 400, 10, 10, 0 leave 0 + 290 + 290 +
        300 = 880 by the levels, but 1,200 - 420 = 780 in all.
        """
        under = sum(self._level - load for load in loads if load < self._level)
        return min(under, self._config.max_num_batched_tokens - sum(loads))

    def _plan_prefill(self, draft: Draft, now: float) -> None:
        """Chunks up to the budget: partly prefilled prompts first, then new ones."""
        budget = draft.budget = self._prefill_budget([len(rows) for rows in draft.decodes])
        for state in self._started(now):
            if budget <= 0 or len(draft.chunks) >= self._config.max_prefill_segments:
                return
            budget -= self._plan_chunk(draft, state, budget)
        # After a preemption memory is short: to admit another one now would only bring the next.
        if not draft.preempted and self._memory.has_slot and len(self._queue):
            self._admit(draft, budget, now)

    def _started(self, now: float) -> list[RequestState]:
        prefilling = self._running.prefilling
        return self._queue.started(prefilling.values(), now) if prefilling else []

    def _plan_chunk(self, draft: Draft, state: RequestState, budget: int) -> int:
        """The next tokens of an admitted prompt; returns how many."""
        left = len(state.token_ids) - state.num_tokens
        length = min(left, budget)
        is_last = length == left
        draft.chunks.append(
            PrefillChunk(state.request_id, state.slot, state.num_tokens, length, is_last)
        )
        state.num_tokens += length
        if is_last:
            self._complete_prefill(draft, state)
        else:
            self._place_early(draft, state)
        return length

    def _place_early(self, draft: Draft, state: RequestState) -> None:
        """A decode group for a prompt that is nearly done, so that its pages can go meanwhile. Only
        where that takes nothing from anyone; else it is tried again with the next chunk."""
        if not self._geometry.needs_handoff or state.group >= 0 or state.unplanned <= 1:
            return
        pages = self._geometry.decode_pages(len(state.token_ids))
        left = len(state.token_ids) - state.num_tokens
        nearly = is_nearly_done(pages, left, draft.budget, self._config.handoff_pages)
        if nearly and self._memory.place(state):
            draft.add_placement(state)

    def _complete_prefill(self, draft: Draft, state: RequestState) -> None:
        """The last chunk samples; what follows it needs a decode group, if anything does."""
        draft.samplers.append(state)
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

    def _admit(self, draft: Draft, budget: int, now: float) -> None:
        """Start waiting prompts while there is budget, by order. One for which memory is short may
        be overtaken by max_bypass others, counted on itself; then none is admitted before it.
        At most max_bypass entries behind the first such one are looked at."""
        bound = self._config.max_bypass
        unpledged = self._memory.unpledged_pages()
        skipped: list[RequestState] = []
        admitted: list[RequestState] = []
        looked = 0
        for state in self._queue.waiting(now):
            segments = len(draft.chunks)
            if budget <= 0 or segments >= self._config.max_prefill_segments or looked > bound:
                break
            if state.in_flight or not self._memory.fits(state, unpledged):
                if state.bypassed >= bound:
                    break
                skipped.append(state)
                looked += 1
                continue
            admitted.append(state)
            self._start(draft, state)
            budget -= self._plan_chunk(draft, state, budget)
            unpledged = self._memory.unpledged_pages()
            looked += bool(skipped)
            for overtaken in skipped:
                overtaken.bypassed += 1
            if not self._memory.has_slot or any(s.bypassed >= bound for s in skipped):
                break
        for state in admitted:
            self._queue.remove(state)

    def _start(self, draft: Draft, state: RequestState) -> None:
        """Out of the queue (the caller removes it) into a slot."""
        self._memory.admit(state)
        self._running.enter(state, Phase.PREFILLING)
        state.bypassed = 0
        draft.admissions.append(
            Admission(state.slot, state.request, state.token_ids, state.prefill_pages)
        )

    def _plan_handoffs(self, draft: Draft) -> None:
        """Pages on their way: first of the prompts that wait for nothing else to decode."""
        if not self._geometry.needs_handoff:
            return
        handing = self._running.handing.values()
        waiting = chain(handing, self._running.prefilling.values())
        draft.handoffs += plan_handoffs(
            waiting, self._memory, self._geometry, self._config.handoff_pages
        )
        draft.handed += [s for s in handing if 0 < len(s.pages) == s.num_handed]

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
        iteration, samplers = self._in_flight[0] if self._in_flight else (None, [])
        if plan.iteration != iteration:
            raise ValueError(f"iteration {plan.iteration} committed, {iteration} is the oldest")
        token_ids: list[int] = output.token_ids.tolist()
        if len(token_ids) != len(samplers):
            raise ValueError(f"{len(token_ids)} tokens came back for {len(samplers)} samples")
        self._in_flight.popleft()
        gone, logprobs = Phase.GONE, output.logprobs
        events = []
        for state, token_id in zip(samplers, token_ids, strict=True):
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
