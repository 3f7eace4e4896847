"""How a simulated engine is laid out: the same sizes that the real one would have."""

from __future__ import annotations

import pytest

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import LLAMA_3_1_8B, QWEN3_14B, QWEN3_32B
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import Iteration, Observable
from conflux_jax.simulation.systems import SYSTEMS
from conflux_jax.simulation.systems.conflux_design import (
    MAX_MODEL_LEN,
    TOKENS_PER_GROUP,
    default_config,
    design,
    sizes,
)
from tests.simulation.blueprints import requests_of

H100 = load_hardware("h100")


def test_memory_beside_the_weights_is_kv():
    """Qwen3-14B: 40 layers of 5120 * (2 * 5120 + 2 * 1024 + 3 * 17408) weights, twice 151,936 *
    5120 for embedding and head, two bytes each. A token's KV has 40 * 2 * 1024 * 2 bytes; prefill
    pages have a quarter of the heads and four times the tokens."""
    config = default_config(gpus=4, tp=1, settings={})
    limits, ladders = sizes(QWEN3_14B, config, 80e9)
    weights = 40 * 5120 * (2 * 5120 + 2 * 1024 + 3 * 17_408) + 2 * 151_936 * 5120
    tokens = (72e9 - 2 * weights) / (40 * 2 * 1024 * 2)
    geometry = limits.geometry
    assert geometry.groups == 4 and geometry.prefill_page_tokens == 4 * geometry.page_tokens
    assert 0 <= tokens - geometry.num_pages * geometry.page_tokens < geometry.page_tokens
    assert ladders.rows[-1] == TOKENS_PER_GROUP and ladders.handoff
    assert limits.max_model_len == MAX_MODEL_LEN
    assert limits.handoff_pages * geometry.page_tokens == 4 * TOKENS_PER_GROUP


def test_tensor_parallel_groups_share_weights_and_heads():
    """Qwen3-32B on eight GPUs: 64 layers of 5120 * (2 * 8192 + 2 * 1024 + 3 * 25600) weights; half
    of them and half of the KV heads on each."""
    config = default_config(gpus=8, tp=2, settings={})
    limits, _ = sizes(QWEN3_32B, config, 80e9)
    weights = 64 * 5120 * (2 * 8192 + 2 * 1024 + 3 * 25_600) + 2 * 151_936 * 5120
    tokens = (72e9 - weights) / (64 * 2 * 512 * 2)
    geometry = limits.geometry
    assert geometry.groups == 4
    assert 0 <= tokens - geometry.num_pages * geometry.page_tokens < geometry.page_tokens


@pytest.mark.parametrize(
    ("gpus", "tp", "settings", "problem"),
    [
        (3, 2, {}, "gpus: must be sp"),
        (4, 1, {"sp": 2}, "which is 2 \\* 1, got 4"),
        (4, 1, {"no_such": 1}, "no_such: no such setting"),
        (4, 1, {"handoff_pages": 0}, "handoff_pages: must be at least 1"),
    ],
)
def test_what_cannot_be_laid_out_is_told(gpus, tp, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        default_config(gpus, tp, settings)


def test_weights_that_do_not_fit_are_told():
    config = default_config(gpus=1, tp=1, settings={})
    with pytest.raises(ConfigError, match="no memory for Qwen3-32B"):
        sizes(QWEN3_32B, config, 40e9)


def test_settings_change_the_engine():
    blueprint = design(
        LLAMA_3_1_8B,
        H100,
        gpus=2,
        settings={"max_num_batched_tokens": 512, "max_num_seqs": 16, "bucket_growth": 4.0},
    )
    assert blueprint.limits.geometry.groups == 2
    assert blueprint.ladders.rows[-1] == 256 and blueprint.ladders.max_decodes == 16


def test_one_request_alone_has_the_time_that_its_iterations_cost():
    """Prompt of 4,000 tokens on four idle GPUs, in one iteration of 1,000 rows each; the ladder's
    next rung is what runs."""
    system = SYSTEMS["conflux"](
        LLAMA_3_1_8B, H100, 4, {"noise": 0.0, "bucket_growth": 2.0, "max_num_seqs": 16}, "srpf"
    )
    iterations: list[Iteration] = []
    assert isinstance(system, Observable)
    system.observe(iterations.append)
    results = simulate(system, requests_of((0.0, 4000, 3)))
    assert [sum(i.work.shares) for i in iterations] == [4000, 0, 0]
    assert iterations[0].work.rows >= 1000
    assert results.last_s[0] == pytest.approx(sum(i.stages.total for i in iterations))
    assert results.ttft_s[0] == pytest.approx(iterations[0].stages.total)
