"""The modelled executor: what a plan is priced as, and when its iteration runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.synthetic import SyntheticPlans, WorkloadSampler
from conflux_jax.plan import (
    Bucket,
    DecodeRow,
    DecodeRows,
    IterationPlan,
    PoolGeometry,
    PrefillChunk,
)
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.simulation.executor import ModelledExecutor, VirtualClock, work_of
from conflux_jax.simulation.profiling import profile, workload_work
from conflux_jax.simulation.replay import RecordingScheduler, drive
from conflux_jax.simulation.system import Iteration
from conflux_jax.simulation.systems.conflux import scheduled
from conflux_jax.simulation.work import Stages, Work
from tests.simulation.blueprints import PlainCosts, blueprint, requests_of

LIMITS = BatchLimits(PoolGeometry(3, 64, 16, 48), 16, 8, 512, max_segments=4, handoff_pages=2)


def rows(*positions: int) -> DecodeRows:
    return DecodeRows.of([DecodeRow(str(at), slot, at) for slot, at in enumerate(positions)])


def test_work_of_a_plan():
    """Two decodes of 7 and 9 tokens on group 0, none on 1, one of 20 on 2; chunks of 10 tokens
    after 32 and of 5. The bucket has 8 decode rows, and 4 chunks may sample. Hand-off carries 2
    pages of 16 tokens."""
    plan = IterationPlan(
        iteration=3,
        bucket=Bucket(16, 8, prefill=True, handoff=True),
        decodes=(rows(7, 9), rows(), rows(20)),
        chunks=(
            PrefillChunk("a", 4, 32, 10, is_last=True),
            PrefillChunk("b", 5, 0, 5, is_last=False),
        ),
        prefill_shares=(4, 6, 5),
    )
    assert work_of(plan, LIMITS) == Work(
        rows=16,
        decodes=(2, 0, 1),
        contexts=(16, 0, 20),
        longest=20,
        chunks=((32, 10), (0, 5)),
        shares=(4, 6, 5),
        samples=12,
        handoff_tokens=32,
    )


def test_a_profiled_workload_and_the_plan_that_runs_it_are_the_same_work():
    ladders = Ladders.make(8, 32, 2.0, handoff=True)
    workloads = WorkloadSampler(LIMITS, ladders, 96, seed=1).draw(3)
    plans = SyntheticPlans(LIMITS, vocab_size=100, seed=1)
    assert len(workloads) > 3 * 10
    for workload in workloads:
        assert work_of(plans.plan(workload), LIMITS) == workload_work(workload, LIMITS)


@dataclass
class Seconds:
    """Satisfies CostModel: as many seconds as rows."""

    def stages(self, work: Work) -> Stages:
        return Stages(linear=float(work.rows))


def plan_of(num_rows: int, *positions: int) -> IterationPlan:
    return IterationPlan(0, Bucket(num_rows, num_rows, False, False), (rows(*positions),))


def test_iterations_follow_each_other_without_overlap():
    clock = VirtualClock(10.0)
    executor = ModelledExecutor(Seconds(), clock, LIMITS)
    seen: list[Iteration] = []
    executor.observer = seen.append
    first, second = executor.launch(plan_of(4, 1, 2)), executor.launch(plan_of(2, 3))
    assert executor.collect(first).elapsed_s == 4.0 and clock() == 14.0
    output = executor.collect(second)
    assert output.elapsed_s == 2.0 and clock() == 16.0
    assert output.token_ids.shape == (1,)
    clock.now_s = 20.0  # idle until then
    assert executor.collect(executor.launch(plan_of(8))).elapsed_s == 8.0
    assert [(i.start_s, i.elapsed_s) for i in seen] == [(10.0, 4.0), (14.0, 2.0), (20.0, 8.0)]
    assert executor.busy_s == 14.0 and executor.num_iterations == 3


def test_noise_is_seeded_and_has_its_size():
    def times(seed: int) -> np.ndarray:
        executor = ModelledExecutor(Seconds(), VirtualClock(), LIMITS, noise=0.1, seed=seed)
        plan = plan_of(1, 5)
        return np.array([executor.launch(plan).elapsed_s for _ in range(2000)])

    logs = np.log(times(1))
    assert (times(1) == times(1)).all() and (times(1) != times(2)).any()
    # Four standard errors of a mean and of a standard deviation.
    assert abs(logs.mean()) < 4 * 0.1 / math.sqrt(2000)
    assert abs(logs.std() - 0.1) < 4 * 0.1 / math.sqrt(2 * 2000)


def test_profiling_finds_what_a_latency_model_can_say():
    """PlainCosts are a sum of its terms, so without noise shapes that it never saw come out right,
    every time; with noise their times are off."""
    ladders = Ladders.make(8, 32, 2.0, handoff=True)

    def profiled(noise: float):
        return profile(PlainCosts(), LIMITS, ladders, 96, {"of": "a test"}, noise, seed=3)

    exact, again, noisy = profiled(0.0), profiled(0.0), profiled(0.02)
    assert exact.model.identity == {"of": "a test"} and exact.model.groups == 3
    assert exact.errors(exact.held_out).worst < 1e-3 and exact.noise().worst == 0.0
    assert again.model == exact.model
    # The median of seven: its standard deviation is about 1.25 / sqrt(7) of one timing's.
    assert 0.001 < noisy.noise().mean < 0.02


@pytest.mark.parametrize(("groups", "num_pages"), [(1, 32), (2, 20)])
def test_contexts_that_are_counted_on_are_those_of_the_rows(groups: int, num_pages: int):
    """While requests join, end, are preempted and come back: outputs are too long for the pool."""
    design = blueprint(PlainCosts(), groups, num_pages, max_model_len=256)
    limits = design.limits
    scheduler = RecordingScheduler(
        Scheduler(design.config, limits.geometry, design.ladders, limits.max_model_len)
    )
    clock, iterations = VirtualClock(), list[Iteration]()
    executor = ModelledExecutor(design.costs, clock, limits)
    executor.observer = iterations.append
    rows = [(0.5 * at, 16 + 5 * at, 60 + 3 * at) for at in range(12)]
    requests = [scheduled(request) for request in requests_of(*rows)]
    drive(scheduler, executor, clock, lambda time_s: None, requests)
    assert scheduler.load().num_preemptions > 0
    added_up = [work_of(plan, limits) for plan in scheduler.record.plans]
    assert [iteration.work for iteration in iterations] == added_up
    assert max(work.longest for work in added_up) > 100
