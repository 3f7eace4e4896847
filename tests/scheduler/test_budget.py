"""The level that an iteration is filled to, against an exhaustive search over the ladder."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.plan import PoolGeometry
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.budget import Budget, Chosen, Decodes
from conflux_jax.scheduler.latency_model import prefill_work
from conflux_jax.scheduler.waterfill import waterfill
from tests.scheduler.predictors import Linear

MOST = 1200


def budget(groups: int = 4, predictor: Linear | None = None) -> Budget:
    geometry = PoolGeometry(groups, 4096, 16, 16 * groups)
    level = -(-MOST // groups)
    ladders = Ladders.make(64, level, 1.5, handoff=geometry.needs_handoff)
    return Budget(geometry, ladders, MOST, predictor)


def test_room_is_what_levels_and_the_whole_leave():
    assert budget().room(300, (40, 10, 10, 0)) == 260 + 290 + 290 + 300
    assert budget().room(300, (400, 10, 10, 0)) == MOST - 420
    assert budget().room(16, (40, 10, 10, 0)) == 6 + 6 + 16
    assert budget().room(300, (400, 400, 400, 400)) == 0


def test_without_a_model_or_a_target_it_is_the_whole_level():
    prompts = [(0, 900), (5, 900)]
    decodes = Decodes((40, 10, 10, 0), (0, 0, 0, 0), 0, 0.001)
    assert budget().choose(decodes, prompts) == Chosen(300, 1140, [900, 240])
    free = decodes._replace(target_s=math.inf)
    made = budget(predictor=Linear(0.0, 1e-3, 1e-6))  # long prompts make small levels look better
    assert made.choose(free, prompts) == Chosen(300, 1140, [900, 240])


def test_a_worked_level():
    """1 ms a row: decodes of 40 rows beside a target of 110 ms leave levels up to the rung under
    110 / 1.12, the margin that a new correction has: 4 * rung - 60 tokens fit at it."""
    made = budget(predictor=Linear(per_row_s=1e-3))
    chosen = made.choose(Decodes((40, 10, 10, 0), (0, 0, 0, 0), 0, 0.110), [(0, 5000)])
    rungs = [rung for rung in made._ladders.rows if rung * 1.12 <= 110]
    assert chosen.level == max(rungs) and 40 < max(rungs) < 110
    assert chosen.lengths == [4 * max(rungs) - 60]
    assert chosen.predicted_s == pytest.approx(max(rungs) * 1.12e-3)


def test_without_decodes_something_runs_whatever_the_target():
    """1 ms, for which even the lowest rung of 16 rows a group is too long."""
    made = budget(predictor=Linear(per_row_s=1e-3))
    chosen = made.choose(Decodes((0,) * 4, (0,) * 4, 0, 0.001), [(0, 900)])
    assert chosen.lengths == [64]


LOADS = st.lists(st.integers(0, 64), min_size=4, max_size=4)
PROMPTS = st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 6000)), min_size=1, max_size=5)


@given(LOADS, PROMPTS, st.integers(1, 120), st.integers(0, 3), st.integers(0, 3))
def test_the_level_is_the_highest_feasible_rung(loads, prompts, target_ms, work, decode):
    """Of all rungs, tried one by one; no prefill where none is feasible; the lowest one with room
    where the decodes alone are too slow."""
    predictor = Linear(2e-4, 1e-3, work * 1e-9, decode * 1e-7)
    made = budget(predictor=predictor)
    contexts = tuple(load * 1000 for load in loads)
    decodes = Decodes(tuple(loads), contexts, 1000, target_ms * 1e-3)

    def lengths_at(level: int) -> list[int]:
        left, lengths = made.room(level, loads), []
        for _, wanted in prompts:
            lengths.append(min(left, wanted))
            left -= lengths[-1]
        return lengths

    def predicted(lengths: list[int]) -> float:
        shares = waterfill(loads, 300, sum(lengths)) if sum(lengths) else (0,) * 4
        bucket = made._ladders.fit(loads, shares, True)
        pairs = sum(prefill_work(p[0], n) for p, n in zip(prompts, lengths, strict=True))
        plain = predictor.of(bucket.rows, pairs, max(contexts))
        return plain * 1.12  # the margin of a fresh correction

    rungs = [rung for rung in (*made._ladders.rows, 300) if rung <= 300]
    feasible = [lengths_at(r) for r in rungs if predicted(lengths_at(r)) <= decodes.target_s]
    chosen = made.choose(decodes, prompts)
    if feasible:
        assert chosen.lengths == feasible[-1]
    elif not any(loads) or predicted([0] * len(prompts)) > decodes.target_s:
        roomy = [lengths_at(rung) for rung in rungs if sum(lengths_at(rung))]
        assert chosen.lengths == (roomy[0] if roomy else [0] * len(prompts))
    else:
        assert not any(chosen.lengths)


@given(PROMPTS, st.integers(0, 3))
def test_without_decodes_the_rung_of_most_tokens_a_second(prompts, work):
    predictor = Linear(5e-3, 1e-3, work * 1e-7)
    made = budget(predictor=predictor)
    chosen = made.choose(Decodes((0,) * 4, (0,) * 4, 0, math.inf), prompts)
    speeds = []
    for level in {rung for rung in (*made._ladders.rows, 300) if rung <= 300}:
        left, lengths = 4 * level, []
        for _, wanted in prompts:
            lengths.append(min(left, wanted))
            left -= lengths[-1]
        bucket = made._ladders.fit((0,) * 4, waterfill((0,) * 4, level, sum(lengths)), True)
        pairs = sum(prefill_work(p[0], n) for p, n in zip(prompts, lengths, strict=True))
        speeds.append(sum(lengths) / predictor.of(bucket.rows, pairs, 0))
    assert sum(chosen.lengths) / chosen.predicted_s * 1.12 == pytest.approx(max(speeds))
