"""Case 16: every form of rotary settings gives transformers' frequencies, and the model that runs
with them its logits, past the context that they stretch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conflux_jax.models.layers import rope_inv_freq
from conflux_jax.models.loading import open_source
from conflux_jax.models.loading.huggingface_config import read_spec
from tests.forward import forward_logits
from tests.goldens.inputs import LONG_MODEL, LONG_PROMPT
from tests.tiny import write_tiny_llama

GOLDENS = Path(__file__).parent / "goldens"
CASES = json.loads((GOLDENS / "rope.json").read_text("utf-8"))
OTHER_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_frequencies_equal_transformers(tmp_path: Path, case: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(OTHER_FIELDS | case["config"]))
    inv_freq = rope_inv_freq(read_spec(tmp_path))
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, np.float32(case["inv_freq"]), rtol=2e-6)
    angles = np.float32(case["position"]) * inv_freq
    np.testing.assert_allclose(np.cos(angles), case["cos"], atol=3e-3)
    np.testing.assert_allclose(np.sin(angles), case["sin"], atol=3e-3)


def test_cases_reach_past_the_original_context():
    assert all(case["position"] == 9000 for case in CASES)
    assert len({tuple(case["inv_freq"]) for case in CASES}) >= 6


def test_logits_past_the_original_context_equal_transformers(tmp_path: Path):
    golden = json.loads((GOLDENS / "long_context.json").read_text("utf-8"))
    source = open_source(write_tiny_llama(tmp_path, **LONG_MODEL))
    logits = forward_logits(source, LONG_PROMPT, chunk=1024)
    expected = np.float32(golden["logits"])
    assert max(golden["positions"]) > 8192 and expected.std() > 0.3
    np.testing.assert_allclose(logits[golden["positions"]], expected, atol=1e-4)
