"""Who is next: three orders, each with a bound on how often a request is overtaken."""

from __future__ import annotations

import itertools
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.scheduler.ordering import (
    BoundedBypass,
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    Ordering,
    ShortestRemainingFirst,
)
from conflux_jax.scheduler.state import RequestState
from tests.scheduler.harness import Harness, make_request

KINDS = (FirstComeFirstServed, ShortestRemainingFirst, EarliestDeadlineFirst)


def states(*lengths: int) -> list[RequestState]:
    return [RequestState(make_request(f"r{i}", length, 4), i) for i, length in enumerate(lengths)]


def filled(queue: Ordering, made: list[RequestState], deadlines=()) -> Ordering:
    for state, deadline_s in itertools.zip_longest(made, deadlines):
        if deadline_s is not None:
            state.deadline_s = deadline_s
        queue.add(state)
    return queue


def orders(queue: Ordering, now: float = 0.0, pace: float = 1.0) -> list[int]:
    return [state.order for state in queue.waiting(now, pace)]


def test_who_returns_takes_the_place_of_its_arrival():
    made = states(1, 2, 3, 4, 5)
    queue = filled(FirstComeFirstServed(), made)
    for state in (made[0], made[1], made[3]):
        queue.remove(state)
        state.num_preemptions, state.outputs = 1, [7]
    for state in (made[3], made[0], made[1]):
        queue.add(state)
    assert list(queue.waiting(0.0, 1.0)) == made
    assert len(queue) == 5 and queue.num_tokens == 15 + 3
    queue.remove(made[1])
    queue.remove(made[2])
    assert list(queue.waiting(0.0, 1.0)) == [made[0], made[3], made[4]]
    assert len(queue) == 3 and queue.num_tokens == 2 + 5 + 5


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_come_while_waiting_do_not_upset_the_count(kind):
    queue, (state,) = kind(), states(3)
    state.num_preemptions = 1
    queue.add(state)
    state.outputs.append(1)
    queue.remove(state)
    assert queue.num_tokens == 0 and len(queue) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_many_is_found_after_many_left(kind):
    made = states(*[1] * 2000)
    queue = BoundedBypass(kind(), 4)
    filled(queue, made)
    for state in made[:-2]:
        queue.look([])
        assert next(iter(queue.waiting(0.0, 1.0))) is state
        queue.admit(state)
    assert list(islice(queue.waiting(0.0, 1.0), 9)) == made[-2:]


def test_shortest_first_and_equals_by_arrival():
    assert orders(filled(ShortestRemainingFirst(), states(5, 2, 9, 2))) == [1, 3, 0, 2]


def test_deadlines_first_and_the_late_by_length():
    """At one token a second from now = 10: 4 tokens by 13 and 9 by 18 cannot be; 3 by 13 can, and 8
    by 20; one has no deadline. The late go last, shortest first."""
    deadlines = (13.0, 18.0, 13.0, 20.0)
    queue = filled(EarliestDeadlineFirst(), states(4, 9, 3, 8, 5), deadlines)
    assert orders(queue, now=10.0) == [2, 3, 4, 0, 1]
    assert orders(queue, now=10.0, pace=100.0) == [2, 3, 4, 0, 1]  # once late, late
    queue = filled(EarliestDeadlineFirst(), states(4, 9, 3, 8, 5), deadlines)
    assert orders(queue, now=10.0, pace=100.0) == [0, 2, 1, 3, 4]


def test_who_had_tokens_comes_back_first():
    made = states(3, 3, 3)
    made[2].num_preemptions = 1
    assert orders(filled(EarliestDeadlineFirst(), made, (5.0, 4.0, 0.1))) == [2, 1, 0]


def test_looking_at_a_few_changes_nothing_for_the_rest():
    queue = filled(EarliestDeadlineFirst(), states(9, 1, 9, 1), (2.0, 3.0, 4.0, 5.0))
    assert [s.order for s in islice(queue.waiting(0.0, 1.0), 1)] == [1]
    assert orders(queue) == [1, 3, 0, 2]


JOBS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 16)), min_size=1, max_size=6)


@given(JOBS)
def test_every_deadline_is_met_that_any_order_can_meet(jobs):
    """One machine, one token a second, all there at 0; each served to its end. All orders are
    tried."""

    def all_met(order) -> bool:
        ends = itertools.accumulate(jobs[i][0] for i in order)
        return all(end <= jobs[i][1] for end, i in zip(ends, order, strict=True))

    made = states(*(length for length, _ in jobs))
    queue = filled(EarliestDeadlineFirst(), made, [float(deadline) for _, deadline in jobs])
    now, served = 0.0, []
    while len(queue):
        state = next(iter(queue.waiting(now, 1.0)))
        queue.remove(state)
        served.append(state.order)
        now += state.length
    possible = any(all_met(order) for order in itertools.permutations(range(len(jobs))))
    assert all_met(served) == possible


@given(
    st.sampled_from(["fcfs", "shortest", "deadline"]),
    st.integers(0, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_nobody_is_overtaken_too_often(ordering, bound, lengths, each):
    """With memory for all: how many later arrivals were admitted before a request is at most the
    bound. `each` arrive at a turn, with hopeless and easy deadlines in turns."""
    harness = Harness(
        num_pages=4096, ordering=ordering, max_bypass=bound, max_num_batched_tokens=16
    )
    waiting = [(f"r{i}", length) for i, length in enumerate(lengths)]
    while waiting or harness.scheduler.has_work:
        for request_id, length in waiting[:each]:
            ttft_slo_s = 1e-3 if length % 2 else 10.0 / length
            harness.add(request_id, length, 1, ttft_slo_s=ttft_slo_s)
        del waiting[:each]
        harness.turn()
    admitted = [a.request.request_id for plan in harness.plans for a in plan.admissions]
    ranks = [int(request_id[1:]) for request_id in admitted]
    for at, rank in enumerate(ranks):
        assert sum(other > rank for other in ranks[:at]) <= bound


def test_the_bound_holds_for_who_has_begun():
    """A long prompt under a stream of short ones, shortest first: after two it goes on."""
    harness = Harness(num_pages=4096, ordering="shortest", max_bypass=2, max_num_batched_tokens=8)
    harness.add("long", 32, 1)
    harness.turn()
    for number in range(12):
        harness.add(f"s{number}", 8, 1)
    harness.run(16)
    served = [chunk.request_id for plan in harness.plans for chunk in plan.chunks]
    assert served[:3] == ["long", "s0", "s1"] and served[3:6] == ["long"] * 3
