"""Looking into the step: layer by layer, and without a trace."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from conflux_jax.config import Config
from conflux_jax.execution.inspection import Inspector, prompt_plans
from conflux_jax.execution.runner import Runner
from conflux_jax.models.loading import open_source
from tests.tiny import write_tiny_llama


def test_layers_are_seen_one_by_one_and_the_runner_stays_as_it_was(tmp_path):
    source = open_source(write_tiny_llama(tmp_path, layers=2))
    config = Config.from_flat(
        sp=2,
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=8,
        rows_ladder=(4,),
        max_prefill_segments=1,
        kv_pool_tokens=64,
        compilation_cache_dir="",
    )
    runner = Runner.create(source, config)
    look, prompt = Inspector(runner), [5, 6, 7, 8, 9, 5, 6, 7, 8, 9]  # two chunks
    before = jax.tree.map(np.asarray, runner.state)

    embedded = look.prompt_hidden(prompt, 0)
    embedding = np.asarray(source.read("model.embed_tokens.weight"))
    np.testing.assert_array_equal(embedded, embedding[prompt])

    first, last = look.prompt_hidden(prompt, 1), look.prompt_hidden(prompt)
    np.testing.assert_array_equal(last, look.prompt_hidden(prompt, 2))
    assert np.abs(first[0] - first[5]).max() > 1e-3, "equal tokens at other places"
    assert np.abs(last - first).max() > 0.1
    # A plan by itself: the first chunk sees nothing of the second.
    plan = next(prompt_plans(runner, prompt))
    np.testing.assert_allclose(look.hidden(plan).reshape(8, -1), last[:8], atol=1e-5)

    after = jax.tree.map(np.asarray, runner.state)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    with pytest.raises(ValueError, match="token_ids: must be 1 to 128 tokens, got 129"):
        next(prompt_plans(runner, [1] * 129))
