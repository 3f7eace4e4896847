"""How many multiprocessors of a GPU decode attention should have while prefill attention, with the
others, runs beside it: by timing iterations that have both, under one division after the other.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conflux_jax.execution.calibration import timed
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.synthetic import SyntheticPlans, Workload
from conflux_jax.models.attention import AttentionOptions
from conflux_jax.models.hopper_kernels import decode_sms_of
from conflux_jax.plan import Executor, IterationPlan
from conflux_jax.platform import GPU_PLATFORMS
from pallas_kernels.building_blocks import SMS

STEP = 16  # between the values that are tried first; half of it between the last ones
MAX_BUCKETS = 6  # whose shapes are timed: every value has compiled steps of its own


class Divisible(Executor, Protocol):
    """An executor whose later launches can be told how the multiprocessors are divided."""

    def divide_sms(self, decode_sms: int) -> None: ...


@dataclass(frozen=True)
class SmsChoice:
    """decode_sms: the value with the fastest iterations. slowdowns: of each value tried, its
    iterations' seconds over the least that any value took for the same shape, mean over `shapes` of
    them; 1.0: the fastest for every shape."""

    decode_sms: int
    slowdowns: dict[int, float]
    shapes: int

    def __str__(self) -> str:
        tried = ", ".join(f"{value}: +{slow - 1:.1%}" for value, slow in self.slowdowns.items())
        return (
            f"decode_sms: {self.decode_sms}, by {self.shapes} shapes of iterations with both "
            f"phases (over the fastest for each shape, {tried})"
        )


def why_no_search(
    platform: str,
    attention: AttentionOptions,
    configured: int | None,
    workloads: Sequence[Workload],
) -> str | None:
    """Why there is nothing to look for; None where there is. platform: of the engine's devices.
    configured: `decode_sms` of the config, None where it is left open. workloads: of
    `mixed_shapes`."""
    if platform not in GPU_PLATFORMS:
        return "no GPU runs the steps"
    if configured is not None:
        return f"the config sets it to {configured}"
    if attention.ordered:
        return "with overlap none decode and prefill attention do not run at the same time"
    if decode_sms_of(attention) is None:
        return "only Pallas' attention kernels divide the multiprocessors"
    return None if workloads else "no iteration has both phases"


def mixed_shapes(workloads: Sequence[Workload]) -> list[Workload]:
    """Those with both phases, of at most MAX_BUCKETS buckets from the smallest to the largest."""
    mixed = [workload for workload in workloads if workload.kind == "mixed"]
    buckets = sorted({workload.bucket for workload in mixed})
    if len(buckets) > MAX_BUCKETS:
        last = len(buckets) - 1
        buckets = [buckets[round(i * last / (MAX_BUCKETS - 1))] for i in range(MAX_BUCKETS)]
    return [workload for workload in mixed if workload.bucket in buckets]


def choose_decode_sms(
    runner: Runner,
    workloads: Sequence[Workload],
    repeats: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SmsChoice:
    """`find_decode_sms` on a runner that divides them, whose pool and slots are written to. It is
    left with the value chosen, for which `warm_up` has to compile what it has not run."""
    plans = SyntheticPlans(runner.limits, runner.dims.spec.vocab_size, seed)
    decodes_alone = runner.ladders.all()[0]
    list(timed(runner, [plans.admission(decodes_alone)]))
    rng = random.Random(seed)
    return find_decode_sms(runner, plans.plan, workloads, SMS, repeats, rng, progress)


def find_decode_sms(
    executor: Divisible,
    plan: Callable[[Workload], IterationPlan],
    workloads: Sequence[Workload],
    sms: int,
    repeats: int,
    rng: random.Random,
    progress: Callable[[int, int], None] | None = None,
) -> SmsChoice:
    """Tries every STEP-th value below `sms` on all workloads, then the neighbours of the best.

    plan: of a workload, for the executor's engine. repeats: of each shape under each value; all
    values in random order again and again, so that a machine that drifts drifts for all.
    progress(done, total): after each pass over the workloads."""
    coarse = list(range(STEP, sms, STEP))
    total, done = (len(coarse) + 3) * (repeats + 1), 0

    def run(value: int, order: Sequence[int]) -> list[float]:
        """Seconds of the workloads; the first runs once more before, on an idle device."""
        nonlocal done
        executor.divide_sms(value)
        steps = [plan(workloads[index]) for index in (order[0], *order)]
        seconds = list(timed(executor, steps))[1:]
        done += 1
        if progress is not None:
            progress(min(done, total), total)
        return seconds

    def slowdowns(values: Sequence[int]) -> dict[int, float]:
        for value in values:
            run(value, range(len(workloads)))  # compiles
        times = {value: [[] for _ in workloads] for value in values}
        for _ in range(repeats):
            for value in rng.sample(values, len(values)):
                order = rng.sample(range(len(workloads)), len(workloads))
                for index, seconds in zip(order, run(value, order), strict=True):
                    times[value][index].append(seconds)
        medians = {value: [statistics.median(x) for x in times[value]] for value in values}
        least = [min(of_shape) for of_shape in zip(*medians.values(), strict=True)]
        return {
            value: statistics.fmean(a / b for a, b in zip(medians[value], least, strict=True))
            for value in values
        }

    found = slowdowns(coarse)
    best = min(coarse, key=found.__getitem__)
    fine = [value for value in (best - STEP // 2, best, best + STEP // 2) if value < sms]
    near = slowdowns(fine)
    chosen = min(fine, key=near.__getitem__)
    executor.divide_sms(chosen)
    if progress is not None:
        progress(total, total)
    return SmsChoice(chosen, dict(sorted((found | near).items())), len(workloads))
