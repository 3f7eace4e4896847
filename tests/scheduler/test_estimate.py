"""Predicted first tokens: monotone, exact where the future is known, and of no consequence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import PoolGeometry
from conflux_jax.request import DeadlineUnmet, QueueFull
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import Budget, Decodes
from conflux_jax.scheduler.estimate import (
    RETRY_LEAST_S,
    RETRY_MOST_S,
    RETRY_UNKNOWN_S,
    Backlog,
    Estimator,
    Pace,
    Prompts,
    check_deadline,
)
from conflux_jax.scheduler.latency_model import Curve, LatencyModel, LatencyPredictor
from conflux_jax.scheduler.scheduler import Scheduler
from tests.scheduler.harness import Harness, make_request
from tests.scheduler.predictors import Clocked, Linear, shape_of

LINEAR = Linear(2e-3, 1e-4, 1e-8, 1e-7)
# Some cost of every part, and lanes, so that a long prompt's last block can be what it waits for.
FITTED = LatencyModel(
    identity={},
    groups=2,
    segments=4,
    linear=Curve((16, 64, 512), (1e-3, 2e-3, 9e-3)),
    head=Curve((4, 64), (1e-4, 3e-4)),
    handoff_s=2e-4,
    communication=Curve((16, 512), (1e-4, 1e-3)),
    work_s=2e-10,
    read_s=3e-9,
    chunk_s=1e-4,
    token_s=1e-6,
    decode_rows=Curve((1, 64), (1e-4, 5e-4)),
    context_s=1e-7,
    all_context_s=1e-8,
    padded_context_s=1e-9,
    k_d=0.4,
    k_p=0.7,
    lanes=12.0,
)


def estimator(
    predictor: LatencyPredictor | None = FITTED, groups: int = 2, most: int = 512
) -> Estimator:
    geometry = PoolGeometry(groups, 512, 16, 16 * groups)
    ladders = Ladders.make(32, -(-most // groups), 1.25, geometry.needs_handoff)
    return Estimator(Budget(geometry, ladders, most, predictor), Pace(), segments=4)


def backlog(lengths: list[int], decodes: Decodes, free_slots: int, rows_left: list[int]) -> Backlog:
    prompts = Prompts()
    for length in lengths:
        prompts = prompts.plus(0, length)
    return Backlog(prompts, len(lengths), free_slots, sorted(rows_left), decodes)


SITUATIONS = {
    "new": st.integers(1, 3000),
    "lengths": st.lists(st.integers(1, 3000), max_size=12),
    "loads": st.lists(st.integers(0, 16), min_size=2, max_size=2),
    "target_s": st.sampled_from((1e-3, 4e-3, 8e-3, math.inf)),
    "free_slots": st.integers(0, 6),
    "rows_left": st.lists(st.integers(1, 400), max_size=8),
    "model": st.sampled_from((LINEAR, FITTED)),
}


@settings(max_examples=80)
@given(shorter=st.integers(1, 4000), more=st.integers(1, 4000), **SITUATIONS)
def test_estimates_do_not_fall_when_a_prompt_or_the_queue_grows(
    shorter, more, new, lengths, loads, target_s, free_slots, rows_left, model
):
    subject = estimator(model)
    decodes = Decodes(loads, [100 * load for load in loads], 100, target_s)
    now = backlog(lengths, decodes, free_slots, rows_left)
    estimate, longer = subject.estimate(shorter, now), subject.estimate(shorter + more, now)
    later = backlog([*lengths, new], decodes, free_slots, rows_left)
    behind = subject.estimate(shorter, later)
    assert estimate and longer and behind
    slack = 1 + 1e-12
    assert 0.0 < estimate.alone_s <= longer.alone_s * slack
    assert estimate.ttft_s <= longer.ttft_s * slack
    assert estimate.ttft_s <= behind.ttft_s * slack
    assert estimate.queued_s == longer.queued_s <= behind.queued_s * slack
    assert estimate.queued_s <= estimate.ttft_s * slack
    assert estimate.alone_s == behind.alone_s


@pytest.mark.parametrize(
    ("tokens", "error"),
    [(1, 1e-9), (16, 1e-9), (128, 1e-9), (512, 1e-9), (300, 0.15), (3000, 0.15)],
)
def test_an_idle_engine_takes_what_was_estimated(tokens: int, error: float):
    """Exactly, where the budget runs the prompt in one iteration; where it cuts it in other pieces
    than full iterations, nearly."""
    harness = Clocked(
        LINEAR, lambda plan: LINEAR.predict_s(shape_of(plan)), 2, max_num_batched_tokens=512
    )
    estimate = harness.scheduler.estimate(tokens)
    assert estimate is not None and estimate.queued_s == 0.0
    assert estimate.alone_s == estimate.ttft_s
    harness.add("r", tokens, 1)
    harness.drain()
    assert estimate.ttft_s == pytest.approx(sum(harness.took), rel=error)
    assert (len(harness.plans) == 1) == (error < 0.1)


@pytest.mark.parametrize("prompt", [700, 3000])
def test_a_queue_is_predicted_to_within_an_iteration_or_a_tenth(prompt: int):
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "ordering": "fcfs"}
    harness = Clocked(LINEAR, lambda plan: LINEAR.predict_s(shape_of(plan)), 2, **settings)
    for number in range(10):
        harness.add(f"r{number}", 200 + 150 * number, 1)
    estimate = harness.scheduler.estimate(prompt)
    assert estimate is not None
    harness.add("last", prompt, 1)
    harness.drain()
    took_s = sum(harness.took)
    assert abs(estimate.ttft_s - took_s) <= max(max(harness.took), 0.1 * took_s)
    assert estimate.queued_s < estimate.ttft_s


def test_a_full_engine_is_waited_for():
    """4 slots, all in use for 100 iterations more: the next prompt starts after those."""
    harness = Clocked(
        LINEAR, lambda plan: LINEAR.predict_s(shape_of(plan)), 2, max_num_seqs=4, ordering="fcfs"
    )
    for number in range(4):
        harness.add(f"r{number}", 10, 100)
    harness.run(3)
    estimate, started_s = harness.scheduler.estimate(10), harness._now
    assert estimate is not None
    harness.add("next", 10, 1)
    while "next" not in harness.ends:
        harness.run(1)
    took_s = harness._now - started_s
    assert estimate.ttft_s == pytest.approx(took_s, rel=0.1)
    assert estimate.queued_s < 0.1 * took_s < estimate.ttft_s


def test_decodes_that_use_every_row_are_waited_for_at_their_own_pace():
    """All 16 rows of an iteration decode, and one that waits needs a slot: 50 more of those."""
    subject = estimator(LINEAR, groups=1, most=16)
    full = Decodes([16], [1600], 100)
    estimate = subject.estimate(10, backlog([], full, 0, [50] * 16))
    assert estimate is not None
    decoding_s = LINEAR.of(rows=16, pairs=0, context=1600)
    assert estimate.ttft_s == pytest.approx(50 * decoding_s + estimate.alone_s)


def test_without_a_model_the_pace_of_late_is_what_counts():
    harness = Harness(max_num_batched_tokens=32, num_pages=256)
    assert harness.scheduler.estimate(10) is None
    assert harness.scheduler.load().queued_s is None
    pace = Pace()
    for _ in range(3):
        pace.observe(0.5, 100)
    pace.observe(9.0, None)  # not full: nothing about the pace
    assert pace.tokens_s == pytest.approx(200.0)
    subject = Estimator(estimator(predictor=None)._budget, pace, segments=4)
    idle = Decodes((0, 0), (0, 0))
    estimate = subject.estimate(100, backlog([300], idle, 4, []))
    assert estimate is not None and estimate.measured
    times = (estimate.ttft_s, estimate.queued_s, estimate.alone_s)
    assert times == pytest.approx((2.0, 1.5, 0.0))


def test_estimating_changes_no_plan():
    def run(ask: bool) -> list:
        harness = Clocked(
            LINEAR, lambda plan: LINEAR.predict_s(shape_of(plan)), 2, max_num_batched_tokens=256
        )
        for number in range(12):
            harness.add(f"r{number}", 50 + 90 * number, 20, tbt_slo_s=0.02)
            harness.run(2)
            if ask:
                harness.scheduler.estimate(1000)
                harness.scheduler.load()
        harness.drain()
        return harness.plans

    assert run(ask=True) == run(ask=False)


# Deadlines


def clocked_scheduler(**more) -> Scheduler:
    return Clocked(LINEAR, lambda plan: 1.0, 2, **more).scheduler


def test_a_deadline_below_the_least_time_is_refused():
    scheduler = clocked_scheduler()
    estimate = scheduler.estimate(2000)
    assert estimate is not None
    assert scheduler.least_s(2000) == estimate.alone_s > 0.0
    request = replace(make_request("r", 2000), deadline_s=5.0)
    check_deadline(request, 5.0 - 1.01 * estimate.alone_s, scheduler.least_s)
    with pytest.raises(DeadlineUnmet, match=r"deadline: .* prompt of 2000 tokens takes at least"):
        check_deadline(request, 5.0 - 0.99 * estimate.alone_s, scheduler.least_s)
    with pytest.raises(DeadlineUnmet, match="deadline: passed"):
        check_deadline(request, 5.0, Harness().scheduler.least_s)  # without a model
    check_deadline(make_request("r", 2000), 1e9, scheduler.least_s)  # it has none


@pytest.mark.parametrize("slo_s", [None, 0.5, 50.0])
def test_a_client_that_stops_waiting_is_the_deadline_of_the_first_token(slo_s: float | None):
    """The sooner of the two orders the queue: before 7 s, or after it."""
    scheduler = clocked_scheduler(max_num_seqs=1)
    request = make_request("r", 10, arrival_s=1.0, ttft_slo_s=slo_s)
    scheduler.add(replace(request, deadline_s=5.0))
    other = make_request("other", 10, arrival_s=1.0)
    scheduler.add(replace(other, deadline_s=4.0))
    plan = scheduler.schedule(1.0)
    assert plan is not None
    first = "r" if slo_s == 0.5 else "other"
    assert [chunk.request_id for chunk in plan.chunks] == [first]


# Refusals say when to come again


def test_a_full_queue_names_a_delay_that_grows_with_it():
    def refused(prompt: int, **more) -> float:
        harness = Clocked(LINEAR, lambda plan: 1.0, 2, max_waiting=3, **more)
        for number in range(3):
            harness.add(f"r{number}", prompt, 4)
        with pytest.raises(QueueFull) as caught:
            harness.add("more", 10, 4)
        return caught.value.retry_after_s

    delays = [refused(prompt) for prompt in (10, 2000, 4000)]
    assert RETRY_LEAST_S == delays[0] < delays[1] < delays[2] < RETRY_MOST_S


def test_without_a_pace_the_delay_is_a_guess():
    harness = Harness(max_waiting=1)
    harness.add("r", 4)
    with pytest.raises(QueueFull) as caught:
        harness.add("s", 4)
    assert caught.value.retry_after_s == RETRY_UNKNOWN_S


def test_the_defaults_of_a_config_estimate():
    """The largest ladders there are by default; an estimate is there at once."""
    config = SchedulerConfig()
    geometry = PoolGeometry(1, 4096, 16, 16)
    ladders = Ladders.make(config.max_num_seqs, config.max_num_batched_tokens, 1.125, False)
    scheduler = Scheduler(config, geometry, ladders, 32_768, FITTED)
    estimate = scheduler.estimate(30_000)
    assert estimate is not None and estimate.ttft_s == estimate.alone_s > 0.1
