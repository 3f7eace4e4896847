"""Engines side by side, each with a part of the requests."""

from __future__ import annotations

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import QWEN3_14B
from conflux_jax.simulation.goodput import our_settings
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.systems.conflux import ConfluxSystem
from conflux_jax.simulation.systems.conflux_design import build, replica_gpus
from conflux_jax.simulation.systems.replicated import Replicated
from tests.simulation.blueprints import PlainCosts, blueprint, requests_of


def pair() -> Replicated:
    plan = blueprint(PlainCosts())
    return Replicated([ConfluxSystem(plan, noise=0.0) for _ in range(2)])


def test_a_request_goes_to_the_engine_that_is_less_busy():
    """The long one has the first engine; both short ones go to the other, the second of them though
    the first short one is there, since its KV is less. A decode of 10 tokens reads them, 1.001 s;
    the next iteration has 10 prompt tokens and a decode of 11: 1.1011 s."""
    results = simulate(pair(), requests_of((0.0, 100, 2), (0.1, 10, 3), (0.2, 10, 1)))
    expected = [1.64 + 1.36, 0.1 + 1.1, 0.1 + 1.1 + 1.001 + 1.1011]
    assert results.first_s.tolist() == pytest.approx(expected)


def test_each_engine_runs_as_if_it_were_alone():
    requests = requests_of((0.0, 100, 5), (0.0, 100, 5))
    together = simulate(pair(), requests)
    alone = simulate(ConfluxSystem(blueprint(PlainCosts()), noise=0.0), requests[:1])
    assert together.first_s.tolist() == [alone.first_s[0]] * 2
    assert together.last_s.tolist() == [alone.last_s[0]] * 2
    both, one = together.statistics, alone.statistics
    assert both is not None and one is not None
    assert both.iterations == 2 * one.iterations and both.busy_s == one.busy_s


def test_replicas_share_the_gpus_out():
    assert replica_gpus(4, {}) == 4 and replica_gpus(4, {"replicas": 2}) == 2
    for wrong in (3, 0, "two"):
        with pytest.raises(ConfigError, match="replicas: must divide 4 GPUs"):
            build(QWEN3_14B, load_hardware("h100"), 4, {"replicas": wrong})
    with pytest.raises(ValueError, match="at least one"):
        Replicated([])


@pytest.mark.parametrize(("gpus", "counts"), [(4, {1, 2, 4}), (2, {1, 2}), (1, {1})])
def test_goodput_tries_engines_of_two_groups_and_of_one(gpus, counts):
    tried = our_settings(QWEN3_14B, load_hardware("h100"), gpus)
    assert {settings.get("replicas", 1) for settings in tried} == counts
