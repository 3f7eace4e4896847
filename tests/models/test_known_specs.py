"""The committed specs are the models: their published sizes, and what their config.json gives."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from conflux_jax.config import Config
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.loading.huggingface_config import read_spec
from conflux_jax.models.loading.tensors import expected_shapes

# As huggingface.co shows them beside each model (safetensors, parameters).
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
MESHES = {"llama-3.1-8b": (4, 1), "qwen3-14b": (4, 1), "qwen3-32b": (4, 2)}
# config.json as published, without the fields that say nothing about the arithmetic. Llama's has no
# head_dim; Qwen3's states a window that is not in use (case 18).
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS = {
    "llama-3.1-8b": LLAMA,
    "qwen3-14b": QWEN3
    | {
        "intermediate_size": 17408,
        "max_window_layers": 40,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
    },
    "qwen3-32b": QWEN3
    | {
        "intermediate_size": 25600,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
}
QWEN3_EOS = {"eos_token_id": [151645, 151643]}


@pytest.mark.parametrize("name", KNOWN_SPECS)
def test_the_number_of_parameters_is_the_published_one(name: str):
    shapes = expected_shapes(KNOWN_SPECS[name])
    assert sum(math.prod(shape) for shape in shapes.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", KNOWN_SPECS)
def test_the_published_config_gives_the_spec(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    if "qwen3" in name:
        (tmp_path / "generation_config.json").write_text(json.dumps(QWEN3_EOS))
    spec = dataclasses.replace(read_spec(tmp_path), name=KNOWN_SPECS[name].name)
    assert spec == KNOWN_SPECS[name]


@pytest.mark.parametrize("name", KNOWN_SPECS)
def test_the_papers_mesh_splits_the_heads_exactly(name: str):
    sp, tp = MESHES[name]
    spec = KNOWN_SPECS[name]
    layout = HeadLayout.make(spec, sp, tp)
    assert sorted(layout.kv_source) == list(range(spec.num_kv_heads))
    assert sorted(layout.q_source) == list(range(spec.num_heads))


@pytest.mark.parametrize("name", KNOWN_SPECS)
def test_each_has_settings_of_its_own(name: str):
    config = Config.from_yaml(Path("configs") / f"{name}.yaml")
    sp, tp = MESHES[name]
    assert (config.mesh.sp, config.mesh.tp) == (sp, tp)
    assert config.model.dtype == "bfloat16"
    rows = config.scheduler.rows_ladder
    assert rows is not None and rows[-1] * sp == config.scheduler.max_num_batched_tokens
    longest = config.model.max_model_len or KNOWN_SPECS[name].max_position_embeddings
    assert longest <= KNOWN_SPECS[name].max_position_embeddings
