"""What the scheduler of a simulation knows of its hardware: a latency model that was fitted to a
few noisy timings, as `calibrate` fits one to a real engine. Never the cost model itself.
"""

from __future__ import annotations

import math
import random
import statistics

from conflux_jax.execution.latency_fit import fit_latency
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.measurements import MIN_FITTED, Calibration, Measurement, hold_out
from conflux_jax.execution.synthetic import Workload, WorkloadSampler
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import Identity, num_samples
from conflux_jax.simulation.executor import handoff_tokens
from conflux_jax.simulation.work import CostModel, Work

NOISE = 0.02  # of one timing: the logarithm's standard deviation
REPEATS = 7  # of a shape, whose median counts


def profile(
    costs: CostModel,
    limits: BatchLimits,
    ladders: Ladders,
    max_batched_tokens: int,
    identity: Identity,
    noise: float = NOISE,
    seed: int = 0,
) -> Calibration:
    """Price made-up iterations of every bucket and fit a model to them. The same seed gives the
    same model."""
    rng = random.Random(seed)
    workloads = WorkloadSampler(limits, ladders, max_batched_tokens, seed).draw(MIN_FITTED + 1)
    held = hold_out(workloads, rng)

    def timed(workload: Workload) -> float:
        seconds = costs.stages(workload_work(workload, limits)).total
        return seconds * math.exp(statistics.median(rng.gauss(0, noise) for _ in range(REPEATS)))

    measured = [Measurement(workload, timed(workload), timed(workload)) for workload in workloads]
    fitted = [m for index, m in enumerate(measured) if index not in held]
    model = fit_latency(
        [m.workload.shape for m in fitted],
        [m.seconds for m in fitted],
        identity,
        limits.geometry.groups,
        limits.max_segments,
    )
    return Calibration(model, tuple(fitted), tuple(measured[index] for index in sorted(held)))


def workload_work(workload: Workload, limits: BatchLimits) -> Work:
    """As `executor.work_of` of a plan that runs it."""
    bucket = workload.bucket
    return Work(
        rows=bucket.rows,
        decodes=tuple(len(group) for group in workload.contexts),
        contexts=tuple(sum(group) for group in workload.contexts),
        longest=max((max(group) for group in workload.contexts if group), default=0),
        chunks=workload.chunks,
        shares=workload.shares or (0,) * len(workload.contexts),
        samples=num_samples(bucket, limits.max_segments),
        handoff_tokens=handoff_tokens(limits) if bucket.handoff else 0,
    )
