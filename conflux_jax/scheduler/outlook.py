"""What the scheduler says when asked: how busy it is, and when a prompt's turn would come.

Only looks: plans do not depend on who asks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from conflux_jax.scheduler.budget import Budget
from conflux_jax.scheduler.estimate import Backlog, Estimate, Estimator, Pace, Prompts
from conflux_jax.scheduler.memory import Memory
from conflux_jax.scheduler.ordering import BoundedBypass
from conflux_jax.scheduler.outcome import InFlight
from conflux_jax.scheduler.state import Running


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
    # Standard deviation of the logarithm of measured over corrected seconds, of the same kinds.
    latency_spreads: tuple[float, float]
    # Until all that waits has had its prefill, predicted; None where nothing says how fast that is.
    queued_s: float | None = None


class Outlook:
    """On a scheduler's parts. segments: most prompts with a chunk in one iteration."""

    def __init__(
        self,
        queue: BoundedBypass,
        running: Running,
        memory: Memory,
        in_flight: Collection[InFlight],
        budget: Budget,
        pace: Pace,
        segments: int,
    ):
        self._queue, self._running, self._memory = queue, running, memory
        self._in_flight, self._budget = in_flight, budget
        self._estimator = Estimator(budget, pace, segments)
        self._retry = (-1, 0.0)  # iteration, seconds

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Of each group."""
        pools, geometry = self._memory.free_pages(), self._memory.geometry
        return tuple(pools[geometry.pool_of(group)] for group in range(geometry.groups))

    def load(self, num_preemptions: int) -> Load:
        prefilling = self._running.prefilling.values()
        started = sum(state.prefill_left for state in prefilling)
        corrections = self._budget.corrections
        return Load(
            num_decodes=tuple(self._memory.num_rows),
            context_tokens=tuple(self._memory.context_tokens),
            free_pages=self.free_pages,
            num_prefilling=len(prefilling),
            num_waiting=len(self._queue),
            prefill_tokens=started + self._queue.num_tokens,
            num_preemptions=num_preemptions,
            latency_corrections=(corrections[False].ratio, corrections[True].ratio),
            latency_spreads=(corrections[False].spread, corrections[True].spread),
            queued_s=self._estimator.queued_s(self._backlog()),
        )

    def estimate(self, prompt_tokens: int) -> Estimate | None:
        """When a prompt of so many tokens would have its first token if it came now. None where
        neither a latency model nor a full iteration so far says how fast prefill is."""
        return self._estimator.estimate(prompt_tokens, self._backlog())

    def least_s(self, prompt_tokens: int) -> float:
        """The least that is predicted of such a prompt, whatever else there is; 0 without a latency
        model."""
        return self._estimator.alone_s(prompt_tokens)

    def retry_after_s(self, iteration: int) -> float:
        """When one that is refused now should come again. Worked out once an iteration, however
        many are refused in it."""
        known, delay_s = self._retry
        if iteration != known:
            delay_s = self._estimator.retry_after_s(self._backlog())
            self._retry = iteration, delay_s
        return delay_s

    def _backlog(self) -> Backlog:
        table, started = self._running.decoding, list(self._running.prefilling.values())
        prompts = Prompts(len(self._queue), self._queue.num_tokens, self._queue.num_pairs)
        for state in started:
            prompts = prompts.plus(state.num_tokens, state.prefill_left)
        holding = chain(started, self._running.handing.values())
        rows_left = sorted([*table.rows_left(), *(state.unplanned for state in holding)])
        expected = (self._budget.expect_s(e.shape) for e in self._in_flight if e.shape is not None)
        return Backlog(
            prompts=prompts,
            num_waiting=len(self._queue),
            free_slots=self._memory.num_free_slots,
            rows_left=rows_left,
            decodes=self._budget.decodes_of(self._running),
            in_flight_s=sum(expected),
        )
