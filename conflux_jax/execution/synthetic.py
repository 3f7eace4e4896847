"""Iterations made up for profiling: which ones, and the plans that make the real step run them.

Only their time counts, so requests share pages: each slot has a stretch of its own of the shuffled
pool, as far as there are enough pages for that (contexts that all lay in the same pages would stay
in a cache and be read too fast).
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_jax.execution.limits import BatchLimits
from conflux_jax.plan import (
    Admission,
    Bucket,
    DecodeRow,
    DecodeRows,
    Handoff,
    IterationPlan,
    Pages,
    Placement,
    PrefillChunk,
)
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import IterationShape, iteration_shape
from conflux_jax.scheduler.waterfill import waterfill

ATTEMPTS = 50  # draws for a bucket before it counts as one that no iteration can have
SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Workload:
    """What one iteration does. contexts[group]: KV tokens of each decode there. chunks: (tokens
    before it, its tokens). shares[group]: prefill tokens. handoff: whether KV moves. shared:
    see `iteration_shape`."""

    bucket: Bucket
    contexts: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, int], ...] = ()
    shares: tuple[int, ...] = ()
    handoff: bool = False
    shared: bool = False

    @property
    def kind(self) -> str:
        if not self.chunks:
            return "decode only"
        return "mixed" if any(self.contexts) else "prefill only"

    @property
    def shape(self) -> IterationShape:
        totals = [sum(group) for group in self.contexts]
        longest = max((max(group) for group in self.contexts if group), default=0)
        return iteration_shape(self.bucket, totals, longest, self.chunks, self.shared)


class WorkloadSampler:
    """Draws iterations at random, bucket by bucket, within what the engine may plan.

    max_batched_tokens: of one iteration, over all groups. Half of those with prefill fill their
    bucket to the last row, as a scheduler does that has prompts waiting."""

    def __init__(self, limits: BatchLimits, ladders: Ladders, max_batched_tokens: int, seed: int):
        self.limits, self.ladders = limits, ladders
        self.max_batched_tokens = max_batched_tokens
        self._random = random.Random(seed)

    def draw(self, per_bucket: int) -> list[Workload]:
        """`per_bucket` different workloads of every bucket that the engine can plan."""
        found: dict[Workload, None] = {}
        for bucket in self.ladders.all():
            for _ in range(per_bucket):
                for _ in range(ATTEMPTS):
                    workload = self._attempt(bucket)
                    if workload is not None and workload not in found:
                        found[workload] = None
                        break
        return list(found)

    def _attempt(self, bucket: Bucket) -> Workload | None:
        """A workload of the bucket, or None where the draw came out as one of another."""
        spare = bucket.prefill or bucket.handoff  # a slot for the prompt
        loads = self._loads(bucket, self.limits.max_slots - spare)
        chunks: tuple[tuple[int, int], ...] = ()
        shares = (0,) * len(loads)
        if bucket.prefill:
            shares = self._shares(bucket, loads)
            if not sum(shares):
                return None
            chunks = self._chunks(sum(shares), self.limits.max_slots - sum(loads))
        if self.ladders.fit(loads, shares, bucket.handoff) != bucket:
            return None
        shared = self.limits.geometry.shared
        return Workload(bucket, self._contexts(loads), chunks, shares, bucket.handoff, shared)

    def _loads(self, bucket: Bucket, slots: int) -> list[int]:
        """Decodes of each group, the same in all of them or in none."""
        draw, groups = self._random, self.limits.geometry.groups
        ladder = self.ladders.mixed_decode_rows if bucket.prefill else self.ladders.decode_rows
        if not bucket.decode_rows:
            return [0] * groups
        most = min(bucket.decode_rows, slots)
        fullest = draw.randint(min(_below(ladder, bucket.decode_rows) + 1, most), most)
        even = draw.random() < 0.6
        loads, left = [fullest], slots - fullest
        for _ in range(groups - 1):
            loads.append(min(left, fullest if even else draw.randint(0, fullest)))
            left -= loads[-1]
        draw.shuffle(loads)
        return loads

    def _shares(self, bucket: Bucket, loads: Sequence[int]) -> tuple[int, ...]:
        """Prefill tokens of each group, to fill it to some row of this bucket's."""
        draw, apart = self._random, self.ladders.apart
        rows = bucket.rows - (bucket.decode_rows if apart else 0)
        cups = [0] * len(loads) if apart else loads
        low = min(_below(self.ladders.rows, rows) + 1, rows)
        level = rows if draw.random() < 0.5 else draw.randint(low, rows)
        total = sum(max(0, level - load) for load in cups)
        total = min(total, self.max_batched_tokens - sum(loads))
        return waterfill(cups, level, total) if total > 0 else (0,) * len(loads)

    def _chunks(self, total: int, slots: int) -> tuple[tuple[int, int], ...]:
        """`total` tokens in one to a few chunks, each after a context of its own."""
        draw = self._random
        most = min(total, slots, self.limits.max_segments)
        count = 1 if draw.random() < 0.5 else draw.randint(1, most)
        cuts = [0, *sorted(draw.sample(range(1, total), count - 1)), total]
        lengths = [b - a for a, b in itertools.pairwise(cuts)]
        longest = longest_request(self.limits)
        chunks = []
        for length in lengths:
            length = min(length, longest - 1)
            first = draw.random() < 0.3
            chunks.append((0 if first else draw.randint(0, longest - 1 - length), length))
        return tuple(chunks)

    def _contexts(self, loads: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """KV tokens of the decodes: all alike, all sorts, or some long ones among short ones."""
        draw, most = self._random, longest_request(self.limits) - 1
        shortest = min(SHORTEST_CONTEXT, most)
        scale = round(shortest * (most / shortest) ** draw.random())
        scale = scale if draw.random() < 0.5 else draw.randint(shortest, most)
        manner = draw.choice(("alike", "all sorts", "few long"))

        def one() -> int:
            if manner == "alike":
                return scale
            if manner == "few long" and draw.random() < 0.75:
                return max(1, scale // 8)
            return draw.randint(1, scale)

        return tuple(tuple(one() for _ in range(load)) for load in loads)


class SyntheticPlans:
    """Plans for workloads. `admission()` first: it gives every slot a prompt and pages."""

    def __init__(self, limits: BatchLimits, vocab_size: int, seed: int):
        self._limits, self._iteration = limits, 0
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._pages = list(range(limits.geometry.num_pages))
        self._random.shuffle(self._pages)

    def admission(self, bucket: Bucket) -> IterationPlan:
        """Every slot filled, in an iteration of `bucket` that does nothing else."""
        limits = self._limits
        tokens = [self._random.randrange(self._vocab_size) for _ in range(longest_request(limits))]
        pools = limits.geometry.num_pools
        admissions, placements = [], []
        for slot in range(limits.max_slots):
            request = Request(str(slot), tuple(tokens), SamplingParams(temperature=0.0), 1)
            pages = self._stretch(slot, limits.prefill_table)
            admissions.append(Admission(slot, request, tokens, (pages,) * pools))
            placements.append(Placement(slot, 0, self._stretch(slot, limits.decode_table)))
        idle = Workload(bucket, ((),) * limits.geometry.groups)
        plan = self.plan(idle)
        return plan._replace(admissions=tuple(admissions), placements=tuple(placements))

    def plan(self, workload: Workload) -> IterationPlan:
        groups, slot, decodes = self._limits.geometry.groups, 0, []
        for contexts in workload.contexts:
            rows = [DecodeRow(str(slot + i), slot + i, at) for i, at in enumerate(contexts)]
            decodes.append(DecodeRows.of(rows))
            slot += len(rows)
        chunks = tuple(
            PrefillChunk(str(slot + i), slot + i, start, length, is_last=i == 0)
            for i, (start, length) in enumerate(workload.chunks)
        )
        self._iteration += 1
        return IterationPlan(
            iteration=self._iteration,
            bucket=workload.bucket,
            decodes=tuple(decodes),
            chunks=chunks,
            prefill_shares=workload.shares or (0,) * groups,
            handoffs=self._handoffs(workload, slot),
        )

    def _handoffs(self, workload: Workload, slot: int) -> tuple[Handoff, ...]:
        """What the first chunk's slot, or a free one, can send in one iteration."""
        if not workload.handoff:
            return ()
        tokens = sum(workload.chunks[0]) if workload.chunks else longest_request(self._limits)
        pages = self._limits.geometry.decode_pages(tokens)
        count = min(pages, self._limits.handoff_pages)
        return (Handoff(slot, 0, pages - count, count, tokens),)

    def _stretch(self, slot: int, count: int) -> Pages:
        first = slot * len(self._pages) // self._limits.max_slots
        return array("i", [self._pages[(first + i) % len(self._pages)] for i in range(count)])


def longest_request(limits: BatchLimits) -> int:
    """The most KV tokens of one request: as long as the model allows and the tables can name."""
    geometry = limits.geometry
    return min(
        limits.max_model_len,
        limits.decode_table * geometry.page_tokens,
        limits.prefill_table * geometry.prefill_page_tokens,
    )


def _below(ladder: Sequence[int], rung: int) -> int:
    """The rung before `rung`, or 0."""
    return max((size for size in ladder if size < rung), default=0)
