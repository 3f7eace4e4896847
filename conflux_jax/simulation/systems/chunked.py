"""Chunked prefill on uniform tensor parallelism, as in Sarathi-Serve and vLLM.

Each iteration takes every running decode, and fills up to a token budget with prompt tokens. All
rows go through the linear layers together; prefill and decode attention run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_jax.simulation.systems.events import Replicated
from conflux_jax.simulation.systems.jobs import DecodeBatch, Job, Prefills, Slice, cut
from conflux_jax.simulation.work import CostModel, Work

ORACLE_STEP = 64  # tokens: how finely the oracle chooses


@dataclass(frozen=True)
class Budget:
    """Most rows of an iteration, decodes included. A prompt ends by a row of its own and decodes in
    one, so the decodes alone are never more.

    oracle: in each iteration the largest budget up to `tokens` with which it meets the TBT target
    of all that decode, by the very costs that it will have: no real system knows them. Where the
    decodes alone miss it, `floor` tokens go along: holding them back would save nobody.
    """

    tokens: int
    oracle: bool = False
    floor: int = 512

    def __post_init__(self):
        if self.tokens < 1:
            raise ValueError(f"budget: {self.tokens} tokens; at least 1")


class ChunkedReplica:
    """One tensor-parallel group."""

    def __init__(
        self, system: Replicated, costs: CostModel, memory_tokens: int, budget: Budget, order: str
    ):
        self._system, self._costs, self._budget = system, costs, budget
        self.memory, self.decoding = system.new_pool(memory_tokens), DecodeBatch()
        self._prefills = Prefills(order, self.memory)
        self._busy = False

    @property
    def load(self) -> tuple[int, int]:
        return self._prefills.load

    def add(self, job: Job) -> None:
        self._prefills.waiting.add(job)

    def wake(self) -> None:
        if self._busy:
            return
        slices = self._choose()
        if not slices and not self.decoding:
            return
        self._busy = True
        self._prefills.start(slices)
        self._system.run(self._seconds(slices), self._system.share, lambda: self._end(slices))

    def _end(self, slices: Sequence[Slice]) -> None:
        complete = self._prefills.finish(slices)
        self._system.give((*self.decoding.numbers, *(job.number for job in complete)))
        self._prefills.release(self.decoding.advance())
        self._prefills.release([job for job in complete if job.output_tokens == 1])
        for job in complete:
            if job.output_tokens > 1:
                self.decoding.join(job)
        self._busy = False
        self.wake()

    def _choose(self) -> list[Slice]:
        """Of the prompts, what goes along with the decodes."""
        slices = self._prefills.offer(self._budget.tokens - len(self.decoding))
        target_s = self.decoding.tbt_slo_s
        if not self._budget.oracle or not slices or target_s == math.inf:
            return slices
        steps = -(-sum(piece.length for piece in slices) // ORACLE_STEP)
        low, high = 0, steps  # so many steps fit; no more than that may
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds(cut(slices, middle * ORACLE_STEP)) <= target_s:
                low = middle
            else:
                high = middle - 1
        if not low and self._seconds([]) > target_s:
            return cut(slices, self._budget.floor)
        return cut(slices, low * ORACLE_STEP)

    def _seconds(self, slices: Sequence[Slice]) -> float:
        return self._costs.stages(self._work(slices)).total

    def _work(self, slices: Sequence[Slice]) -> Work:
        tokens = sum(piece.length for piece in slices)
        decodes = len(self.decoding)
        return Work(
            rows=decodes + tokens,
            decodes=(decodes,),
            contexts=(self.decoding.contexts,),
            longest=self.decoding.longest,
            chunks=tuple(piece.chunk for piece in slices),
            shares=(tokens,),
            samples=decodes + sum(piece.length == piece.job.left for piece in slices),
        )


class Chunked(Replicated):
    """costs: of one replica. memory_tokens: KV tokens that one has room for."""

    def __init__(
        self, costs: CostModel, replicas: int, memory_tokens: int, budget: Budget, order: str
    ):
        super().__init__(
            replicas,
            lambda system: ChunkedReplica(system, costs, memory_tokens, budget, order),
        )
