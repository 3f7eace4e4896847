"""The simulator: its clock, its books, its rules, and a queue whose mean wait is known."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from conflux_jax.simulation.simulator import LOOK_EVERY, SimulationError, simulate
from conflux_jax.simulation.system import SimulatedRequest, Tokens
from tests.simulation.blueprints import Scripted, requests_of


class Server:
    """Satisfies `System`: one request at a time, `service_s` each, first come first served."""

    def __init__(self, service_s: float):
        self._service_s = service_s
        self._ends: deque[tuple[float, int]] = deque()
        self._free_s = 0.0

    def add(self, request: SimulatedRequest) -> None:
        self._free_s = max(self._free_s, request.arrival_s) + self._service_s
        self._ends.append((self._free_s, request.number))

    @property
    def next_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def step(self) -> Sequence[Tokens]:
        time_s, number = self._ends.popleft()
        return (Tokens(time_s, (number,)),)


def test_mean_wait_of_an_m_d_1_queue():
    """Pollaczek and Khinchine: at utilisation u, requests wait u * service / (2 * (1 - u)) on
    average: half a service time at u = 1/2. Batches of 500 requests are nearly independent, so
    their spread says how far the mean may be off: four standard errors, and those are small."""
    draw = random.Random(5)
    arrivals, now_s = [], 0.0
    for _ in range(20_000):
        now_s += draw.expovariate(0.5)
        arrivals.append((now_s, 1, 1))
    results = simulate(Server(1.0), requests_of(*arrivals))
    waits = results.ttft_s - 1.0
    batches = waits.reshape(40, 500).mean(axis=1)
    error = float(batches.std(ddof=1)) / math.sqrt(len(batches))
    assert error < 0.02
    assert abs(float(waits.mean()) - 0.5) < 4 * error


def test_times_gaps_and_who_is_on_time():
    """0: first token after 2 s, gaps 1 and 3. 1: after 4 s, one token. 2: after 5 s, a gap of 1."""
    requests = requests_of((0.0, 9, 3), (1.0, 9, 1), (1.0, 9, 2))
    targets = ((2.0, 3.0), (5.0, 1.0), (5.5, 2.0))
    requests = [
        SimulatedRequest(r.number, r.arrival_s, 9, r.output_tokens, *target)
        for r, target in zip(requests, targets, strict=True)
    ]
    given = ((2.0, (0,)), (3.0, (0,)), (5.0, (1,)), (6.0, (0, 2)), (7.0, (2,)))
    results = simulate(Scripted([Tokens(*tokens) for tokens in given]), requests)
    assert results.ttft_s.tolist() == [2.0, 4.0, 5.0]
    assert results.last_s.tolist() == [6.0, 5.0, 7.0]
    assert results.worst_gap_s.tolist() == [3.0, 0.0, 1.0]
    assert sorted(results.gaps_s) == [1.0, 1.0, 3.0]
    assert results.on_time.tolist() == [True, True, False]  # the last one's first token is late
    assert results.attainment == pytest.approx(2 / 3)
    summary = results.summary()
    assert summary["output_tokens"] == 6 and summary["duration_s"] == 7.0
    assert summary["rate_per_s"] == 2.0  # two intervals in one second
    assert summary["ttft_p50_s"] == 4.0


def test_a_gap_past_the_target_is_not_on_time():
    (request,) = requests_of((0.0, 4, 3), deadline_s=1.0, tbt_slo_s=1.0)
    at = [1.0, 2.0, 3.5]
    results = simulate(Scripted([Tokens(time_s, (0,)) for time_s in at]), [request])
    assert not results.on_time.any()
    at = [1.0, 2.0, 3.0]
    results = simulate(Scripted([Tokens(time_s, (0,)) for time_s in at]), [request])
    assert results.on_time.all()


def test_arrivals_come_before_what_is_due_at_the_same_time():
    system = Scripted([Tokens(1.0, (0,)), Tokens(2.0, (1,))])
    seen = []
    step = system.step

    def noting_step():
        seen.append(list(system.added))
        return step()

    system.step = noting_step
    simulate(system, requests_of((0.5, 1, 1), (1.0, 1, 1)))
    assert seen == [[0, 1], [0, 1]]


def test_no_arrivals():
    results = simulate(Scripted([]), [])
    assert results.attainment == 1.0 and len(results.gaps_s) == 0
    assert results.summary()["requests"] == 0
    assert "ttft_p50_s" not in results.summary()


def test_who_is_refused_is_not_on_time_and_gets_nothing():
    requests = requests_of((0.0, 5, 1), (0.0, 999, 1))
    results = simulate(Scripted([Tokens(1.0, (0,))], refuses=(1,)), requests)
    assert results.refused == {1: "prompt: 999 tokens are too many"}
    assert results.on_time.tolist() == [True, False]
    assert np.isnan(results.ttft_s[1])


@pytest.mark.parametrize(
    ("given", "due_s", "problem"),
    [
        ([Tokens(1.0, (0,))], None, "request 0 lacks 1 tokens of 2"),
        ([Tokens(t, (0,)) for t in (1.0, 2.0, 3.0)], None, "one too many"),
        ([Tokens(1.0, (0, 0)), Tokens(2.0, (0,))], None, "3 tokens came for 2"),
        ([Tokens(3.0, (0,)), Tokens(2.0, (0,))], [1.0, 1.5], "after later ones"),
        ([Tokens(1.0, (0,)), Tokens(2.0, (0,))], [1.5, 2.0], "1 s was given out at 1.5 s"),
        ([Tokens(2.0, (0,)), Tokens(2.0, (0,))], [2.0, 1.0], "due at 1 s, but it is 2 s"),
    ],
)
def test_a_system_that_breaks_the_rules_is_told(given, due_s, problem):
    with pytest.raises(SimulationError, match=problem):
        simulate(Scripted(given, due_s), requests_of((0.0, 1, 2)))


def test_requests_must_be_in_order():
    late, early = requests_of((1.0, 1, 1), (0.0, 1, 1))
    with pytest.raises(ValueError, match="order of arrival"):
        simulate(Scripted([]), [late, early])
    with pytest.raises(ValueError, match="numbered from 0"):
        simulate(Scripted([]), [early])


def test_it_gives_up_once_too_many_are_late():
    """All are late from the second on: their server takes twice as long as they are apart."""
    rows = [(float(number), 1, 1) for number in range(4 * LOOK_EVERY)]
    requests = [
        SimulatedRequest(number, *row, deadline_s=row[0] + 2.5) for number, row in enumerate(rows)
    ]
    moments = []
    results = simulate(Server(2.0), requests, moments.append, most_late=10)
    assert not results.complete and results.summary()["complete"] == 0
    assert moments[0].done == LOOK_EVERY  # it was one look
    assert len(moments) == 2
    whole = simulate(Server(2.0), requests)
    assert whole.complete and whole.on_time.tolist() == [True] + [False] * (len(rows) - 1)
