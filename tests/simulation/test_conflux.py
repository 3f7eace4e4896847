"""Our system in a simulation: the real scheduler and loop on a virtual clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import Iteration, SimulatedRequest
from conflux_jax.simulation.systems.conflux import ConfluxSystem
from conflux_jax.simulation.work import Stages, Work
from tests.simulation.blueprints import PlainCosts, blueprint, requests_of


class Constant:
    """Satisfies CostModel: every iteration takes one second."""

    def stages(self, work: Work) -> Stages:
        return Stages(linear=1.0)


def traffic(count: int, seed: int, apart_s: float = 3.0) -> list[SimulatedRequest]:
    draw, now_s, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += draw.expovariate(1 / apart_s)
        rows.append((now_s, draw.randint(1, 200), draw.randint(1, 20)))
    return requests_of(*rows, deadline_s=1e6)


def test_one_request_alone_takes_the_sum_of_its_iterations():
    """100 tokens in iterations of at most 64: chunks of 64 and 36, 1.64 and 1.36 s, the first token
    after both. Then four more tokens, whose decodes read 100 to 103 tokens: 1.01 s and on."""
    system = ConfluxSystem(blueprint(PlainCosts()), noise=0.0)
    results = simulate(system, requests_of((5.0, 100, 5)))
    assert results.ttft_s[0] == pytest.approx(1.64 + 1.36)
    assert list(results.gaps_s) == pytest.approx([1.0 + 1e-4 * n for n in (100, 101, 102, 103)])
    assert results.last_s[0] == pytest.approx(5.0 + 3.0 + 4.0 + 1e-4 * 406)
    assert system.statistics().busy_s == pytest.approx(results.last_s[0] - 5.0)
    assert system.statistics().iterations == 6


def test_several_groups_hand_over_and_decode_right_after_the_last_chunk():
    """The same on three groups, 64 tokens being those of all; its KV goes along with the chunks."""
    system = ConfluxSystem(blueprint(PlainCosts(), groups=3, handoff_pages=8), noise=0.0)
    iterations: list[Iteration] = []
    system.observe(iterations.append)
    results = simulate(system, requests_of((0.0, 100, 3)))
    assert results.ttft_s[0] == pytest.approx(3.0)
    assert list(results.gaps_s) == pytest.approx([1.01, 1.0101])
    assert [len(i.work.decodes) for i in iterations] == [3] * 4
    assert [sum(i.work.shares) for i in iterations] == [64, 36, 0, 0]
    assert all(i.work.handoff_tokens == 8 * 16 for i in iterations[:2])


def test_an_arrival_meets_the_iteration_after_the_next():
    """One iteration ahead: while 0 runs (0 to 1), 1 is launched behind it; a request that comes at
    0.5 is seen when 0 ends, and so runs in 2, from 2 to 3."""
    system = ConfluxSystem(blueprint(Constant()), noise=0.0)
    results = simulate(system, requests_of((0.0, 10, 5), (0.5, 10, 1)))
    assert results.first_s.tolist() == [1.0, 3.0]


def test_an_idle_system_wakes_at_the_next_arrival():
    system = ConfluxSystem(blueprint(Constant()), noise=0.0)
    results = simulate(system, requests_of((0.0, 10, 1), (50.0, 10, 2)))
    assert results.first_s.tolist() == [1.0, 51.0]
    assert results.last_s.tolist() == [1.0, 52.0]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ordering", ["deadline", "fcfs", "shortest"])
def test_every_request_gets_its_tokens_also_where_memory_is_short(groups, ordering):
    """`simulate` checks that; 24 pages are too few for eight such requests."""
    plan = blueprint(PlainCosts(), groups, num_pages=24, max_model_len=256, ordering=ordering)
    requests = traffic(60, seed=groups)
    system = ConfluxSystem(plan)
    results = simulate(system, requests)
    asked = sum(request.output_tokens for request in requests)
    assert results.summary()["output_tokens"] == asked
    assert results.attainment == 1.0
    assert system.statistics().kv_peak > 0.8


def test_preempted_requests_come_back():
    """Eight short prompts with long outputs: 8 * (16 + 100) tokens in a pool of 32 * 16."""
    rows = [(0.0, 16, 100)] * 8
    system = ConfluxSystem(blueprint(Constant(), num_pages=32), noise=0.0)
    results = simulate(system, requests_of(*rows))
    assert system.statistics().preemptions > 0
    assert len(results.gaps_s) == 8 * 99


def test_same_seed_same_results_other_seed_others():
    requests = traffic(40, seed=9)
    plan = blueprint(PlainCosts(), groups=2)

    def run(seed: int):
        system, iterations = ConfluxSystem(plan, noise=0.05, seed=seed), list[Iteration]()
        system.observe(iterations.append)
        return simulate(system, requests), iterations

    (first, iterations), (same, again), (other, _) = run(1), run(1), run(2)
    assert iterations == again and len(iterations) > len(requests)
    assert first.gaps_s == same.gaps_s and (first.first_s == same.first_s).all()
    assert first.summary() == same.summary()
    assert first.gaps_s != other.gaps_s


def test_a_prompt_past_the_model_is_refused_with_the_limit():
    system = ConfluxSystem(blueprint(Constant(), max_model_len=256))
    results = simulate(system, requests_of((0.0, 300, 1), (0.0, 10, 1)))
    assert "max_model_len is 256" in results.refused[0]
    assert results.on_time.tolist() == [False, True]


def test_order_is_selectable():
    """A long prompt before a short one, both while another runs: shortest first overtakes."""
    rows = [(0.0, 64, 1), (0.1, 200, 1), (0.2, 10, 1)]

    def first_tokens(ordering: str) -> np.ndarray:
        system = ConfluxSystem(blueprint(Constant()), ordering, noise=0.0)
        return simulate(system, requests_of(*rows)).first_s

    fcfs, shortest = first_tokens("fcfs"), first_tokens("shortest")
    assert fcfs[1] <= fcfs[2]
    assert shortest[2] < shortest[1]
