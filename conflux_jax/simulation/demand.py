"""What a trace asks for: lengths, rate, and how much of its prompts was seen before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conflux_jax.scheduler.latency_model import prefill_work
from conflux_jax.simulation.traces import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True)
class Lengths:
    """Of tokens, over requests."""

    mean: float
    p50: int
    p95: int
    p99: int
    longest: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Lengths:
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(sum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens to compute. work_per_token: query-key pairs of one of them, on average."""

    lengths: Lengths
    work_per_token: float


@dataclass(frozen=True)
class Demand:
    """prompts: all of them computed. uncached: less what was seen before. prefix_reuse: share of
    all prompt tokens that lie in blocks seen before. Both None where the trace tells of none.
    decode_context: KV tokens that a decode reads, averaged over all tokens that are decoded.
    longest_context: p95 of prompt plus output."""

    num_requests: int
    duration_s: float
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    prompts: Prefill
    outputs: Lengths
    decode_context: float
    longest_context: int
    uncached: Prefill | None
    prefix_reuse: float | None

    @property
    def rate_per_s(self) -> float | None:
        """Requests a second: intervals over the time that they took. None where all came at once.

        Worked: four requests within 2 s are three intervals: 1.5.
        """
        return (self.num_requests - 1) / self.duration_s if self.duration_s else None


class PrefixesSeen:
    """Every chain of blocks so far, as a cache that never evicts would know it. A block counts only
    after the same blocks as before: KV depends on all that precedes it."""

    def __init__(self):
        self._chains: dict[tuple[int, int], int] = {}  # (chain, next block) -> longer chain

    def add(self, request: TraceRequest) -> int:
        """Prompt tokens of the longest chain seen before; the request's own is seen from now on."""
        chain, seen, all_seen = 0, 0, True
        for block in request.prefix_hashes:
            step = (chain, block)
            all_seen = all_seen and step in self._chains
            seen += all_seen
            chain = self._chains.setdefault(step, len(self._chains) + 1)
        return min(seen * BLOCK_TOKENS, request.prompt_tokens)


def measure(requests: Iterable[TraceRequest]) -> Demand:
    """Keeps a few numbers of each request. Raises ValueError where there is none."""
    seen = PrefixesSeen()
    prompts, outputs, cached = [], [], []
    first_s = last_s = 0.0
    has_hashes = False
    for request in requests:
        if not prompts:
            first_s = request.arrival_s
        last_s = request.arrival_s
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        cached.append(seen.add(request))
        has_hashes = has_hashes or bool(request.prefix_hashes)
    if not prompts:
        raise ValueError("a trace without requests says nothing")
    pairs = list(zip(prompts, outputs, strict=True))
    return Demand(
        num_requests=len(prompts),
        duration_s=last_s - first_s,
        prompt_lengths=tuple(prompts),
        output_lengths=tuple(outputs),
        prompts=_prefill([0] * len(prompts), prompts),
        outputs=Lengths.of(outputs),
        decode_context=sum(o * (p + o / 2) for p, o in pairs) / sum(outputs),
        longest_context=percentile(sorted(p + o for p, o in pairs), 95),
        uncached=_prefill(cached, prompts) if has_hashes else None,
        prefix_reuse=sum(cached) / sum(prompts) if has_hashes else None,
    )


def _prefill(cached: Sequence[int], prompts: Sequence[int]) -> Prefill:
    """A prompt that is cached to its end still has its last token computed: it gives the first of
    the output."""
    starts = [min(start, prompt - 1) for start, prompt in zip(cached, prompts, strict=True)]
    left = [prompt - start for start, prompt in zip(starts, prompts, strict=True)]
    work = sum(prefill_work(start, length) for start, length in zip(starts, left, strict=True))
    return Prefill(Lengths.of(left), work / sum(left))


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The smallest of the rising values that `percent` of them do not exceed (nearest rank).

    >>> percentile([10, 20, 30, 40], 50), percentile([10, 20, 30, 40], 95)
    (20, 40)
    """
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]
