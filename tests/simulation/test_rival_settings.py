"""Rivals built for a real model on modelled H100s: settings, memory, the search over them."""

from __future__ import annotations

from typing import Any

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import QWEN3_14B, QWEN3_32B
from conflux_jax.simulation.costs import UniformTPCosts
from conflux_jax.simulation.hardware import preset
from conflux_jax.simulation.rival_costs import ElasticCosts, MultiplexedCosts, RivalOperators
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.systems.rivals import BUILDERS, kv_tokens
from conflux_jax.simulation.systems.search import candidates, search
from conflux_jax.simulation.work import Work
from tests.simulation.rivals import request

H100 = preset("h100")
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {},
    "chunked-oracle": {"tp": 2},
    "loongserve": {"tp": 1, "degrees": [1, 3]},
    "muxwise": {"seed": 7},
    "disaggregated": {"prefill_gpus": 2, "prefill_sp": 2},
}


@pytest.mark.parametrize("settings", [None, SETTINGS])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_rival_serves_a_known_model(name: str, settings: dict[str, dict[str, Any]] | None):
    """By itself and with settings: as `simulate` runs it, which checks all tokens."""
    system = BUILDERS[name](QWEN3_14B, H100, 4, settings and settings[name], "srpf")
    requests = [request(n, 0.3 * n, 500 * (n % 5) + 100, 20, 0.1) for n in range(20)]
    results = simulate(system, requests)
    assert results.attainment == 1.0
    assert results.statistics is not None
    assert 0 < results.statistics.kv_peak < 0.1
    assert 0 < results.statistics.busy_s < results.end_s


def test_every_candidate_can_be_built():
    """And each rival has several; a model of 64 GB of weights has no groups of one GPU."""
    for name in SETTINGS:
        for spec, gpus in ((QWEN3_14B, 4), (QWEN3_32B, 8)):
            options = candidates(name, spec, H100, gpus)
            assert len(options) == len({repr(option) for option in options}) > 1
            for option in options:
                BUILDERS[name](spec, H100, gpus, option, None)
                tps = {value for key, value in option.items() if key.endswith("tp")}
                assert spec is QWEN3_14B or 1 not in tps
    splits = {s["prefill_gpus"] for s in candidates("disaggregated", QWEN3_14B, H100, 4)}
    assert splits == {1, 2, 3}
    assert candidates("loongserve", QWEN3_14B, H100, 1) == []


def test_search_takes_the_first_of_the_best():
    scores = {1: (0.5, 0.0), 2: (0.9, 1.0), 3: (0.9, 2.0), 4: (0.9, 2.0)}
    found = search([{"tp": tp} for tp in scores], lambda settings: scores[settings["tp"]])
    assert (found.settings, found.score) == ({"tp": 3}, (0.9, 2.0))
    assert [score for _, score in found.tried] == list(scores.values())
    with pytest.raises(ValueError, match="candidates: none"):
        search([], lambda settings: (0.0,))


def test_kv_memory_is_what_weights_leave():
    """72 GB less 2 bytes for each of 14.77e9 weights, at 40 * 2 * 8 * 128 * 2 bytes a token."""
    weights = 40 * 5120 * (2 * 5120 + 2 * 1024 + 3 * 17_408) + 2 * 151_936 * 5120
    assert kv_tokens(QWEN3_14B, H100, 1) == (72_000_000_000 - 2 * weights) // 163_840
    with pytest.raises(ConfigError, match="tp: 1 GPUs have no memory"):
        kv_tokens(QWEN3_32B, preset("a100").scaled("small", source="", memory_bytes=64e9), 1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chunked", {"budgets": "many"}, "budgets: chunked has only budget, tp"),
        ("chunked", {"tp": 3}, "tp: 4 GPUs cannot be groups of 3"),
        ("chunked", {"budget": 0}, "budget: must be an integer above 0, got 0"),
        ("chunked", {"budget": 1.5}, "budget: must be an integer above 0, got 1.5"),
        ("chunked", {"noise": -1}, "noise: must be a number, 0 or above, got -1"),
        ("loongserve", {"degrees": "1,2"}, "degrees: must be a list of integers, got '1,2'"),
        ("loongserve", {"tp": 1, "degrees": [2, 1]}, r"degrees: \(2, 1\) must rise"),
        ("muxwise", {"target_fraction": "half"}, "target_fraction: must be a number"),
        ("loongserve", {"tp": 4}, "degrees: with"),
        ("disaggregated", {"tp": 2}, "tp: disaggregated has only batch_tokens, decode_tp"),
        ("disaggregated", {"prefill_gpus": 4}, "prefill_gpus: from 1 to 3"),
        ("disaggregated", {"prefill_gpus": 2, "prefill_sp": 3}, "tp: 2 GPUs cannot"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        BUILDERS[name](QWEN3_14B, H100, 4, settings, None)


def test_all_systems_price_the_same_operators():
    """With one group and nothing beside it, every rival's iteration is the chunked one's."""
    operators, uniform = RivalOperators(QWEN3_14B, H100), UniformTPCosts(QWEN3_14B, H100, 2)
    elastic, multiplexed = ElasticCosts(operators, 2), MultiplexedCosts(operators, 2)
    chunks = ((0, 3000), (0, 1000))
    work = Work(rows=4000, decodes=(0,), contexts=(0,), chunks=chunks, shares=(4000,), samples=2)
    assert elastic.prefill_s(chunks, 1) == pytest.approx(uniform.stages(work).total)
    assert multiplexed.prefill_s(chunks, 0, beside=False) == pytest.approx(
        uniform.stages(work).total
    )
    work = Work(rows=32, decodes=(32,), contexts=(32 * 8192,), samples=32)
    expected_s = uniform.stages(work).total
    assert elastic.decode_s(32, 32 * 8192, 1) == pytest.approx(expected_s)
    assert multiplexed.decode_s(32, 32 * 8192, H100.sms) == pytest.approx(expected_s)


def test_memory_alone_is_less_than_all_and_more_than_the_weights():
    """Reading 26.4 GB of weights of the layers at the peak of 3.35 TB/s takes 7.9 ms; rows and what
    is between the products come on top."""
    operators = RivalOperators(QWEN3_14B, H100)
    weights_s = 40 * 330_301_440 * 2 / 3.35e12
    assert weights_s < operators.reading_s(1) < 1.5 * weights_s
    assert operators.reading_s(8192) < 0.5 * operators.linear_s(8192)


def test_masters_move_queries_and_partial_results():
    """8 rows on each of 4 groups: 32 rows of 40 heads gathered, and 129 float32 numbers of each
    head brought back, in every layer."""
    operators = RivalOperators(QWEN3_14B, H100)
    gathered = H100.all_gather_s(32 * 40 * 128 * 2, 4)
    back = H100.all_to_all_s(32 * 40 * 129 * 4, 4)
    assert operators.masters_s(8, 4) == pytest.approx(40 * (gathered + back))
