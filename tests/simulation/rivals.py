"""What the tests of the rival systems share: operators whose times are easy sums, requests, and a
clock that keeps what each request was given."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from conflux_jax.simulation.system import SimulatedRequest, System
from conflux_jax.simulation.work import Stages, Work


@dataclass(frozen=True)
class PlainOperators:
    """Satisfies Operators, in seconds that add up by hand. Products go with the SMs; reading has
    all of the bandwidth from half of them on."""

    num_layers: int = 10
    sms: int = 100
    contention: float = 0.1
    iteration_s: float = 0.0005
    weights_s: float = 0.004  # to read them all on one GPU
    row_s: float = 2e-5
    sample_s: float = 1e-5
    pair_s: float = 1e-9  # of a query and a key
    context_s: float = 1e-8  # of a KV token that is read
    sent_s: float = 1e-7  # of a token's KV

    def memory_share(self, sms: int) -> float:
        return min(1.0, 2 * sms / self.sms)

    def reading_s(self, rows: int, tp: int = 1) -> float:
        return self.weights_s / tp if rows else 0.0

    def linear_s(self, rows: int, tp: int = 1, sms: int | None = None) -> float:
        if not rows:
            return 0.0
        share = (sms or self.sms) / self.sms
        return max(self.weights_s / min(1.0, 2 * share), rows * self.row_s / share) / tp

    def head_s(self, rows: int, samples: int, tp: int = 1) -> float:
        return samples * self.sample_s / tp

    def prefill_attention_s(
        self, chunks: Sequence[tuple[int, int]], ways: int = 1, sms: int | None = None
    ) -> float:
        pairs = sum(length * (start + length / 2) for start, length in chunks)
        return pairs * self.pair_s / ways * self.sms / (sms or self.sms)

    def decode_attention_s(
        self, rows: int, context_tokens: int, ways: int = 1, sms: int | None = None
    ) -> float:
        share = (sms or self.sms) / self.sms
        return context_tokens * self.context_s / ways / min(1.0, 2 * share)

    def ring_prefill_s(self, chunks: Sequence[tuple[int, int]], degree: int, tp: int = 1) -> float:
        step_s = self.prefill_attention_s(chunks, tp) / degree**2
        held = sum(start + length for start, length in chunks) / degree
        return step_s + (degree - 1) * max(step_s, held * self.sent_s / tp)

    def kv_transfer_s(self, tokens: int, tp: int = 1) -> float:
        return tokens * self.sent_s / tp

    def masters_s(self, rows: int, groups: int, tp: int = 1) -> float:
        return 1e-4 if rows else 0.0


@dataclass
class PlainCosts:
    """A CostModel of one tensor-parallel group of those operators; it keeps what it was asked."""

    operators: PlainOperators = field(default_factory=PlainOperators)
    tp: int = 1
    seen: list[Work] = field(default_factory=list)

    def stages(self, work: Work) -> Stages:
        self.seen.append(work)
        ops = self.operators
        prefill = ops.prefill_attention_s(work.chunks, self.tp)
        decode = ops.decode_attention_s(work.decodes[0], work.contexts[0], self.tp)
        return Stages(
            linear=ops.linear_s(work.rows, self.tp),
            head=ops.head_s(work.rows, work.samples, self.tp),
            prefill_attention=prefill,
            decode_attention=decode,
            attention=prefill + decode,
            overhead=ops.iteration_s,
        )


def request(
    number: int, arrival_s: float, prompt: int, output: int, tbt_slo_s: float = math.inf
) -> SimulatedRequest:
    return SimulatedRequest(number, arrival_s, prompt, output, tbt_slo_s=tbt_slo_s)


def traffic(
    count: int, rate: float, seed: int = 0, tbt_slo_s: float = math.inf
) -> list[SimulatedRequest]:
    """Prompts of 50 to 6,000 tokens, most of them short; outputs of 1 to 60."""
    random_ = random.Random(seed)
    now_s, requests = 0.0, []
    for number in range(count):
        now_s += random_.expovariate(rate)
        prompt = round(50 * 120 ** random_.random())
        requests.append(request(number, now_s, prompt, random_.randint(1, 60), tbt_slo_s))
    return requests


def run(system: System, requests: Sequence[SimulatedRequest]) -> list[list[float]]:
    """When each request got its tokens, until nothing is due any more."""
    given: list[list[float]] = [[] for _ in requests]
    waiting = list(requests)
    now_s = 0.0
    while waiting or system.next_s < math.inf:
        if waiting and waiting[0].arrival_s <= system.next_s:
            system.add(waiting.pop(0))
            continue
        assert system.next_s >= now_s
        now_s = system.next_s
        for tokens in system.step():
            assert tokens.time_s >= now_s
            for number in tokens.numbers:
                given[number].append(tokens.time_s)
    return given


def assert_conserved(requests: Sequence[SimulatedRequest], given: Sequence[list[float]]) -> None:
    """Each request got all of its tokens, none before it came, at times that do not fall."""
    for wanted, times_s in zip(requests, given, strict=True):
        assert len(times_s) == wanted.output_tokens
        assert times_s == sorted(times_s)
        assert times_s[0] > wanted.arrival_s
