"""Requests inside a rival system: in its queue, in its KV memory, in its decode batch.

Outputs' lengths come with the requests, and the rivals may use them: a request is admitted once
there is KV memory for its prompt and its whole output. So nobody is preempted, nothing is computed
twice, and no two requests can wait for each other's memory. It spares the rivals what a real system
loses to outputs that it cannot foresee.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from conflux_jax.simulation.system import SimulatedRequest

ORDERS = ("fcfs", "srpf")  # first come first served; shortest remaining prefill first

Chunk = tuple[int, int]  # (start, length) within a prompt


class Job:
    """A request. tbt_slo_s: that it is scheduled by. done: prompt tokens prefilled so far."""

    __slots__ = ("done", "kv_tokens", "number", "output_tokens", "prompt_tokens", "tbt_slo_s")

    def __init__(self, request: SimulatedRequest, tbt_slo_s: float = math.inf):
        self.number = request.number
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.tbt_slo_s = tbt_slo_s
        self.kv_tokens = request.prompt_tokens + request.output_tokens
        self.done = 0

    @property
    def left(self) -> int:
        return self.prompt_tokens - self.done


class Memory:
    """KV tokens of one pool. Raises RuntimeError where more are taken than there are, or freed."""

    def __init__(self, capacity_tokens: int):
        self.capacity_tokens = capacity_tokens
        self.used_tokens = self.peak_tokens = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.used_tokens

    def take(self, tokens: int) -> None:
        self.used_tokens += tokens
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        if not 0 <= self.used_tokens <= self.capacity_tokens:
            raise RuntimeError(f"{self.used_tokens} KV tokens in use of {self.capacity_tokens}")

    def free(self, tokens: int) -> None:
        self.take(-tokens)


class Queue:
    """Jobs that wait, in order. Adding and taking cost the logarithm of their number."""

    def __init__(self, order: str):
        if order not in ORDERS:
            raise ValueError(f"order: {order!r} is none of {', '.join(ORDERS)}")
        self.tokens = 0  # to prefill, over all
        self.kv_tokens = 0
        self._by_length = order == "srpf"
        self._jobs: list[tuple[int, int, Job]] = []  # sorted

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, place: int) -> Job:
        return self._jobs[place][2]

    def rank(self, job: Job) -> tuple[int, int]:
        """Lower is served first."""
        return (job.left if self._by_length else 0, job.number)

    def add(self, job: Job) -> None:
        bisect.insort(self._jobs, (*self.rank(job), job))
        self.tokens += job.left
        self.kv_tokens += job.kv_tokens

    def take(self, count: int) -> list[Job]:
        """The first so many."""
        taken = [job for _, _, job in self._jobs[:count]]
        del self._jobs[:count]
        self.tokens -= sum(job.left for job in taken)
        self.kv_tokens -= sum(job.kv_tokens for job in taken)
        return taken


class Slice(NamedTuple):
    """Part of a prompt that an iteration may prefill."""

    job: Job
    length: int

    @property
    def chunk(self) -> Chunk:
        return (self.job.done, self.length)


class Prefills:
    """Prompts that are prefilled in chunks: those that wait, and those begun, which hold memory.

    In the order srpf a short prompt goes before the rest of a long one that has begun. outputs:
    whether the memory has to have room for them too.
    """

    def __init__(self, order: str, memory: Memory, outputs: bool = True):
        self.waiting, self.begun = Queue(order), Queue(order)
        self._memory, self._outputs = memory, outputs
        self._running_tokens = 0

    @property
    def load(self) -> tuple[int, int]:
        """Prompt tokens to prefill, those now running included, and KV tokens asked for."""
        tokens = self.waiting.tokens + self.begun.tokens + self._running_tokens
        return (tokens, self.waiting.kv_tokens + self._memory.used_tokens)

    def offer(self, tokens: int) -> list[Slice]:
        """The first so many tokens, in order, of prompts that hold memory or find it. Nothing
        changes yet. Behind a prompt that finds no room nobody else is admitted."""
        free = self._memory.free_tokens
        waiting = begun = 0
        slices: list[Slice] = []
        while tokens > 0:
            new = self.waiting[waiting] if waiting < len(self.waiting) else None
            if new is not None and self._need(new) > free:
                new = None
            old = self.begun[begun] if begun < len(self.begun) else None
            if new is None and old is None:
                break
            if old is None or (new and self.waiting.rank(new) < self.waiting.rank(old)):
                assert new is not None
                job, waiting = new, waiting + 1
                free -= self._need(job)
            else:
                job, begun = old, begun + 1
            slices.append(Slice(job, min(tokens, job.left)))
            tokens -= slices[-1].length
        return slices

    def start(self, slices: Sequence[Slice]) -> None:
        """These of the offer, from its first on, begin: their memory is taken."""
        mine = {job.number for job, _ in slices}
        begun = sum(self.begun[place].number in mine for place in range(len(self.begun)))
        self.begun.take(begun)
        for job in self.waiting.take(len(slices) - begun):
            self._memory.take(self._need(job))
        self._running_tokens += sum(job.left for job, _ in slices)

    def finish(self, slices: Sequence[Slice]) -> list[Job]:
        """They have been prefilled. Returns the jobs whose prompts are complete."""
        complete = []
        for job, length in slices:
            self._running_tokens -= job.left
            job.done += length
            if job.left:
                self.begun.add(job)
            else:
                complete.append(job)
        return complete

    def release(self, jobs: Sequence[Job]) -> None:
        """They have ended: others may have their memory."""
        for job in jobs:
            self._memory.free(self._need(job))

    def _need(self, job: Job) -> int:
        return job.kv_tokens if self._outputs else job.prompt_tokens


def cut(slices: Sequence[Slice], tokens: int) -> list[Slice]:
    """The first so many tokens of them."""
    kept: list[Slice] = []
    for job, length in slices:
        if tokens <= 0:
            break
        kept.append(Slice(job, min(length, tokens)))
        tokens -= length
    return kept


class DecodeBatch:
    """Requests that decode in step: each iteration reads all their KV and gives each a token.

    An iteration costs the same however many they are; only joining and ending cost time by it.
    """

    def __init__(self):
        self.contexts = 0  # KV tokens that the next iteration reads
        self._iteration = 0
        self._jobs: dict[int, Job] = {}
        self._ends: list[tuple[int, int]] = []  # (iteration, number); a heap
        self._numbers: tuple[int, ...] | None = ()
        self._longest = 0  # at iteration 0, as it were
        self._tbt_slo_s = math.inf

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self._summary()

    @property
    def longest(self) -> int:
        """KV tokens of the longest; 0 where there is none."""
        self._summary()
        return self._longest + self._iteration if self._jobs else 0

    @property
    def tbt_slo_s(self) -> float:
        """The tightest of all; infinite where there is none."""
        self._summary()
        return self._tbt_slo_s

    def join(self, job: Job) -> None:
        """A request whose first token has been given, and which has more to come."""
        self.contexts += job.prompt_tokens + 1  # the token that was given is read too
        heapq.heappush(self._ends, (self._iteration + job.output_tokens - 1, job.number))
        self._jobs[job.number] = job
        self._numbers = None

    def advance(self) -> list[Job]:
        """An iteration has ended, and each request has its token. Returns those that are done."""
        self._iteration += 1
        self.contexts += len(self._jobs)
        ended = []
        while self._ends and self._ends[0][0] <= self._iteration:
            job = self._jobs.pop(heapq.heappop(self._ends)[1])
            self.contexts -= job.kv_tokens
            ended.append(job)
            self._numbers = None
        return ended

    def _summary(self) -> tuple[int, ...]:
        if self._numbers is None:
            self._numbers = tuple(self._jobs)
            self._tbt_slo_s = min((j.tbt_slo_s for j in self._jobs.values()), default=math.inf)
            ends = ((at, self._jobs[number].kv_tokens) for at, number in self._ends)
            # A request of `kv_tokens` at its end has one less in each iteration before.
            self._longest = max((tokens - at for at, tokens in ends), default=0)
        return self._numbers
