"""Records of a run, planned again, and simulated from a profile."""

from __future__ import annotations

import dataclasses
import random
import time
from array import array

import numpy as np
import pytest

from conflux_jax.engine import Engine
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.model_info import ModelInfo
from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.latency_model import LatencyModel, prefill_work
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.simulation.costs import ProfiledCosts
from conflux_jax.simulation.executor import ModelledExecutor, VirtualClock
from conflux_jax.simulation.profiling import profile
from conflux_jax.simulation.replay import (
    RecordedSystem,
    RecordingScheduler,
    drive,
    iteration_ratios,
    quantile_errors,
    recorded_requests,
    replan,
)
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.systems.conflux import Blueprint, ConfluxSystem
from conflux_jax.simulation.work import Stages, Work
from tests.fakes import VOCAB_SIZE, FakeExecutor, byte_codec, spell, wait_until
from tests.simulation.blueprints import blueprint

MAX_TOKENS = 64


class Device:
    """Satisfies CostModel: milliseconds, that grow with what real kernels' times grow with."""

    def stages(self, work: Work) -> Stages:
        prefill = 3e-9 * sum(prefill_work(start, length) for start, length in work.chunks)
        decode = 4e-7 * max(work.contexts)
        return Stages(linear=2e-3 + 1e-4 * work.rows**0.9, attention=prefill + decode)


def calibrated(design: Blueprint) -> LatencyModel:
    identity = {
        "rows_ladder": design.ladders.rows,
        "decode_rows_ladder": design.ladders.decode_rows,
    }
    fitted = profile(
        design.costs, design.limits, design.ladders, MAX_TOKENS, identity, noise=0.01, seed=1
    )
    return fitted.model


def scheduler_of(design: Blueprint, limits: BatchLimits, model: LatencyModel) -> Scheduler:
    return Scheduler(design.config, limits.geometry, design.ladders, limits.max_model_len, model)


def traffic(count: int, origin_s: float) -> list[Request]:
    draw, now_s, requests = random.Random(4), origin_s, []
    for number in range(count):
        now_s += draw.expovariate(25.0)
        outputs = draw.randint(2, 25)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, ttft_slo_s=0.5, tbt_slo_s=0.02)
        prompt = range(draw.randint(1, 300))
        requests.append(Request(f"r{number}", prompt, params, outputs, arrival_s=now_s))
    return requests


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest):
    """A run on a device that the scheduler knows by its profile only, noise and all; its clock
    starts anywhere."""
    design = blueprint(Device(), request.param, num_pages=120)
    model = calibrated(design)
    recorder = RecordingScheduler(scheduler_of(design, design.limits, model))
    clock = VirtualClock(1000.0)
    device = ModelledExecutor(design.costs, clock, design.limits, noise=0.03, seed=8)

    def wait(until_s: float) -> None:
        clock.now_s = until_s

    drive(recorder, device, clock, wait, traffic(150, origin_s=1003.0))
    return design, model, recorder.record


def test_measured_times_give_the_same_plans(run):
    design, model, record = run
    assert len(record.plans) > 300
    assert replan(record, scheduler_of(design, design.limits, model)) == record.plans


def test_another_profile_gives_other_plans(run):
    """So it is the profile that the plans follow from; it stops at the first that differs."""
    design, model, record = run
    slower = dataclasses.replace(model, token_s=model.token_s + 1e-4)
    plans = replan(record, scheduler_of(design, design.limits, slower))
    assert plans[:-1] == record.plans[: len(plans) - 1]
    assert plans[-1] != record.plans[len(plans) - 1]


def test_profiled_times_give_the_distribution(run):
    design, model, record = run
    requests = recorded_requests(record)
    assert requests[0].arrival_s == 0.0 and len(requests) == 150
    real = simulate(RecordedSystem(record), requests)
    assert np.isfinite(real.last_s).all()
    plan = Blueprint(design.config, design.limits, design.ladders, model, ProfiledCosts(model))
    simulated = simulate(ConfluxSystem(plan, noise=0.0), requests)
    errors = quantile_errors(simulated, real)
    assert abs(errors["ttft"]) < 0.1 and abs(errors["tbt"]) < 0.1
    assert real.summary()["output_tokens"] == simulated.summary()["output_tokens"]


def test_iterations_are_held_against_the_costs(run):
    """The device departs from its costs by a noise of 3% and by nothing else."""
    design, _, record = run
    ratios = iteration_ratios(record, design.costs, design.limits)
    assert sum(map(len, ratios.values())) == len(record.plans)
    for kind, some in ("decode", 100), ("prefill", 100):
        logs = np.log(ratios[kind])
        assert len(logs) > some
        assert abs(logs.mean()) < 4 * 0.03 / len(logs) ** 0.5
        assert logs.std() == pytest.approx(0.03, rel=0.25)


def test_quantile_errors_of_known_distributions(run):
    """Twice as long everywhere is off by 1 at every quantile."""
    _, _, record = run
    real = simulate(RecordedSystem(record), recorded_requests(record))
    assert set(quantile_errors(real, real).values()) == {0.0}
    twice = dataclasses.replace(
        real,
        first_s=real.first_s + real.ttft_s,
        gaps_s=array("d", [2 * gap_s for gap_s in real.gaps_s]),
    )
    assert list(quantile_errors(twice, real).values()) == pytest.approx([1.0] * 10)


def test_a_record_of_the_real_engine_is_planned_again(run):
    """Threads, aborts, early ends by a stop string and by EOS: all that the scheduler was told is
    in the record."""
    design = blueprint(Device(), groups=2, num_pages=120)

    def fresh() -> Scheduler:
        limits = design.limits
        return Scheduler(design.config, limits.geometry, design.ladders, limits.max_model_len)

    recorder = RecordingScheduler(fresh())
    info = ModelInfo("fake", 512, VOCAB_SIZE)
    executor = FakeExecutor(spell("one two three"), step_s=0.0005)
    with Engine(recorder, executor, byte_codec(), info) as engine:

        def submit(**params):
            prepared = engine.prepare("a prompt", SamplingParams(max_tokens=40, **params))
            return engine.submit_many([prepared])[0]

        streams = [submit(), submit(stop=("two",)), submit(ignore_eos=True)]
        aborted = submit(ignore_eos=True)
        next(aborted)
        aborted.close()
        assert streams[1].read_all().text == "one "
        for stream in (streams[0], streams[2]):
            stream.read_all()
        wait_until(lambda: not recorder.has_work)
        time.sleep(0.01)
    assert len(recorder.record.requests) == 4
    assert replan(recorder.record, fresh()) == recorder.record.plans
    assert len(recorder.record.plans) >= 40
