"""`python -m conflux_jax.convert`: what it writes is the model, on any mesh, and a plain Orbax
checkpoint; what it cannot do is one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from conflux_jax import convert
from conflux_jax.execution.runner import make_mesh
from conflux_jax.models.decoder import DecoderDims, abstract_decoder
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.loading import open_source
from conflux_jax.models.loading.huggingface import HuggingFaceSource
from conflux_jax.models.loading.orbax import OrbaxSource
from conflux_jax.models.loading.placement import load_parameters
from conflux_jax.models.spec import ModelError, ModelSpec, Part, WeightSource
from conflux_jax.text import open_text
from tests.tiny import write_tiny_llama
from tests.tiny_gguf import default_weights, tokenizer_fields, write_tiny_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 9, "num_kv_heads": 3, "vocab_size": 289, "rope_scaling": LLAMA3},
    "qwen3": {"num_heads": 8, "qk_norm": True, "tied": True, "dtype": "bfloat16", "shards": 2},
}


def converted(model: Path, out: Path, *flags: str) -> Path:
    assert convert.main([str(model), str(out), *flags]) == 0
    return out


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A Hugging Face directory and what was made of it."""
    directory = tmp_path_factory.mktemp(request.param)
    model = write_tiny_llama(directory / "model", **MODELS[request.param])
    return model, converted(model, directory / "orbax")


def placed(source: WeightSource, sp: int, tp: int) -> nnx.State:
    spec = source.spec
    dims = DecoderDims(spec, HeadLayout.make(spec, sp, tp), jnp.dtype("float32"))
    return load_parameters(source, dims, abstract_decoder(dims)[1], make_mesh(sp, tp))


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 1), (2, 2)])  # 3 KV heads on 2: padded
def test_parameters_are_those_of_the_direct_load(pair: tuple[Path, Path], sp: int, tp: int):
    direct, restored = (placed(open_source(path), sp, tp) for path in pair)
    assert jax.tree.structure(direct) == jax.tree.structure(restored)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(direct), strict=True):
        assert ours.sharding == theirs.sharding
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def test_spec_and_text_are_the_models(pair: tuple[Path, Path]):
    model, out = pair
    assert open_source(out).spec == open_source(model).spec
    ours, theirs = open_text(out), open_text(model)
    assert ours.encode("ď 🫠 x") == theirs.encode("ď 🫠 x")
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.vocab_size == theirs.vocab_size


def test_orbax_restores_what_was_written(pair: tuple[Path, Path]):
    """Anything that reads Orbax reads these weights, under their usual names."""
    from orbax.checkpoint.experimental import v1 as ocp

    source = open_source(pair[0])
    restored = ocp.load(str(pair[1] / "weights"))
    assert set(restored) == set(source.names())
    for name, tensor in restored.items():
        expected = source.read(name)
        assert tensor.dtype == expected.dtype
        np.testing.assert_array_equal(tensor, expected)


class Recorded:
    """Another source's tensors, and how many values each `read` fetched of which."""

    def __init__(self, source: WeightSource):
        self.spec, self._source = source.spec, source
        self.sizes: list[tuple[str, int]] = []

    def names(self):
        return self._source.names()

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        array = self._source.read(name, part)
        self.sizes.append((name, array.size))
        return array


@pytest.mark.parametrize("kind", ["huggingface", "orbax", "gguf"])
def test_each_rank_reads_its_share_once(tmp_path: Path, kind: str):
    """Over two ranks in two groups: half a matrix at a time, never again for the second group."""
    path = tmp_path / "a.gguf"
    path = write_tiny_gguf(path) if kind == "gguf" else write_tiny_llama(tmp_path / "model")
    source = open_source(converted(path, tmp_path / "out") if kind == "orbax" else path)
    recorded = Recorded(source)
    placed(recorded, 2, 2)
    for name, tensor in default_weights().items():
        sizes = [size for other, size in recorded.sizes if other == name]
        halves = [tensor.size // 2] * 2 if tensor.ndim == 2 else [tensor.size] * len(sizes)
        assert sizes == halves and sizes, name


def test_a_gguf_file_with_its_tokenizer(tmp_path: Path):
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fields = tokenizer_fields("llama-bpe", ("1 2", "h e")) | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
    }
    path = write_tiny_gguf(tmp_path / "tiny.gguf", lambda own, _: own.update(fields))
    out = converted(path, tmp_path / "new" / "out")
    assert open_source(out).spec == open_source(path).spec
    for name, tensor in default_weights().items():
        np.testing.assert_array_equal(open_source(out).read(name), tensor)
    ours, theirs = open_text(out), open_text(path)
    for text in ("", "12 he ď 🫠", "a<|im_end|>\n\n1"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "user", "content": "12"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert ours.eos_token_ids == theirs.eos_token_ids == (257,)


def test_weights_can_be_rounded(tmp_path: Path):
    out = converted(write_tiny_llama(tmp_path / "model"), tmp_path / "out", "--dtype", "bfloat16")
    for name, tensor in default_weights().items():
        read = open_source(out).read(name)
        assert read.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read, tensor.astype(ml_dtypes.bfloat16))


def test_generation_settings_are_kept(tmp_path: Path):
    model = write_tiny_llama(tmp_path / "model", eos_token_ids=(5, 6))
    generation = {"eos_token_id": [5, 6], "temperature": 0.6}
    (model / "generation_config.json").write_text(json.dumps(generation))
    out = converted(model, tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text()) == generation
    (model / "generation_config.json").unlink()
    again = converted(model, tmp_path / "again")
    assert json.loads((again / "generation_config.json").read_text()) == {"eos_token_id": [258]}


# What is refused


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert convert.main(arguments) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("error: ") and stderr.count("\n") == 1
    return stderr


def test_errors_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model, out = write_tiny_llama(tmp_path / "model"), tmp_path / "out"
    assert f"{model}: exists already" in failed(capsys, str(model), str(model))
    assert "is neither a known name nor a path" in failed(capsys, str(tmp_path / "x"), str(out))
    assert "config.json: no such file" in failed(capsys, str(tmp_path), str(out))
    read = HuggingFaceSource.read

    def read_until_the_end(self: HuggingFaceSource, name: str, part: Part = ()) -> np.ndarray:
        if name == "lm_head.weight":
            raise ModelError("lm_head.weight: the disk failed")
        return read(self, name, part)

    with monkeypatch.context() as patched:
        patched.setattr(HuggingFaceSource, "read", read_until_the_end)
        assert "the disk failed" in failed(capsys, str(model), str(out))
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json: no such file" in failed(capsys, str(model), str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_wrong_or_damaged_checkpoint_is_refused(tmp_path: Path):
    whole = converted(write_tiny_llama(tmp_path / "model", rope_scaling=LLAMA3), tmp_path / "out")
    content = json.loads((whole / "conflux_jax.json").read_text())

    def refused(problem: str, version: Any = 1, **changes: Any) -> None:
        spec = {k: v for k, v in (content["spec"] | changes).items() if v is not ...}
        (whole / "conflux_jax.json").write_text(json.dumps({"version": version, "spec": spec}))
        with pytest.raises(ModelError, match=problem) as caught:
            open_source(whole)
        assert str(whole) in str(caught.value)

    refused("version: only 1 is read, got 2; convert the model again", version=2)
    refused("spec.head_dim: is missing", head_dim=...)
    refused("spec.colour: is no field of a model", colour="red")
    refused("spec.head_dim: must be int, got '16'", head_dim="16")
    refused("spec.qk_norm: must be bool, got 1", qk_norm=1)
    refused("spec.eos_token_ids: must be a list of integers", eos_token_ids=[1.5])
    refused("spec.rope_scaling: must be an object", rope_scaling=[8])
    refused("spec.rope_scaling.factor: is missing", rope_scaling={"low_freq_factor": 1.0})
    refused("head_dim: rotary positions need pairs", head_dim=15)
    refused("model.layers.2.input_layernorm.weight: this tensor is missing", num_layers=3)
    refused(r"embed_tokens.weight: has shape \(288, 64\)", vocab_size=300)
    (whole / "conflux_jax.json").write_text(json.dumps(content))
    assert isinstance(open_source(whole), OrbaxSource)
    arrays = [path for path in (whole / "weights").rglob("d/*") if path.stat().st_size > 10_000]
    for path in arrays:
        path.unlink()
    with pytest.raises(ModelError, match="cannot be read") as caught:
        placed(open_source(whole), 1, 1)
    assert str(whole) in str(caught.value)
    shutil.rmtree(whole / "weights")
    with pytest.raises(ModelError, match=r"weights: .*this tensor is missing"):
        open_source(whole)


def test_every_field_of_a_spec_is_kept(tmp_path: Path):
    """None of a test model's values may be a default that a forgotten field would also give."""
    model = write_tiny_llama(tmp_path / "m", rope_scaling=LLAMA3, qk_norm=True, tied=True)
    spec = open_source(converted(model, tmp_path / "out")).spec
    for field in dataclasses.fields(ModelSpec):
        assert getattr(spec, field.name) != field.default, field.name
    assert spec == open_source(model).spec
