"""Calibration: which iterations are made up, how steps are timed, how wrong a profile is."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conflux_jax import calibrate as command
from conflux_jax.config import Config
from conflux_jax.execution import calibration
from conflux_jax.execution.batch import BatchBuilder
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.measurements import KINDS, Calibration, Measurement, hold_out
from conflux_jax.execution.synthetic import (
    SyntheticPlans,
    Workload,
    WorkloadSampler,
    longest_request,
)
from conflux_jax.plan import Bucket, IterationPlan, PoolGeometry, StepOutput
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import Curve, IterationShape, LatencyModel

MAX_TOKENS = 96


def make_sampler(groups: int, shared: bool = False, apart: bool = False) -> WorkloadSampler:
    geometry = PoolGeometry(groups, 256, 4, 4 * groups, shared)
    ladders = Ladders.make(12, MAX_TOKENS // groups, 2.0, geometry.needs_handoff, apart=apart)
    limits = BatchLimits(geometry, 8, 12, 1000, 4, 6, apart)
    return WorkloadSampler(limits, ladders, MAX_TOKENS, seed=0)


VARIANTS = [(1, False, False), (3, False, False), (3, True, False), (3, False, True)]


@pytest.fixture(scope="module", params=VARIANTS, ids=["sp=1", "sp=3", "spread", "apart"])
def drawn(request: pytest.FixtureRequest) -> tuple[WorkloadSampler, list[Workload]]:
    sampler = make_sampler(*request.param)
    return sampler, sampler.draw(8)


def test_every_bucket_is_profiled_with_different_iterations(drawn):
    sampler, workloads = drawn
    assert len(set(workloads)) == len(workloads)
    for bucket in sampler.ladders.all():
        inside = [w for w in workloads if w.bucket == bucket]
        assert len(inside) >= 6, bucket
        if bucket.decode_rows and not bucket.prefill:
            assert len({w.shape.context_tokens for w in inside}) > 4
        if bucket.prefill:
            assert len({w.shape.prefill_work for w in inside}) > 1


def test_an_engine_could_plan_each_of_them(drawn):
    sampler, workloads = drawn
    limits, longest = sampler.limits, longest_request(sampler.limits)
    for w in workloads:
        loads = [len(group) for group in w.contexts]
        tokens = sum(length for _, length in w.chunks)
        assert sampler.ladders.fit(loads, w.shares, w.handoff) == w.bucket
        assert sum(w.shares) == tokens == w.shape.prefill_tokens
        assert sum(loads) + tokens <= MAX_TOKENS
        assert sum(loads) + len(w.chunks) <= limits.max_slots
        assert len(w.chunks) <= limits.max_segments
        assert all(1 <= context < longest for context in chain(*w.contexts))
        assert all(s >= 0 and n >= 1 and s + n < longest for s, n in w.chunks)


def test_they_differ_in_all_that_matters(drawn):
    """Contexts alike and not, in a group and between groups; one chunk and several, at a prompt's
    start and after a context; full buckets and others."""
    sampler, workloads = drawn
    groups = sampler.limits.geometry.groups
    inside = [contexts for w in workloads for contexts in w.contexts if len(contexts) > 2]
    assert any(len(set(contexts)) == 1 for contexts in inside)
    assert any(max(contexts) > 4 * min(contexts) for contexts in inside)
    loads = [[len(group) for group in w.contexts] for w in workloads if any(w.contexts)]
    assert any(len(set(load)) == 1 for load in loads)
    assert groups == 1 or any(min(load) < max(load) // 2 for load in loads)
    prefilling = [w for w in workloads if w.chunks]
    assert {1, 2, 3, 4} <= {len(w.chunks) for w in prefilling}
    starts = [start for w in prefilling for start, _ in w.chunks]
    assert 0 in starts and max(starts) > 100
    assert {w.kind for w in workloads} == set(KINDS)


def test_the_step_can_run_their_plans(drawn):
    """What the batch says to read lies in the pool, and the samples are where the plan has them."""
    sampler, workloads = drawn
    geometry = sampler.limits.geometry
    plans = SyntheticPlans(sampler.limits, vocab_size=50, seed=1)
    builder = BatchBuilder(sampler.limits)
    builder.build(plans.admission(workloads[0].bucket))
    for w in workloads:
        plan = plans.plan(w)
        batch = builder.build(plan)
        assert bool(plan.handoffs) == w.handoff
        slots = [row.slot for rows in plan.decodes for row in rows]
        slots += [chunk.slot for chunk in plan.chunks]
        assert sorted(slots) == list(range(len(slots)))
        f = builder.layout(w.bucket).views(batch.buffer)
        for table in {"decode_table", "prefill_table"} & set(f):
            assert f[table].min() >= 0 and f[table].max() < geometry.num_pages
        assert f["num_decodes"].tolist() == [len(group) for group in w.contexts]
        if w.bucket.decode_rows:
            assert f["context_lens"].max(initial=0) == w.shape.longest_context
        assert len(batch.sample_group) == len(plan.samples)


def test_shape_of_a_workload():
    bucket = Bucket(64, 4, True, True)
    workload = Workload(bucket, ((100, 20), (), (50, 50, 60)), ((0, 10), (300, 130)), (47, 47, 46))
    work = 128 * 256 + 2 * 128 * (512 + 256)
    assert workload.shape == IterationShape(bucket, 160, 280, 100, 2, 140, work, 3, 430)


def test_held_out_shapes_are_a_random_part_of_all_buckets():
    workloads = make_sampler(3).draw(8)
    held = hold_out(workloads, random.Random(0))
    assert len(held) == round(len(workloads) / 4)
    assert held != hold_out(workloads, random.Random(1))
    kept = [w.bucket for index, w in enumerate(workloads) if index not in held]
    assert min(kept.count(w.bucket) for w in workloads) >= 2


@dataclass
class Ticking:
    """An executor on a clock of its own: a launch takes 1 s of the host, a step `seconds` of a
    device that runs them one after the other."""

    seconds: list[float]
    now: float = 100.0
    free_at: float = 0.0
    calls: list[str] = field(default_factory=list)
    launched_s: float = 0.0

    def launch(self, plan: IterationPlan) -> Any:
        ticket = Ticking([], launched_s=self.now)
        self.now += 1
        self.free_at = ticket.free_at = max(self.now, self.free_at) + self.seconds[plan.iteration]
        self.calls.append(f"launch {plan.iteration}")
        return ticket

    def collect(self, ticket: Any) -> StepOutput:
        self.now = max(self.now, ticket.free_at)
        self.calls.append("collect")
        return StepOutput(np.zeros(0, np.int32), 0.0)


def test_steps_are_timed_back_to_back(monkeypatch: pytest.MonkeyPatch):
    """Each is launched while the one before runs, and its own time begins when that one ends."""
    executor = Ticking([10.0, 20.0, 5.0])
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: executor.now)
    plans = [IterationPlan(i, Bucket(1, 1, False, False), ()) for i in range(3)]
    # The first also has its launch.
    assert list(calibration.timed(executor, plans)) == [11.0, 20.0, 5.0]
    assert executor.calls == ["launch 0", "launch 1", "collect", "launch 2", "collect", "collect"]


def test_errors_and_noise_by_kind():
    def flat(seconds: float) -> Curve:
        return Curve((1,), (seconds,))

    model = LatencyModel({}, 1, 1, flat(1.0), flat(0), 0, flat(0), 0, 0, 0, 0, flat(0), 0, 0, 0)
    decode = Workload(Bucket(1, 1, False, False), ((5,),))
    prefill = Workload(Bucket(1, 0, True, False), ((),), ((0, 1),), (1,))
    found = Calibration(
        model,
        fitted=(Measurement(decode, 1.0), Measurement(prefill, 0.8)),
        held_out=(Measurement(decode, 2.0, 2.5), Measurement(prefill, 0.5, 0.5)),
    )
    assert found.errors(found.fitted).worst == pytest.approx(0.25)
    assert found.errors(found.held_out, "decode only").mean == pytest.approx(0.5)
    assert found.errors(found.held_out, "prefill only").mean == pytest.approx(1.0)
    assert found.errors(found.held_out, "mixed").count == 0
    assert found.noise().mean == pytest.approx(0.125)
    assert found.summary() == pytest.approx(
        {"heldout_mean_error": 0.75, "heldout_p95_error": 0.975, "noise_floor": 0.125}
    )
    assert "noise      decode only         1   25.0%   25.0%   25.0%" in found.table().splitlines()


def never_built(config: Config, progress: Any) -> Any:
    raise AssertionError("built")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_profiled(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "plot.png"
    assert command.main([f"--plot={path}"], never_built) == 1
    assert (
        capsys.readouterr().err
        == "error: --plot needs matplotlib: pip install 'conflux-jax[plot]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_refused_before_anything_is_profiled(
    tmp_path: Path, capsys
):
    path = tmp_path / "nowhere" / "profile.json"
    assert command.main([f"--out={path}"], never_built) == 1
    assert capsys.readouterr().err == f"error: {path}: its directory does not exist\n"
