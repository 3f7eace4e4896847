"""Profiling the engine's own steps, and a latency model from what they took.

Every shape runs several times, all shapes in random order again and again, so that a machine that
drifts drifts for all of them; a shape's time is its median. What becomes of the times is in
`measurements`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import jax
import numpy as np

from conflux_jax.execution.latency_fit import fit_latency
from conflux_jax.execution.measurements import MIN_FITTED, Calibration, Measurement, hold_out
from conflux_jax.execution.runner import Runner
from conflux_jax.execution.synthetic import SyntheticPlans, Workload, WorkloadSampler
from conflux_jax.plan import Executor, IterationPlan
from conflux_jax.scheduler.latency_model import Identity


@dataclass(frozen=True)
class Effort:
    """How much is measured. shapes: about how many, at least `MIN_FITTED` + 1 of every bucket.
    repeats: of each of them."""

    shapes: int = 120
    repeats: int = 7


QUICK = Effort(shapes=40, repeats=3)


def profile_identity(runner: Runner) -> Identity:
    """What a profile belongs to, as JSON values: with another one of these, steps take other times
    or have other shapes."""
    device, ladders, limits = runner.mesh.devices.flat[0], runner.ladders, runner.limits
    cores = {"cores": os.cpu_count()} if device.platform == "cpu" else {}
    identity = {
        "model": runner.dims.spec.name,
        "dtype": np.dtype(runner.dims.dtype).name,
        "sp": runner.mesh.devices.shape[0],
        "tp": runner.mesh.devices.shape[1],
        "device_kind": device.device_kind,
        **cores,
        "conflux_jax": version("conflux-jax"),
        "jax": jax.__version__,
        "rows_ladder": ladders.rows,
        "decode_rows_ladder": ladders.decode_rows,
        "mixed_decode_rows_ladder": ladders.mixed_decode_rows,
        "max_model_len": limits.max_model_len,
        "max_prefill_segments": limits.max_segments,
        "page_tokens": limits.geometry.page_tokens,
        "handoff_pages": limits.handoff_pages if ladders.handoff else 0,
        "overlap": runner.attention.overlap,
        "attention": repr(runner.attention.kernels),
        "decode_attention": "spread" if limits.geometry.shared else "local",
        "linear": "apart" if ladders.apart else "together",
    }
    return json.loads(json.dumps(identity))


def calibrate(
    runner: Runner,
    max_batched_tokens: int,
    effort: Effort = Effort(),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Profile a runner whose buckets are compiled, and fit. Its pool and slots are written to.

    max_batched_tokens: most tokens of an iteration (`max_num_batched_tokens`). seed: which shapes,
    in which order, and which are held out. progress(done, total): after each step.
    """
    limits, rng = runner.limits, random.Random(seed)
    workloads = draw_workloads(runner, max_batched_tokens, effort, seed)
    held = hold_out(workloads, rng)
    plans = SyntheticPlans(limits, runner.dims.spec.vocab_size, seed)
    warm_up = list({workload.bucket: workload for workload in workloads}.values())
    list(timed(runner, [plans.admission(workloads[0].bucket), *map(plans.plan, warm_up)]))

    # A shape that is held out has two places in a round: index + len(workloads) is the second.
    places = [*range(len(workloads)), *(index + len(workloads) for index in held)]
    order = [place for _ in range(effort.repeats) for place in rng.sample(places, len(places))]
    steps = (plans.plan(workloads[place % len(workloads)]) for place in order)
    times: dict[int, list[float]] = {place: [] for place in places}
    for done, (place, seconds) in enumerate(zip(order, timed(runner, steps), strict=True), 1):
        times[place].append(seconds)
        if progress is not None:
            progress(done, len(order))

    medians = {place: statistics.median(values) for place, values in times.items()}
    measured = [
        Measurement(workload, medians[index], medians.get(index + len(workloads), 0.0))
        for index, workload in enumerate(workloads)
    ]
    fitted = [m for index, m in enumerate(measured) if index not in held]
    model = fit_latency(
        [m.workload.shape for m in fitted],
        [m.seconds for m in fitted],
        profile_identity(runner),
        limits.geometry.groups,
        limits.max_segments,
        serial=runner.attention.ordered,
    )
    model = replace(model, decode_sms=runner.decode_sms)
    return Calibration(model, tuple(fitted), tuple(measured[index] for index in sorted(held)))


def draw_workloads(
    runner: Runner, max_batched_tokens: int, effort: Effort, seed: int
) -> list[Workload]:
    """The shapes that `calibrate` measures with these arguments."""
    per_bucket = max(MIN_FITTED + 1, round(effort.shapes / len(runner.ladders.all())))
    sampler = WorkloadSampler(runner.limits, runner.ladders, max_batched_tokens, seed)
    return sampler.draw(per_bucket)


def timed(executor: Executor, plans: Iterable[IterationPlan]) -> Iterator[float]:
    """Run the plans one after the other, as the engine does: each is launched before the one before
    is collected. Yields each one's seconds, from the later of its launch and the end of the one
    before to its own end."""
    previous: Any = None
    ended_s = 0.0
    for plan in chain(plans, (None,)):
        ticket = None if plan is None else executor.launch(plan)
        if previous is not None:
            executor.collect(previous)
            now_s = time.perf_counter()
            seconds, ended_s = now_s - max(previous.launched_s, ended_s), now_s
            yield seconds
        previous = ticket
