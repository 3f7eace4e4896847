"""The scheduler under a latency model: targets held, drift followed, nothing left to chance."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_jax.plan import IterationPlan
from conflux_jax.scheduler.correction import HIGHEST, Correction
from conflux_jax.scheduler.latency_model import prefill_work
from tests.scheduler.predictors import Clocked, Linear, shape_of

MODEL = Linear(2e-3, 1e-4, 1e-8, 1e-7)


def steady(groups: int = 2, speed: float = 1.0, **more) -> Clocked:
    """A device that takes `speed` times what the model says."""

    def step_s(plan: IterationPlan) -> float:
        return MODEL.predict_s(shape_of(plan)) * speed

    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 16, **more}
    return Clocked(MODEL, step_s, groups, **settings)


def traffic(harness: Clocked, seed: int, turns: int = 120) -> None:
    rng = random.Random(seed)
    for number in range(turns):
        if rng.random() < 0.3:
            tbt_slo_s = rng.choice((0.02, 0.05, None))
            harness.add(f"r{number}", rng.randint(1, 900), rng.randint(1, 40), tbt_slo_s=tbt_slo_s)
        harness.run(1)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 4))
def test_no_iteration_is_planned_past_the_tightest_target(seed, groups):
    """16 decodes alone take at most 2 + 1.6 + 1.6 ms, far below the tightest target of 20 ms."""
    harness = steady(groups)
    traffic(harness, seed)
    for plan in harness.plans:
        ids = [row.request_id for rows in plan.decodes for row in rows]
        targets = [harness.requests[i].params.tbt_slo_s for i in ids]
        tightest = min((t for t in targets if t is not None), default=None)
        assert plan.predicted_s > 0
        if tightest is not None and plan.chunks:
            assert plan.predicted_s <= tightest
    harness.drain()


def test_iterations_are_filled_to_just_below_the_target():
    """An endless prompt beside one decode, 20 ms: the next rung of the ladder would be too long."""
    harness = steady(tbt_slo_s=0.02)
    harness.add("decode", 4, 400)
    harness.run(3)
    harness.add("prompt", 4000, 1)
    harness.run(10)
    for plan in harness.plans[5:12]:
        (chunk,) = plan.chunks
        assert plan.predicted_s <= 0.02
        rungs = harness.ladders.rows
        above = rungs[rungs.index(plan.bucket.rows) + 1]
        longer = shape_of(plan)._replace(
            bucket=harness.ladders.fit((1, 0), (above - 1, above), True),
            prefill_tokens=2 * above - 1,
            prefill_work=prefill_work(chunk.start, 2 * above - 1),
        )
        assert MODEL.predict_s(longer) > 0.02 / 1.13


def test_decodes_that_are_too_slow_do_not_stop_prefill():
    harness = steady(tbt_slo_s=1e-3)  # an iteration takes 2 ms at the least
    harness.add("decode", 4, 300)
    harness.run(3)
    harness.add("prompt", 400, 1)
    harness.run(40)
    chunks = [plan for plan in harness.plans if plan.chunks and len(plan.decodes[0])]
    assert {plan.bucket.rows for plan in chunks} == {harness.ladders.rows[0]}
    assert "prompt" in harness.ends


def test_a_request_that_is_late_is_served_after_those_that_can_be_in_time():
    harness = steady(groups=1)
    harness.add("first", 2000, 1)
    harness.run(4)  # the pace is known now
    harness.add("late", 600, 1, ttft_slo_s=1e-6)
    harness.add("timely", 600, 1, ttft_slo_s=60.0)
    harness.add("whenever", 600, 1)
    harness.drain()
    served = [c.request_id for plan in harness.plans for c in plan.chunks if c.is_last]
    assert served == ["timely", "first", "whenever", "late"]


@pytest.mark.parametrize("speed", [1.5, 0.6])
def test_a_change_of_speed_is_absorbed(speed):
    """The device slows down by half: after 50 iterations the target holds again, and on a faster
    one iterations are filled further."""
    now = [1.0]
    harness = steady(tbt_slo_s=0.02)
    harness.step_s = lambda plan: MODEL.predict_s(shape_of(plan)) * now[0]
    harness.add("decode", 4, 1000)
    harness.run(3)
    for number in range(40):
        harness.add(f"p{number}", 3000, 1)
    harness.run(60)
    before = len(harness.plans)
    now[0] = speed
    harness.run(51)
    change = len(harness.plans)
    harness.run(60)
    took = harness.took
    if speed > 1:
        assert max(took[before : before + 2]) > 0.02  # it was felt
    assert max(took[change:]) <= 0.02
    tokens = [plan.num_prefill_tokens for plan in harness.plans]
    assert (sum(tokens[change:]) < 60 * tokens[before - 1]) == (speed > 1)
    assert harness.scheduler.load().latency_corrections[1] == pytest.approx(speed, rel=0.03)


def test_one_slow_minute_does_not_end_prefill_for_ever():
    """Iterations with prefill take ten times as long until none is planned any more, and then are
    as they were: some time later one is tried, and found to be fast."""
    slow = [10.0]

    def step_s(plan: IterationPlan) -> float:
        return MODEL.predict_s(shape_of(plan)) * (slow[0] if plan.chunks else 1.0)

    harness = steady(tbt_slo_s=0.012)
    harness.step_s = step_s
    harness.add("decode", 4, 2000)
    harness.run(3)
    harness.add("prompt", 3000, 1)
    while not harness.plans or harness.plans[-1].chunks or len(harness.plans) < 6:
        harness.run(1)
    slow[0] = 1.0
    harness.run(400)
    assert "prompt" in harness.ends


def test_a_correction_is_bounded_and_knows_no_nonsense():
    made = Correction()
    for _ in range(500):
        made.observe(1.0, 1e6)
    assert made.ratio == pytest.approx(HIGHEST)
    for predicted_s, measured_s in ((0.0, 1.0), (1.0, 0.0)):
        before = made.factor
        made.observe(predicted_s, measured_s)
        assert made.factor == before


def test_a_margin_covers_all_but_few():
    """Durations with 5% of noise: of some thousands, one is longer than it was planned with (3.5
    standard deviations, of a mean and a spread that are estimates: about 3)."""
    rng, made, late = random.Random(3), Correction(), 0
    for number in range(21_000):
        measured_s = math.exp(rng.gauss(0.0, 0.05))
        late += number >= 1000 and measured_s > made.factor
        made.observe(1.0, measured_s)
    assert late / 20_000 < 0.0015
    assert made.factor == pytest.approx(math.exp(3.5 * 0.05), rel=0.05)


def test_a_hiccup_is_no_spread():
    """One iteration of ten times the time changes the margin by no more than any that is far off:
    by the square root of 1 + 0.02 * (9 - 1), 7.7% of the spread."""
    made = Correction()
    before = made.spread
    made.observe(1.0, 10.0)
    assert made.spread == pytest.approx(before * math.sqrt(1.16))
    for _ in range(200):
        made.observe(1.0, 1.0)
    assert made.spread < before


@given(st.integers(0, 1000))
@settings(max_examples=5)
def test_same_inputs_same_plans(seed):
    def plans() -> list[IterationPlan]:
        harness = steady(groups=3, speed=1.2)
        traffic(harness, seed, 60)
        harness.drain()
        return harness.plans

    assert plans() == plans()
