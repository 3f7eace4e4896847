"""MuxWise (PD-multiplexing): prefill and decode at the same time on disjoint SMs of every GPU.

Decode iterations follow each other on the least share of the SMs that keeps their TBT target, by an
estimate that assumes prefill beside them all along. Prompts are prefilled whole, several at once,
on the rest. Prefill is launched layer by layer, so the shares can change whenever a decode
iteration ends, and a prompt spans as many of those as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_jax.simulation.rival_costs import MultiplexedCosts
from conflux_jax.simulation.systems.events import Replicated
from conflux_jax.simulation.systems.jobs import DecodeBatch, Job, Queue


@dataclass(frozen=True)
class Multiplexing:
    """shares: SMs of a GPU that decode may have beside prefill, rising. batch_tokens: prompts are
    prefilled together up to so many tokens (one prompt may be longer). target_fraction: of the TBT
    target, that a decode iteration beside prefill may take: a prompt that ends within an iteration
    waits for its end, and has its second token only after the next."""

    shares: tuple[int, ...]
    batch_tokens: int
    target_fraction: float = 1.0

    def __post_init__(self):
        rising = all(low < high for low, high in zip(self.shares, self.shares[1:], strict=False))
        if not self.shares or not rising or self.shares[0] < 1:
            raise ValueError(f"shares: {self.shares} must rise, from 1 SM or more")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens: {self.batch_tokens}; at least 1")
        if not 0 < self.target_fraction <= 1:
            raise ValueError(f"target_fraction: {self.target_fraction} is not in (0, 1]")


class Batch:
    """Prompts that are prefilled together. left: of their work, as a share; it can be interrupted
    between any two layers. factor: by which it departs from its price."""

    def __init__(self, jobs: Sequence[Job], factor: float):
        self.jobs, self.left, self._factor = jobs, 1.0, factor
        self.tokens = sum(job.prompt_tokens for job in jobs)
        self.chunks = [(0, job.prompt_tokens) for job in jobs]
        self._seconds: dict[tuple[int, bool], float] = {}
        self._draws: dict[int, float] = {}

    def whole_s(self, costs: MultiplexedCosts, decode_sms: int, beside: bool) -> float:
        """Of all its layers; worked out once for each share."""
        key = (decode_sms, beside)
        if key not in self._seconds:
            price_s = costs.prefill_s(self.chunks, decode_sms, beside)
            self._seconds[key] = self._factor * price_s
        return self._seconds[key]

    def draw(self, costs: MultiplexedCosts, decode_sms: int) -> float:
        """Of the memory's bandwidth."""
        if decode_sms not in self._draws:
            self._draws[decode_sms] = costs.draw(self.chunks, decode_sms)
        return self._draws[decode_sms]

    @property
    def tokens_left(self) -> float:
        return self.left * self.tokens


class MultiplexedReplica:
    """One tensor-parallel group. Shares change only where no decode iteration is under way."""

    def __init__(
        self,
        system: Replicated,
        costs: MultiplexedCosts,
        memory_tokens: int,
        settings: Multiplexing,
        order: str,
    ):
        self._system, self._costs, self._settings = system, costs, settings
        self._preempts = order == "srpf"
        self._queue, self.memory = Queue(order), system.new_pool(memory_tokens)
        self.decoding, self._joining = DecodeBatch(), list[tuple[float, Job]]()
        self.decode_sms, self._decode_runs = 0, False
        self._batch: Batch | None = None
        self._interrupted: list[Batch] = []
        self._speed_since_s, self._whole_s = 0.0, math.inf  # of the batch, at the present share
        self._ending = 0  # which of the ends set for a batch is the true one

    @property
    def load(self) -> tuple[int, int]:
        batches = [*self._interrupted, *([self._batch] if self._batch else [])]
        tokens = self._queue.tokens + sum(math.ceil(batch.tokens_left) for batch in batches)
        return (tokens, self._queue.kv_tokens + self.memory.used_tokens)

    def add(self, job: Job) -> None:
        self._queue.add(job)

    def wake(self) -> None:
        if not self._decode_runs:
            self._share_out()
        elif self.decode_sms < self._costs.sms:
            self._count_progress()
            self._choose_batch()
            self._run_batch()

    def _share_out(self) -> None:
        """Between decode iterations: who runs next, on which SMs."""
        self._count_progress()
        waited_s = max((self._system.now_s - since_s for since_s, _ in self._joining), default=0.0)
        for _, job in self._joining:
            self.decoding.join(job)
        self._joining = []
        self._choose_batch()
        if not self.decoding:
            self.decode_sms = 0
        elif self._batch is None:
            self.decode_sms = self._costs.sms
        else:
            self.decode_sms = self._least_share(waited_s)
        if self.decoding:
            self._decode_runs = True
            seconds = self._decode_s(self.decode_sms)
            share = self.decode_sms / self._costs.sms * self._system.share
            self._system.run(seconds, share, self._end_decode)
        self._run_batch()

    def _least_share(self, waited_s: float) -> int:
        """That meets the tightest target, also for one that has waited since its first token; the
        largest where none does."""
        target_s = self.decoding.tbt_slo_s
        target_s = min(target_s * self._settings.target_fraction, target_s - waited_s)
        for share in self._settings.shares:
            if self._decode_s(share) <= target_s:
                return share
        return self._settings.shares[-1]

    def _decode_s(self, decode_sms: int) -> float:
        """With what is prefilled now beside it to its end."""
        draw = self._batch.draw(self._costs, decode_sms) if self._batch else None
        return self._costs.decode_s(len(self.decoding), self.decoding.contexts, decode_sms, draw)

    def _end_decode(self) -> None:
        self._decode_runs = False
        self._system.give(self.decoding.numbers)
        self._free(self.decoding.advance())
        self._share_out()

    def _choose_batch(self) -> None:
        """The next prompts, where none is being prefilled; in the order srpf also where a shorter
        one has come. An interrupted batch keeps its memory and its layers."""
        batch = self._batch
        if batch is not None:
            shorter = len(self._queue) and self._queue[0].prompt_tokens < batch.tokens_left
            fits = shorter and self._queue[0].kv_tokens <= self.memory.free_tokens
            if not (self._preempts and fits):
                return
            self._interrupted.append(batch)
            self._batch = None
        resumed = min(self._interrupted, key=lambda one: one.tokens_left, default=None)
        if resumed and not (self._queue and self._queue[0].prompt_tokens < resumed.tokens_left):
            self._resume(resumed)
        elif jobs := self._admit():
            self._batch = Batch(jobs, self._system.factor())
        elif resumed:
            self._resume(resumed)

    def _resume(self, batch: Batch) -> None:
        self._interrupted.remove(batch)
        self._batch = batch

    def _admit(self) -> list[Job]:
        """The first prompts that have memory, up to batch_tokens."""
        count = tokens = kv_tokens = 0
        while count < len(self._queue):
            job = self._queue[count]
            tokens, kv_tokens = tokens + job.prompt_tokens, kv_tokens + job.kv_tokens
            full = count and tokens > self._settings.batch_tokens
            if full or kv_tokens > self.memory.free_tokens:
                break
            count += 1
        jobs = self._queue.take(count)
        for job in jobs:
            self.memory.take(job.kv_tokens)
        return jobs

    def _count_progress(self) -> None:
        """What the batch has done since its speed was set."""
        now_s = self._system.now_s
        if self._batch is not None:
            worked_s = now_s - self._speed_since_s
            self._batch.left = max(0.0, self._batch.left - worked_s / self._whole_s)
            share = (1.0 - self.decode_sms / self._costs.sms) * self._system.share
            self._system.busy_s += worked_s * share
        self._speed_since_s = now_s

    def _run_batch(self) -> None:
        """The batch runs on with what decode leaves; earlier ends set for it are void."""
        self._ending += 1
        if self._batch is None:
            return
        self._speed_since_s = self._system.now_s
        self._whole_s = self._batch.whole_s(self._costs, self.decode_sms, self._decode_runs)
        ending = self._ending
        self._system.after(self._batch.left * self._whole_s, lambda: self._end_batch(ending))

    def _end_batch(self, ending: int) -> None:
        if ending != self._ending or self._batch is None:
            return
        self._count_progress()
        jobs, self._batch = self._batch.jobs, None
        self._system.give([job.number for job in jobs])
        self._free([job for job in jobs if job.output_tokens == 1])
        now_s = self._system.now_s
        self._joining += [(now_s, job) for job in jobs if job.output_tokens > 1]
        self.wake()

    def _free(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.memory.free(job.kv_tokens)


class MuxWise(Replicated):
    """costs: of one replica. memory_tokens: KV tokens that one has room for."""

    def __init__(
        self,
        costs: MultiplexedCosts,
        replicas: int,
        memory_tokens: int,
        settings: Multiplexing,
        order: str,
    ):
        if settings.shares[-1] >= costs.sms:
            raise ValueError(
                f"shares: {settings.shares[-1]} SMs of {costs.sms} leave none to prefill"
            )
        super().__init__(
            replicas,
            lambda system: MultiplexedReplica(system, costs, memory_tokens, settings, order),
        )
