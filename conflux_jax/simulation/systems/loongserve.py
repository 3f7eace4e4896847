"""LoongServe: elastic sequence parallelism over instances of `tp` GPUs, each with all weights.

An instance prefills whole prompts together with some others, or decodes, never both at once.
Decoding instances form one group with one pool of KV and share the requests out (multi-master). How
many instances a prompt gets is chosen by a fitted model of prefill times. The ring passes every key
by every instance, so a finished prompt's KV is already with the instances that will decode; they
grow by some of the prompt's own where memory asks for it, by idle ones where the TBT target does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conflux_jax.simulation.rival_costs import ElasticCosts
from conflux_jax.simulation.system import SimulatedRequest
from conflux_jax.simulation.systems.events import EventSystem, check_fits
from conflux_jax.simulation.systems.jobs import DecodeBatch, Job, Queue

MAX_CANDIDATES = 8  # prompts that are shared out at once
PROFILED_TOKENS = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)


@dataclass(frozen=True)
class Elasticity:
    """degrees: numbers of instances that may prefill together, rising. batch_tokens: prompt tokens
    that keep one instance busy; up to so many for each free instance are shared out at once.
    target_fraction: of the TBT target, that decode iterations may take before the group grows: a
    prompt that ends within one waits for its end, and has its second token only after the next."""

    degrees: tuple[int, ...]
    batch_tokens: int
    target_fraction: float = 1.0

    def __post_init__(self):
        if not self.degrees or self.degrees != tuple(sorted({*self.degrees})):
            raise ValueError(f"degrees: {self.degrees} must rise")
        if self.degrees[0] < 1:
            raise ValueError(f"degrees: {self.degrees[0]}; at least 1")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens: {self.batch_tokens}; at least 1")
        if not 0 < self.target_fraction <= 1:
            raise ValueError(f"target_fraction: {self.target_fraction} is not in (0, 1]")


class Fitted(NamedTuple):
    """Seconds to prefill prompts together: base + per_token * sum(l) + per_square * sum(l^2)."""

    base: float
    per_token: float
    per_square: float

    def seconds(self, tokens: int, squares: int) -> float:
        return self.base + self.per_token * tokens + self.per_square * squares


def fit(prefill_s: Callable[[Sequence[tuple[int, int]]], float]) -> Fitted:
    """By least squares on the relative error, over single prompts and pairs of equal ones, as
    LoongServe profiles its engine. prefill_s: seconds of prompts, (0, length) each."""
    batches = [[length] * count for length in PROFILED_TOKENS for count in (1, 2)]
    measured = np.array([prefill_s([(0, length) for length in batch]) for batch in batches])
    terms = np.array([[1.0, sum(b), sum(length**2 for length in b)] for b in batches])
    found = np.linalg.lstsq(terms / measured[:, None], np.ones(len(batches)), rcond=None)[0]
    return Fitted(*(float(number) for number in found))


class Prefill(NamedTuple):
    """Prompts that are prefilled together, and on how many instances. lent: of those, how many the
    decode group does without meanwhile."""

    jobs: list[Job]
    degree: int
    lent: int = 0

    @property
    def held_tokens(self) -> int:
        return sum(job.kv_tokens for job in self.jobs)


def share_out(
    jobs: Sequence[Job], instances: int, models: dict[int, Fitted], capacity_tokens: int
) -> list[Prefill]:
    """Which prompts run together on how many of the free instances: the split of all `jobs`, in
    their order, that has the least sum of latencies, by dynamic programming over prompts and
    instances. Fewer of them, from the front, where not all fit in memory or on the instances.

    capacity_tokens: KV of one instance; a batch fits in those of its own.
    """
    best: dict[tuple[int, int], tuple[float, list[Prefill]]] = {(0, 0): (0.0, [])}
    for end in range(1, len(jobs) + 1):
        tokens = squares = kv_tokens = 0
        for start in range(end - 1, -1, -1):
            job = jobs[start]
            tokens, squares = tokens + job.prompt_tokens, squares + job.prompt_tokens**2
            kv_tokens += job.kv_tokens
            for degree, model in models.items():
                if kv_tokens > degree * capacity_tokens:
                    continue
                latency = (end - start) * model.seconds(tokens, squares)
                for used in range(instances - degree + 1):
                    if (before := best.get((start, used))) is None:
                        continue
                    total, key = before[0] + latency, (end, used + degree)
                    if key not in best or total < best[key][0]:
                        best[key] = total, [*before[1], Prefill(list(jobs[start:end]), degree)]
    most = max(count for count, _ in best)
    return min((best[key] for key in best if key[0] == most), key=lambda found: found[0])[1]


@dataclass
class Instances:
    """Who does what; they are alike, so counts say it. decoding: of the decode group; lent: of
    those, that prefill just now. prefilling: of the others."""

    total: int
    decoding: int = 0
    prefilling: int = 0
    lent: int = 0

    @property
    def idle(self) -> int:
        return self.total - self.decoding - self.prefilling

    def check(self) -> None:
        """Raises RuntimeError if an instance were to do two things at once."""
        if min(self.decoding - self.lent, self.lent, self.prefilling, self.idle) < 0:
            raise RuntimeError(f"more is asked of the instances than there are: {self}")


@dataclass
class Decoding:
    """The decode group: its requests, and those that join once its iteration ends, each with when
    it had its first token. due_s: by when the next token of all must come."""

    batch: DecodeBatch = field(default_factory=DecodeBatch)
    joining: list[tuple[float, Job]] = field(default_factory=list)
    runs: bool = False
    due_s: float = math.inf

    def __len__(self) -> int:
        return len(self.batch) + len(self.joining)

    @property
    def contexts(self) -> int:
        return self.batch.contexts + sum(job.prompt_tokens + 1 for _, job in self.joining)

    @property
    def tbt_slo_s(self) -> float:
        return min(self.batch.tbt_slo_s, *(job.tbt_slo_s for _, job in self.joining), math.inf)

    def join(self, now_s: float) -> None:
        """Between two iterations: the requests that have run have just had a token."""
        self.due_s = now_s + self.batch.tbt_slo_s
        for since_s, job in self.joining:
            self.due_s = min(self.due_s, since_s + job.tbt_slo_s)
            self.batch.join(job)
        self.joining = []


class LoongServe(EventSystem):
    """memory_tokens: KV tokens that one instance has room for. Raises ValueError where no
    degree leaves an instance to decode."""

    def __init__(
        self,
        costs: ElasticCosts,
        instances: int,
        memory_tokens: int,
        settings: Elasticity,
        order: str,
    ):
        super().__init__()
        if settings.degrees[0] >= instances:
            raise ValueError(
                f"degrees: with {settings.degrees}, none of {instances} instances is left to decode"
            )
        self._costs, self._settings = costs, settings
        self._capacity_tokens = memory_tokens
        self.memory = self.new_pool(instances * memory_tokens)
        self.instances = Instances(instances)
        self._queue, self._decoding = Queue(order), Decoding()
        self._held_tokens = 0  # KV memory of those that decode or join
        self._under_way = self._under_way_tokens = 0  # prompts that are being prefilled
        degrees = [degree for degree in settings.degrees if degree <= instances]
        self._models = {
            degree: fit(lambda chunks, degree=degree: costs.prefill_s(chunks, degree))
            for degree in degrees
        }

    def add(self, request: SimulatedRequest) -> None:
        job = self.new_job(request)
        check_fits(job, max(self._models) * self._capacity_tokens)
        self._queue.add(job)
        self.at(request.arrival_s, self._schedule)

    def _schedule(self) -> None:
        """Share the instances out anew: first those that decode in time, then prompts."""
        self._grow()
        if not self._decoding.runs:
            self._decoding.join(self.now_s)
            if len(self._queue):
                self._scale_down()
                self._lend()
        self._begin_prefills()
        if not self._decoding.runs:
            self._begin_decode()

    @property
    def _target_s(self) -> float:
        """How long an iteration of the decode group may be."""
        return self._settings.target_fraction * self._decoding.tbt_slo_s

    def _grow(self) -> None:
        """More instances decode, from the next iteration on, where that would be late otherwise and
        they help."""
        while self.instances.idle and len(self._decoding):
            degree, target_s = self.instances.decoding, self._target_s
            now_s, then_s = self._decode_s(degree), self._decode_s(degree + 1)
            if now_s <= target_s or then_s >= now_s:
                return
            self.instances.decoding += 1

    def _begin_prefills(self) -> None:
        while len(self._queue) and self.instances.idle >= min(self._models):
            prefills = share_out(
                self._candidates(), self.instances.idle, self._models, self._capacity_tokens
            )
            if not prefills:
                return
            for prefill in prefills:
                self._begin_prefill(prefill)

    def _candidates(self) -> list[Job]:
        """The first that wait: until their prompts keep the free instances busy."""
        most, tokens, jobs = self._settings.batch_tokens * self.instances.idle, 0, list[Job]()
        for place in range(min(len(self._queue), MAX_CANDIDATES)):
            tokens += self._queue[place].prompt_tokens
            if jobs and tokens > most:
                break
            jobs.append(self._queue[place])
        return jobs

    def _begin_prefill(self, prefill: Prefill) -> None:
        jobs, degree, lent = prefill
        for job in self._queue.take(len(jobs)):
            self.memory.take(job.kv_tokens)
        self._count(jobs, 1)
        self.instances.prefilling += degree - lent
        self.instances.lent += lent
        self.instances.check()
        seconds = self._costs.prefill_s([(0, job.prompt_tokens) for job in jobs], degree)
        share = degree / self.instances.total
        self.run(seconds, share, lambda: self._end_prefill(prefill))

    def _end_prefill(self, prefill: Prefill) -> None:
        jobs, degree, lent = prefill
        self._count(jobs, -1)
        self.give([job.number for job in jobs])
        self.instances.prefilling -= degree - lent
        self.instances.lent -= lent
        for job in jobs:
            if job.output_tokens == 1:
                self.memory.free(job.kv_tokens)
            else:
                self._decoding.joining.append((self.now_s, job))
        self._hold(-prefill.held_tokens if lent else 0)
        # The prompts' own instances join while memory asks for it; they held all of it until now.
        self._hold(sum(job.kv_tokens for job in jobs if job.output_tokens > 1))
        if lent:  # the decode group has waited for this: its turn comes before anybody's
            self._decoding.runs = False
            self._decoding.join(self.now_s)
            self._begin_decode()
        self._schedule()

    def _count(self, jobs: Sequence[Job], sign: int) -> None:
        self._under_way += sign * len(jobs)
        self._under_way_tokens += sign * sum(job.prompt_tokens for job in jobs)

    def _hold(self, tokens: int) -> None:
        """So many more are in the KV memory of the decode group, which grows to have room."""
        self._held_tokens += tokens
        while self._held_tokens > self.instances.decoding * self._capacity_tokens:
            self.instances.decoding += 1
        self.instances.check()

    def _begin_decode(self) -> None:
        """Raises RuntimeError if an instance of the group were prefilling."""
        if len(self._decoding):
            if self.instances.lent:
                raise RuntimeError(f"instances that prefill cannot decode: {self.instances}")
            self._decoding.runs = True
            degree = self.instances.decoding
            self.run(self._decode_s(degree), degree / self.instances.total, self._end_decode)

    def _end_decode(self) -> None:
        self._decoding.runs = False
        self.give(self._decoding.batch.numbers)
        for job in self._decoding.batch.advance():
            self.memory.free(job.kv_tokens)
            self._held_tokens -= job.kv_tokens
        if not len(self._decoding):
            self.instances.decoding = 0
        self._schedule()

    def _decode_s(self, degree: int) -> float:
        """An iteration of all that decode or are about to."""
        return self._costs.decode_s(len(self._decoding), self._decoding.contexts, degree)

    def _scale_down(self) -> None:
        """Instances leave the decode group while prompts wait: their KV moves to the others, which
        wait for it. None leaves if that made a token late, or left too little memory."""
        moved_s = 0.0
        while (degree := self.instances.decoding) > 1 and self.instances.idle < min(self._models):
            moving_s = moved_s + self._costs.move_s(-(-self._decoding.contexts // degree))
            fits = self._held_tokens <= (degree - 1) * self._capacity_tokens
            next_s = self._decode_s(degree - 1)
            late = self.now_s + moving_s + next_s > self._decoding.due_s
            if not fits or late or next_s > self._target_s:
                break
            moved_s, self.instances.decoding = moving_s, degree - 1
        if moved_s:
            self._decoding.runs = True  # they do nothing else meanwhile
            self.after(moved_s, self._end_move)

    def _lend(self) -> None:
        """Between two iterations, the decode group takes part in a prefill that is short enough for
        its next token still to be in time."""
        instances = self.instances
        reach = instances.idle + instances.decoding
        degree = max((one for one in self._models if one <= reach), default=0)
        if self._decoding.runs or not len(self._decoding) or degree <= instances.idle:
            return
        free_tokens = reach * self._capacity_tokens - self._held_tokens
        if jobs := self._in_slack(degree, free_tokens):
            self._decoding.runs = True  # it does nothing else meanwhile
            self._hold(sum(job.kv_tokens for job in jobs))
            self._begin_prefill(Prefill(jobs, degree, lent=degree - instances.idle))

    def _in_slack(self, degree: int, free_tokens: int) -> list[Job]:
        """The first prompts that can be prefilled on so many instances and decoded once, with all
        that decode or may by then, within the TBT target."""
        count = len(self._decoding) + self._under_way
        contexts = self._decoding.contexts + self._under_way_tokens + count
        jobs, kv_tokens = list[Job](), 0
        for place in range(min(len(self._queue), MAX_CANDIDATES)):
            jobs.append(self._queue[place])
            kv_tokens += jobs[-1].kv_tokens
            tokens = sum(job.prompt_tokens for job in jobs)
            decode_s = self._costs.decode_s(
                count + len(jobs), contexts + tokens + len(jobs), self.instances.decoding
            )
            prefill_s = self._costs.prefill_s([(0, job.prompt_tokens) for job in jobs], degree)
            late = self.now_s + prefill_s + decode_s > self._decoding.due_s
            if late or kv_tokens > free_tokens or tokens > degree * self._settings.batch_tokens:
                return jobs[:-1]
        return jobs

    def _end_move(self) -> None:
        self._decoding.runs = False
        self._begin_decode()
