"""Whether a trace's traffic is of the kind that the scheme is for.

The premise: a long prompt needs several groups to have its first token in time, while decode
iterations are short beside the target between tokens, so that there is room to prefill in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import IterationShape, LatencyPredictor, prefill_work
from conflux_jax.simulation.demand import Demand, Prefill

MAX_GROUPS = 32  # that a prompt is tried on
RUNAWAY = 10.0  # TBT targets that a decode iteration may last before it is said to grow for ever


@dataclass(frozen=True)
class Engine:
    """What the traffic is held against. predictor: by the number of groups that share a prompt.
    max_rows: of one group in an iteration. kv_tokens: that a group has memory for.
    max_model_len: most tokens of prompt and output. Both None where that is not known."""

    predictor: Callable[[int], LatencyPredictor]
    groups: int
    gpus_per_group: int
    max_rows: int
    ttft_slo_s: float
    tbt_slo_s: float
    kv_tokens: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True)
class Decoding:
    """Decodes of one group, by Little's law. concurrency: that run at once. steady: False where
    they come faster than they end however many run; the other two are then where that was given up.
    """

    concurrency: int
    iteration_s: float
    steady: bool


@dataclass(frozen=True)
class Filled:
    """Iterations that are filled with prefill as far as can be. target_s: how long they may last:
    the TBT target, or less where more decodes would then run than a group has memory for. decodes:
    of one group, more than where iterations are short. decode_s: of an iteration of those alone.
    tokens: of prefill that fit beside them in all groups. capacity_tokens_s: of prompts that are
    then served."""

    target_s: float
    decodes: int
    decode_s: float
    tokens: int
    capacity_tokens_s: float


@dataclass(frozen=True)
class Premise:
    """p95_prefill_s: of that prompt on one group; p95_all_groups_s: on all. groups_p95, groups_p99:
    the fewest that meet the TTFT target for such a prompt, None where MAX_GROUPS do not. `uncached`
    are the same with every prefix cached that was seen before, None where the trace tells of none.
    offered_tokens_s: of prompts."""

    demand: Demand
    engine: Engine
    rate_per_s: float
    p95_prefill_s: float
    p95_all_groups_s: float
    groups_p95: int | None
    groups_p99: int | None
    groups_p95_uncached: int | None
    decoding: Decoding
    filled: Filled
    filled_uncached: Filled | None

    @property
    def slack(self) -> float:
        """Share of the TBT target that a decode iteration leaves; below 0 where it misses it."""
        return 1 - self.decoding.iteration_s / self.engine.tbt_slo_s

    @property
    def too_long(self) -> float | None:
        """Share of requests whose prompt and output are more than the model takes."""
        if (longest := self.engine.max_model_len) is None:
            return None
        demand = self.demand
        pairs = zip(demand.prompt_lengths, demand.output_lengths, strict=True)
        return sum(p + o > longest for p, o in pairs) / demand.num_requests

    @property
    def offered_tokens_s(self) -> float:
        return self.rate_per_s * self.demand.prompts.lengths.mean

    @property
    def offered_uncached_tokens_s(self) -> float | None:
        uncached = self.demand.uncached
        return None if uncached is None else self.rate_per_s * uncached.lengths.mean


def examine(demand: Demand, engine: Engine, rate_per_s: float) -> Premise:
    lengths, uncached = demand.prompts.lengths, demand.uncached
    cached = lengths.p95 - uncached.lengths.p95 if uncached else 0
    return Premise(
        demand=demand,
        engine=engine,
        rate_per_s=rate_per_s,
        p95_prefill_s=prefill_s(engine, 1, lengths.p95),
        p95_all_groups_s=prefill_s(engine, engine.groups, lengths.p95),
        groups_p95=groups_needed(engine, lengths.p95),
        groups_p99=groups_needed(engine, lengths.p99),
        groups_p95_uncached=(
            groups_needed(engine, uncached.lengths.p95, cached) if uncached else None
        ),
        decoding=decoding(demand, engine, rate_per_s),
        filled=filled(demand, demand.prompts, engine, rate_per_s),
        filled_uncached=filled(demand, uncached, engine, rate_per_s) if uncached else None,
    )


def prefill_s(engine: Engine, groups: int, tokens: int, start: int = 0) -> float:
    """Seconds to prefill `tokens` after `start` cached ones on that many groups, nothing beside
    them: chunks of as many tokens as the groups' rows take, and one of what is left.

    Worked: 1,000 tokens on 2 groups of 200 rows are chunks of 400, 400 and 200: 200, 200 and 100
    rows in each group.
    """
    predictor, total_s, end = engine.predictor(groups), 0.0, start + tokens
    while start < end:
        length = min(groups * engine.max_rows, end - start)
        total_s += predictor.predict_s(
            IterationShape(
                Bucket(-(-length // groups), 0, prefill=True, handoff=groups > 1),
                num_chunks=1,
                prefill_tokens=length,
                prefill_work=prefill_work(start, length),
            )
        )
        start += length
    return total_s


def groups_needed(engine: Engine, tokens: int, start: int = 0) -> int | None:
    """The fewest groups that prefill them within the TTFT target; None where MAX_GROUPS do not.
    More are not always faster where a profile says so, hence one after the other."""
    for groups in range(1, MAX_GROUPS + 1):
        if prefill_s(engine, groups, tokens, start) <= engine.ttft_slo_s:
            return groups
    return None


def decoding(demand: Demand, engine: Engine, rate_per_s: float) -> Decoding:
    """The fewest decodes of a group for which as many end as come: n = arrivals a second * tokens
    of an output * seconds of an iteration of n (Little's law), n whole.

    It is reached from below: n decodes take t(n), in which rate * tokens * t(n) are asked for; that
    is the next n, which only rises as t is monotone.

    Worked: 2 requests a second of 100 tokens on one group, t(n) = 10 ms + n * 1 ms: n = 200 * t(n)
    is 2 + 0.2 n, so n = 2.5, whole 3, which take 13 ms (and ask for 2.6). From below: 1, 2.2 -> 3.
    """
    num = 1
    while True:
        iteration_s = decode_iteration_s(demand, engine, num)
        wanted = _decodes_within(iteration_s, demand, engine, rate_per_s)
        if wanted <= num:
            return Decoding(num, iteration_s, steady=True)
        if iteration_s > RUNAWAY * engine.tbt_slo_s:
            return Decoding(num, iteration_s, steady=False)
        num = wanted


def decode_iteration_s(demand: Demand, engine: Engine, num: int) -> float:
    """Seconds of an iteration of `num` decodes on every group, and nothing else."""
    bucket = Bucket(num, num, prefill=False, handoff=False)
    return engine.predictor(engine.groups).predict_s(_shape(demand, engine, bucket))


def filled(demand: Demand, prefill: Prefill, engine: Engine, rate_per_s: float) -> Filled:
    """The most prefill tokens that fit beside the decodes that there are when iterations last as
    long as they may. Predictions rise with the rows, so they are found by bisection.

    Worked, memory: where a group is asked for 300 tokens a second and has room for 15 decodes,
    iterations of 50 ms keep 15 running; with longer ones there would be more.
    """
    target_s = engine.tbt_slo_s
    num = _decodes_within(target_s, demand, engine, rate_per_s)
    fitting = decodes_in_memory(demand, engine)
    if fitting is not None and num > fitting:
        target_s = fitting * engine.groups / (rate_per_s * demand.outputs.mean)
        num = max(1, fitting)
    predictor = engine.predictor(engine.groups)

    def iteration_s(rows: int) -> float:
        """With that many prefill rows in each group."""
        if not rows:
            return decode_iteration_s(demand, engine, num)
        bucket = Bucket(num + rows, num, prefill=True, handoff=engine.groups > 1)
        tokens = rows * engine.groups
        shape = _shape(demand, engine, bucket)._replace(
            num_chunks=1,
            prefill_tokens=tokens,
            prefill_work=round(tokens * prefill.work_per_token),
        )
        return predictor.predict_s(shape)

    low, high = 0, max(0, engine.max_rows - num)
    while low < high:
        middle = (low + high + 1) // 2
        if iteration_s(middle) <= target_s:
            low = middle
        else:
            high = middle - 1
    tokens = low * engine.groups
    capacity = tokens / iteration_s(low) if tokens else 0.0
    return Filled(target_s, num, decode_iteration_s(demand, engine, num), tokens, capacity)


def decodes_in_memory(demand: Demand, engine: Engine) -> int | None:
    """Decodes of average context that a group's KV memory holds; None where that is not known. A
    prompt that is being prefilled needs some of it too."""
    if engine.kv_tokens is None:
        return None
    return int(engine.kv_tokens // demand.decode_context)


def _shape(demand: Demand, engine: Engine, bucket: Bucket) -> IterationShape:
    context = round(bucket.decode_rows * demand.decode_context)
    return IterationShape(
        bucket,
        context_tokens=context,
        all_context_tokens=engine.groups * context,
        longest_context=demand.longest_context,
    )


def _decodes_within(iteration_s: float, demand: Demand, engine: Engine, rate_per_s: float) -> int:
    """Little's law, for one group of `engine.groups` that share them evenly; at least one."""
    running = rate_per_s * demand.outputs.mean * iteration_s / engine.groups
    return max(1, math.ceil(running))
