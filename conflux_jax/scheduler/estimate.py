"""When a prompt would have its first token, and how long what is queued takes, as of now.

The queue is looked at as a whole: so many prompts, tokens and query-key pairs, served before the
one that is asked about (a bound where the ordering would let it overtake). Iterations are as full
as the running decodes and their targets let them be now. What is not known is left out: tokens
that end early, requests that come later, memory that is short. So it costs the same whatever the
queue's length, and never falls when a prompt or the queue grows.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from conflux_jax.request import DeadlineUnmet, Request
from conflux_jax.scheduler.budget import Budget, Decodes
from conflux_jax.scheduler.latency_model import QUERY_BLOCK, prefill_work

RETRY_SHARE = 0.5  # of the queue: by then there is room for many, and still work to go on with
RETRY_LEAST_S, RETRY_MOST_S = 0.1, 60.0
RETRY_UNKNOWN_S = 1.0
PACE_STEP = 0.1  # share of the newest iteration in a mean


@dataclass(frozen=True)
class Estimate:
    """Seconds from now. ttft_s: until the first token. queued_s: the part of it that goes to what
    is there already. alone_s: what the prompt would take in an engine without any other; 0 where
    no latency model is there to say. measured: by the pace of late, for want of a model.
    """

    ttft_s: float
    queued_s: float
    alone_s: float = 0.0
    measured: bool = False


class Prompts(NamedTuple):
    """Tokens to prefill of so many prompts, and the pairs that attention computes for them.
    longest: the length of a prompt that is looked at alone; 0: not known."""

    number: int = 0
    tokens: int = 0
    pairs: int = 0
    longest: int = 0

    def plus(self, start: int, length: int) -> Prompts:
        """With the tokens of one more, after `start` that are done."""
        pairs = self.pairs + prefill_work(start, length)
        return Prompts(self.number + 1, self.tokens + length, pairs, self.longest)


class Backlog(NamedTuple):
    """What is there now. prompts: waiting and partly prefilled. num_waiting: of them, without a
    slot. free_slots: of all. rows_left: iterations after which each slot in use is free at the
    latest, rising. decodes: as of the next iteration. in_flight_s: predicted, of what is on its
    way to the device."""

    prompts: Prompts
    num_waiting: int
    free_slots: int
    rows_left: Sequence[int]
    decodes: Decodes
    in_flight_s: float = 0.0


class Pace:
    """Means over the last iterations, for an engine without a latency model. tokens_s: prefill
    tokens a second, of iterations that had all they had room for; infinite before the first.
    step_s: of an iteration."""

    def __init__(self) -> None:
        self.tokens_s = math.inf
        self.step_s = 0.0

    def observe(self, elapsed_s: float, tokens: int | None) -> None:
        """tokens: of an iteration that was full; else None."""
        if elapsed_s <= 0.0:
            return
        self.step_s += (PACE_STEP if self.step_s else 1.0) * (elapsed_s - self.step_s)
        if tokens is not None:
            pace, known = tokens / elapsed_s, self.is_known
            self.tokens_s = self.tokens_s + PACE_STEP * (pace - self.tokens_s) if known else pace

    def clear_s(self, prompts: Prompts) -> float:
        """Of prefilling these, at the mean pace."""
        return prompts.tokens / self.tokens_s

    @property
    def is_known(self) -> bool:
        return self.tokens_s != math.inf


class Estimator:
    """segments: most prompts with a chunk in one iteration. Changes nothing that it is given."""

    def __init__(self, budget: Budget, pace: Pace, segments: int):
        self._budget, self._pace, self._segments = budget, pace, segments
        self._idle_level: int | None = None

    def estimate(self, prompt_tokens: int, backlog: Backlog) -> Estimate | None:
        """For a prompt that would join the queue now; None where neither a latency model nor a
        measured pace says how fast prefill is."""
        price = self._price(backlog.decodes)
        if price is None:
            return None
        own = Prompts(longest=prompt_tokens).plus(0, prompt_tokens)
        before_s = price.clear_s(backlog.prompts)
        all_s = price.clear_s(backlog.prompts.plus(0, prompt_tokens))
        own_s = self._wait_s(backlog, backlog.num_waiting + 1, price) + price.clear_s(own)
        queued_s = max(before_s, self._wait_s(backlog, backlog.num_waiting, price))
        return Estimate(
            ttft_s=max(all_s, own_s) + backlog.in_flight_s,
            queued_s=queued_s + backlog.in_flight_s,
            alone_s=self.alone_s(prompt_tokens),
            measured=self._budget.predictor is None,
        )

    def queued_s(self, backlog: Backlog) -> float | None:
        """Until all that waits has had its prefill; None as above."""
        price = self._price(backlog.decodes)
        if price is None:
            return None
        wait_s = self._wait_s(backlog, backlog.num_waiting, price)
        return max(price.clear_s(backlog.prompts), wait_s) + backlog.in_flight_s

    def retry_after_s(self, backlog: Backlog) -> float:
        """When one that a full queue has refused should come again."""
        queued_s = self.queued_s(backlog)
        if queued_s is None:
            return RETRY_UNKNOWN_S
        return min(max(RETRY_SHARE * queued_s, RETRY_LEAST_S), RETRY_MOST_S)

    def alone_s(self, prompt_tokens: int) -> float:
        """Of a prompt that has the engine to itself, in as few iterations as can be or in those of
        most tokens a second; 0 without a model."""
        if self._budget.predictor is None:
            return 0.0
        own, budget = Prompts(longest=prompt_tokens).plus(0, prompt_tokens), self._budget
        levels = (self._level(budget.idle), budget.levels[-1])
        prices = (_Priced(budget, level, budget.idle, self._segments) for level in levels)
        return min(price.clear_s(own) for price in prices)

    def _wait_s(self, backlog: Backlog, count: int, price: Price) -> float:
        """Until so many have got a slot, if every request runs to its limit.

        Worked: 2 free slots, 5 that wait, slots in use for 10, 20 and 30 iterations more: the fifth
        takes the slot of the third, after 30. A seventh would wait for one of its predecessors;
        these are taken to run as long as what runs now: 30 + 20.
        """
        needed = count - backlog.free_slots
        if needed <= 0 or not backlog.rows_left:
            return 0.0
        turns, place = divmod(needed - 1, len(backlog.rows_left))
        return (turns * backlog.rows_left[-1] + backlog.rows_left[place]) * price.step_s

    def _price(self, decodes: Decodes) -> Price | None:
        """Of prefill beside the decodes; beside none where they use all rows there are, since it
        then waits for some to end."""
        budget = self._budget
        if budget.predictor is None:
            return self._pace if self._pace.is_known else None
        beside = decodes if budget.most_room(decodes.loads) else budget.idle
        return _Priced(budget, self._level(beside), beside, self._segments, decodes)

    def _level(self, decodes: Decodes) -> int:
        """The highest that keeps the decodes' target with a new prompt's chunk; without one, the
        highest; where nothing decodes, that of most tokens a second."""
        budget = self._budget
        levels = [level for level in budget.levels if budget.room(level, decodes.loads)]
        if not any(decodes.loads):
            if self._idle_level is None:  # a correction changes all of them alike
                paces = {level: 1.0 / self._full_s(level, decodes) for level in levels}
                self._idle_level = max(
                    levels, key=lambda level: paces[level] * budget.room(level, decodes.loads)
                )
            return self._idle_level
        if math.isinf(decodes.target_s):
            return levels[-1]
        met = bisect.bisect_right(
            levels, decodes.target_s, key=lambda level: self._full_s(level, decodes)
        )
        return levels[max(met - 1, 0)]

    def _full_s(self, level: int, decodes: Decodes) -> float:
        """Of an iteration that a new prompt fills to the level."""
        price = _Priced(self._budget, level, decodes, self._segments)
        return max(price.clear_s(Prompts().plus(0, price.room)), 1e-9)


class Price(Protocol):
    """What iterations take that go on as now."""

    @property
    def step_s(self) -> float:
        """Of one without prefill."""
        ...

    def clear_s(self, prompts: Prompts) -> float:
        """Of those that prefill these."""
        ...


class _Priced:
    """By the latency model, at a level that has room beside the decodes. running: those of an
    iteration without prefill."""

    def __init__(
        self,
        budget: Budget,
        level: int,
        decodes: Decodes,
        segments: int,
        running: Decodes | None = None,
    ):
        self._budget, self._level, self._decodes = budget, level, decodes
        self._segments = segments
        self._running = running or decodes
        self.room = budget.room(level, decodes.loads)

    @property
    def step_s(self) -> float:
        bucket = self._budget.bucket(self._level, 0, self._running)
        return self._budget.expect_s(self._budget.shape(self._running, (), bucket))

    def clear_s(self, prompts: Prompts) -> float:
        """What fits into one iteration takes that; the rest takes its share of full ones, each with
        the mean of tokens and pairs. Where prompts are so short that the number of chunks is what
        fills an iteration, no less than so many of the smallest.

        Worked: room for 500, and prompts of 700, 300 and 200 tokens: 2.4 iterations of 500 tokens,
        each with 2.25 chunks (three prompts, and 2.4 that go on) and a 2.4th of all pairs.
        """
        if not prompts.tokens:
            return 0.0
        turns = max(prompts.tokens / self.room, 1.0)
        total_s = turns * self._iteration_s(prompts, turns)
        if prompts.number <= self._segments:
            return total_s
        least_s = self._iteration_s(Prompts(1, 1), 1.0)
        return max(total_s, prompts.number / self._segments * least_s)

    def _iteration_s(self, prompts: Prompts, turns: float) -> float:
        """One of `turns` equal ones. Numbers of its shape are means, and so not whole."""
        tokens = min(prompts.tokens, self.room)
        goes_on = turns > 1.0  # a chunk begins where the iteration before ended
        keys = (prompts.longest + self.room) / 2 if goes_on else prompts.longest
        mean: dict[str, float] = {
            "num_chunks": prompts.number / turns + goes_on,
            "prefill_tokens": prompts.tokens / turns,
            "prefill_work": prompts.pairs / turns,
            "prefill_blocks": -(-tokens // QUERY_BLOCK),
            "block_keys": keys if prompts.longest else 0,
        }
        bucket = self._budget.bucket(self._level, tokens, self._decodes)
        shape = self._budget.shape(self._decodes, (), bucket)
        return self._budget.expect_s(shape._replace(**mean))


def check_deadline(request: Request, now: float, least_s: Callable[[int], float]) -> None:
    """Raises DeadlineUnmet for a request that would only take time from others. now: on the clock
    of its deadline. least_s: of a prompt of so many tokens alone: the queue may yet get out of its
    way."""
    if math.isinf(request.deadline_s):
        return
    tokens, left_s = len(request.prompt_token_ids), request.deadline_s - now
    if left_s <= 0.0:
        raise DeadlineUnmet("deadline: passed before the request could be queued")
    if left_s < (needed_s := least_s(tokens)):
        raise DeadlineUnmet(
            f"deadline: {left_s:.3g} s are left, and the first token after a prompt of {tokens} "
            f"tokens takes at least {needed_s:.3g} s"
        )
