"""The search for `decode_sms`: which division it finds, on a device whose times are known, and
where there is nothing to look for."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conflux_jax.build import with_profile_settings
from conflux_jax.config import Config, ConfigError
from conflux_jax.execution import calibration
from conflux_jax.execution.sms_search import (
    MAX_BUCKETS,
    find_decode_sms,
    mixed_shapes,
    why_no_search,
)
from conflux_jax.execution.synthetic import Workload
from conflux_jax.models.attention import AttentionOptions
from conflux_jax.models.hopper_kernels import HopperKernels
from conflux_jax.plan import Bucket, IterationPlan, StepOutput
from conflux_jax.scheduler.latency_model import Curve, LatencyModel

SMS = 132


def mixed(rows: int, context: int = 5) -> Workload:
    return Workload(Bucket(rows, 8, True, False), ((context,),), ((0, 3),), (3,))


@dataclass
class Dividing:
    """An executor on a clock of its own. work[i]: SM-seconds of decode and of prefill in iteration
    i, which take as long as the slower. The first step of a division compiles, for 50 s; one step
    in `hiccup` takes 9 s more."""

    work: list[tuple[float, float]]
    hiccup: int = 10**9
    now: float = 100.0
    decode_sms: int = 0
    seen: set[int] = field(default_factory=set)
    launches: int = 0
    ends_s: float = 0.0

    def divide_sms(self, decode_sms: int) -> None:
        self.decode_sms = decode_sms

    def seconds(self, iteration: int, decode_sms: int) -> float:
        decode, prefill = self.work[iteration]
        return max(decode / decode_sms, prefill / (SMS - decode_sms))

    def launch(self, plan: IterationPlan) -> Any:
        self.launches += 1
        seconds = self.seconds(plan.iteration, self.decode_sms)
        seconds += 50 * (self.decode_sms not in self.seen)
        seconds += 9 * (self.launches % self.hiccup == 0)
        self.seen.add(self.decode_sms)
        self.ends_s = max(self.now, self.ends_s) + seconds
        return Launched(self.now, self.ends_s)

    def collect(self, ticket: Any) -> StepOutput:
        self.now = max(self.now, ticket.ends_s)
        return StepOutput(np.zeros(0, np.int32), 0.0)


@dataclass
class Launched:
    launched_s: float
    ends_s: float


def searched(executor: Dividing, monkeypatch: pytest.MonkeyPatch, repeats: int):
    shapes = [mixed(16 + index) for index in range(len(executor.work))]

    def plan(workload: Workload) -> IterationPlan:
        return IterationPlan(shapes.index(workload), workload.bucket, ())

    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: executor.now)
    found = find_decode_sms(
        executor, plan, shapes, SMS, repeats, random.Random(0), lambda *step: steps.append(step)
    )
    assert steps[-1][0] == steps[-1][1]
    assert executor.decode_sms == found.decode_sms
    assert found.shapes == len(shapes)
    return found


def test_the_division_where_both_sides_end_together(monkeypatch: pytest.MonkeyPatch):
    """40 and 92 SM-seconds: between 32 and 48, of which 48 is nearer to the best, lies 40."""
    found = searched(Dividing([(40.0, 92.0)]), monkeypatch, repeats=1)
    assert found.decode_sms == 40
    assert found.slowdowns[40] == 1.0
    assert str(found).startswith("decode_sms: 40, by 1 shapes")


def test_shapes_count_alike_however_long_they_take(monkeypatch: pytest.MonkeyPatch):
    """Ten shapes want few multiprocessors for decode; one, a thousand times as long, wants many."""
    work = [(10.0, 122.0)] * 10 + [(80_000.0, 52_000.0)]
    executor, first = Dividing(work), range(16, 132, 16)
    found = searched(executor, monkeypatch, repeats=1)

    def mean_ratio(decode_sms: int, values: Iterable[int]) -> float:
        """Of a shape's seconds over the least of all values."""
        ratios = [
            executor.seconds(i, decode_sms) / min(executor.seconds(i, value) for value in values)
            for i in range(len(work))
        ]
        return sum(ratios) / len(ratios)

    coarse = min(first, key=lambda value: mean_ratio(value, first))
    fine = [coarse - 8, coarse, coarse + 8]
    assert found.decode_sms == min(fine, key=lambda value: mean_ratio(value, fine))
    assert found.slowdowns.keys() == {*first, *fine}
    assert found.slowdowns[112] == pytest.approx(mean_ratio(112, first))
    # The long one alone, and so the sum of seconds, would have it otherwise.
    assert found.decode_sms < 40 and min(first, key=lambda v: executor.seconds(10, v)) == 80


def test_steps_that_compile_or_stumble_do_not_count(monkeypatch: pytest.MonkeyPatch):
    """Of five repeats the median is taken; of 23 steps one stumbles, and 20 make the repeats."""
    work = [(40.0, 92.0), (60.0, 130.0), (20.0, 44.0)]
    quiet = searched(Dividing(work), monkeypatch, repeats=5)
    found = searched(Dividing(work, hiccup=23), monkeypatch, repeats=5)
    assert found.decode_sms == quiet.decode_sms
    assert found.slowdowns == pytest.approx(quiet.slowdowns)


def test_shapes_of_both_phases_from_small_buckets_to_large():
    alone = Workload(Bucket(16, 8, False, False), ((5,),))
    few = [alone, mixed(32, 1), mixed(32, 2), mixed(16)]
    assert mixed_shapes(few) == few[1:]
    many = [alone] + [mixed(rows, context) for rows in range(10, 30) for context in (1, 2)]
    rows = [workload.bucket.rows for workload in mixed_shapes(many)]
    assert len(set(rows)) == MAX_BUCKETS and len(rows) == 2 * MAX_BUCKETS
    assert rows[0] == 10 and rows[-1] == 29


@pytest.mark.parametrize(
    ("platform", "attention", "configured", "shapes", "reason"),
    [
        ("cpu", AttentionOptions(), None, [mixed(16)], "no GPU runs the steps"),
        ("gpu", AttentionOptions(False, True, True, HopperKernels(decode_sms=64)), 48,
         [mixed(16)], "the config sets it to 48"),
        ("gpu", AttentionOptions(kernels=HopperKernels()), None, [mixed(16)], "with overlap none"),
        ("gpu", AttentionOptions(False), None, [mixed(16)], "only Pallas' attention kernels"),
        ("gpu", AttentionOptions(False, False, True, HopperKernels(decode_sms=64)), None, [],
         "no iteration has both phases"),
        ("gpu", AttentionOptions(False, False, True, HopperKernels(decode_sms=64)), None,
         [mixed(16)], None),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_look_for(platform, attention, configured, shapes, reason):
    said = why_no_search(platform, attention, configured, shapes)
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_an_engine_divides_as_its_profile_says(tmp_path: Path):
    """Unless its own config says how."""
    flat = Curve((1,), (0.001,))
    model = LatencyModel({}, 1, 1, flat, flat, 0, flat, 0, 0, 0, 0, flat, 0, 0, 0, decode_sms=48)
    path = tmp_path / "profile.json"
    model.save(path)
    config = Config.from_flat(latency_profile=str(path))
    assert with_profile_settings(config).execution.decode_sms == 48
    own = Config.from_flat(config, decode_sms=32)
    assert with_profile_settings(own) == own
    assert with_profile_settings(Config()) == Config()
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"latency profile .*profile\.json: format"):
        with_profile_settings(config)
