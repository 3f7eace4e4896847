"""What an onlooker sees of the scheduler: all of it true, and nothing changed by looking."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conflux_jax.plan import Bucket, IterationPlan
from conflux_jax.scheduler.latency_model import Curve, LatencyModel
from conflux_jax.scheduler.snapshot import Snapshot
from tests.scheduler.harness import Harness
from tests.scheduler.predictors import Clocked

MODEL = LatencyModel(
    identity={},
    groups=1,
    segments=4,
    linear=Curve((8, 64), (0.01, 0.03)),
    head=Curve((1, 64), (0.001, 0.004)),
    handoff_s=0.002,
    communication=Curve((8, 64), (0.003, 0.005)),
    work_s=1e-8,
    read_s=0.0,
    chunk_s=1e-4,
    token_s=1e-6,
    decode_rows=Curve((1, 16), (0.001, 0.002)),
    context_s=1e-6,
    all_context_s=0.0,
    padded_context_s=0.0,
)


def check_books(harness: Harness, seen: Snapshot) -> None:
    free = harness.scheduler.load().free_pages
    pools = [harness.geometry.pool_of(group) for group in range(harness.geometry.groups)]
    for group, pool in enumerate(pools):
        used = seen.used[pool]
        assert len(used) - used.sum() == free[group]
        prefill = np.concatenate([np.zeros(0, np.int32), *(pages[pool] for pages in seen.prefill)])
        assert len(set(prefill)) == len(prefill) and used[prefill].all()


@pytest.mark.parametrize("settings", [{}, {"groups": 3}, {"groups": 2, "shared": True}])
def test_every_request_and_page_is_there_at_every_turn(settings):
    harness = Harness(max_num_seqs=3, **settings)
    for number in range(7):
        harness.add(f"r{number}", 5 + 9 * number, 3 + number)
    phases = set()
    prefill_seen = False
    while harness.scheduler.has_work:
        seen = harness.scheduler.snapshot(100)
        check_books(harness, seen)
        views = [*seen.running, *seen.waiting]
        live = {r for r in harness.requests if r not in harness.ends}
        assert {view.request_id for view in views} == live and len(views) == len(live)
        assert (seen.num_running, seen.num_waiting) == (len(seen.running), len(seen.waiting))
        assert {view.phase for view in seen.waiting} <= {"waiting"}
        for view in views:
            request = harness.requests[view.request_id]
            assert view.prompt_tokens == len(request.prompt_token_ids)
            assert view.output_tokens == len(harness.tokens[view.request_id])
            if view.phase == "waiting":
                assert view.prefill_left == view.prompt_tokens and view.group == -1
            elif view.phase == "prefilling":
                assert 0 < view.prefill_left <= view.prompt_tokens
            else:
                assert view.prefill_left == 0
        phases |= {view.phase for view in views}
        prefill_seen |= bool(seen.prefill)
        harness.turn()
    assert phases >= {"waiting", "prefilling", "decoding"} and prefill_seen
    harness.drain()
    assert not harness.scheduler.snapshot(100).used.any()


def test_only_so_many_are_shown_the_oldest_and_those_due_first():
    harness = Harness(max_num_seqs=3, ttft_slo_s=100.0)
    for number, slo in enumerate((9.0, 9.0, 9.0, 5.0, None, 7.0, 3.0)):
        harness.add(f"r{number}", 40, 30, ttft_slo_s=slo)
        harness.run(2 if number < 3 else 0)
    harness.run(3)
    seen = harness.scheduler.snapshot(2)
    assert [view.request_id for view in seen.running] == ["r0", "r1"]
    assert [view.request_id for view in seen.waiting] == ["r6", "r3"]
    assert (seen.num_running, seen.num_waiting) == (3, 4)
    due = {view.request_id: view.deadline_s for view in harness.scheduler.snapshot(9).waiting}
    asked = harness.requests["r6"]
    assert due["r6"] == asked.arrival_s + 3.0 and due["r4"] == asked.arrival_s + 100.0
    none = Harness()
    none.add("a", 4)
    assert none.scheduler.snapshot(9).waiting[0].deadline_s == math.inf


@pytest.mark.parametrize("ordering", ["deadline", "shortest"])
def test_plans_do_not_depend_on_who_looks(ordering):
    """Deadlines that pass while the requests wait: the queue sorts them out as it is asked."""

    def plans(looks: bool) -> list[IterationPlan]:
        harness = Harness(groups=2, max_num_seqs=2, ordering=ordering, num_pages=24)
        for number in range(9):
            slo = (0.02, 0.09, 0.4)[number % 3]
            harness.add(f"r{number}", 12 + 7 * (number * 5 % 6), 5, ttft_slo_s=slo)
        while harness.scheduler.has_work:
            if looks:
                harness.scheduler.snapshot(4)
                harness.scheduler.load()
            harness.turn()
        return harness.plans

    assert plans(looks=True) == plans(looks=False)


def test_a_plan_says_its_level_and_the_room_below_it():
    """40 batched tokens on two groups: 20 rows each. Three decodes leave 37."""
    harness = Harness(groups=2, max_num_batched_tokens=40, max_num_seqs=8, num_pages=200)
    for number in range(3):
        harness.add(f"r{number}", 4, 90)
    harness.run(8)
    harness.add("long", 500, 9)
    harness.turn()
    plan = harness.plans[-1]
    assert sum(map(len, plan.decodes)) == 3
    assert (plan.level, plan.prefill_room, sum(plan.prefill_shares)) == (20, 37, 37)


def test_the_latency_model_divides_a_plan_that_is_under_way():
    clocked = Clocked(MODEL, lambda plan: 0.05, groups=1)
    clocked.add("a", 30, 4)
    scheduler = clocked.scheduler
    plan = scheduler.schedule(0.0)
    assert plan is not None
    parts = scheduler.modelled(plan)
    assert parts is not None
    margin = scheduler._budget.corrections[True].margin
    assert plan.predicted_s == pytest.approx(parts.total * margin)
    assert parts.communication == MODEL.communication.at(plan.bucket.rows)
    assert parts.decode == 0.0 < parts.linear
    other = IterationPlan(99, Bucket(8, 0, True, False), ())
    assert scheduler.modelled(other) is None
    plain = Harness()
    plain.add("a", 4)
    plan = plain.scheduler.schedule(0.0)
    assert plan is not None and plain.scheduler.modelled(plan) is None
