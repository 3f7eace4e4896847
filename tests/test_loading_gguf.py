"""GGUF files: what is read, and what is refused with the file and field named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conflux_jax.models.loading import open_source
from conflux_jax.models.loading.gguf import GGUFSource
from conflux_jax.models.loading.gguf_file import GGUFFile
from conflux_jax.models.spec import ModelError, RopeScaling
from tests.tiny_gguf import default_weights, gguf_name, write_tiny_gguf


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_under_hugging_face_names(tmp_path: Path, tied: bool):
    source = open_source(write_tiny_gguf(tmp_path / "tiny.gguf", with_head=not tied))
    expected = default_weights(with_head=not tied)
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

    source = open_source(write_tiny_gguf(tmp_path / "types.gguf", quantise))
    for name, tensor in default_weights().items():
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

    assert open_source(write_tiny_gguf(tmp_path / "a.gguf", change)).spec.num_kv_heads == 2


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

    spec = open_source(write_tiny_gguf(tmp_path / "a.gguf", change)).spec
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

    path = write_tiny_gguf(tmp_path / "a.gguf", change)
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
        open_source(write_tiny_gguf(tmp_path / "a.gguf", change))


def test_damaged_gguf_files(tmp_path: Path):
    data = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
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


def test_our_header_reader_agrees_with_the_gguf_package(tmp_path: Path):
    path = write_tiny_gguf(
        tmp_path / "a.gguf", lambda fields, _: fields.update({"x.words": ["a", "ď"]})
    )
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
