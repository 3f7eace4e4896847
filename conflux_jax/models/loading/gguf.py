"""Weights of a GGUF file (architecture "llama") under Hugging Face names and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from conflux_jax.models.loading.gguf_file import GGUFFile, TensorInfo
from conflux_jax.models.loading.tensors import check_shapes, check_spec
from conflux_jax.models.spec import ModelError, ModelSpec, Part, RopeScaling

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FREQS = "rope_freqs.weight"
# Fields that change the arithmetic of a llama model; any value but this one is refused.
_NEUTRAL = {
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.attention.sliding_window": 0,
    "llama.attention.causal": True,
    "llama.attention.clamp_kqv": 0.0,
    "llama.attention.max_alibi_bias": 0.0,
    "llama.attention.scale": 0.0,
    "llama.embedding_scale": 1.0,
    "llama.residual_scale": 1.0,
    "llama.logit_scale": 1.0,
    "llama.use_parallel_residual": False,
}
_CHUNK_BLOCKS = 4096  # quantised blocks in one call: 128K values, which stay in the cache
# Tensors that are already what they should be; the rest is dequantised to float32.
_PLAIN_TYPES = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class GGUFSource:
    """A `WeightSource` over a memory-mapped file: nothing is read before `read`, and then one
    tensor, dequantised by the `gguf` package to float32 (float16 and bfloat16 stay).

    Raises ModelError, naming file and field, for whatever this engine would compute differently.
    """

    spec: ModelSpec

    def __init__(self, path: str | Path, name: str | None = None):
        self._file = GGUFFile(path)
        self._tensors = _renamed(self._file)
        self.spec = _read_spec(self._file, self._tensors, name or Path(path).stem)
        shapes = {hf: info.shape for hf, info in self._tensors.items()}
        self._shapes = check_shapes(self.spec, shapes, str(self._file.path))
        for hf_name, info in self._tensors.items():
            _check_extent(self._file, hf_name, info)

    def names(self) -> Iterable[str]:
        return self._shapes

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        """One tensor, or part of it. Query and key rows are put back into rotate-half order, before
        they are dequantised: rows are whole blocks, so moving them moves an eighth of the bytes.
        Of the parts of a matrix only rows save work; columns are cut out of dequantised rows."""
        if name not in self._shapes:
            raise self._file.fail(name, "no such tensor")
        info = self._tensors[name]
        rows = _raw_rows(self._file, info)
        if name.endswith("q_proj.weight"):
            rows = _rotate_half_rows(rows, self.spec.num_heads)
        elif name.endswith("k_proj.weight"):
            rows = _rotate_half_rows(rows, self.spec.num_kv_heads)
        if len(info.shape) == 1:
            return _dequantise(rows, info)[part]
        rows = rows[part[:1]]
        return _dequantise(rows, info).reshape(len(rows), *info.shape[1:])[:, *part[1:]]


def _renamed(file: GGUFFile) -> dict[str, TensorInfo]:
    tensors = {}
    for name, info in file.tensors.items():
        if name == _ROPE_FREQS:
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        if name in _NAMES:
            tensors[_NAMES[name]] = info
        elif name.startswith("blk.") and rest in _LAYER_NAMES:
            tensors[f"model.layers.{block}.{_LAYER_NAMES[rest]}"] = info
        else:
            raise file.fail(name, "the llama architecture here has no such tensor")
    return tensors


def _read_spec(file: GGUFFile, tensors: dict[str, TensorInfo], name: str) -> ModelSpec:
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise file.fail("general.architecture", f"only 'llama' is read, got {architecture!r}")
    for field, neutral in _NEUTRAL.items():
        if file.metadata.get(field, neutral) != neutral:
            raise file.fail(field, f"{file.metadata[field]!r} is not supported")
    if "model.embed_tokens.weight" not in tensors:
        raise file.fail("token_embd.weight", "this tensor is missing")
    hidden_size, num_heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = _head_dim(file, hidden_size, num_heads)
    theta = file.number("llama.rope.freq_base") or 10000.0
    epsilon_key = "llama.attention.layer_norm_rms_epsilon"
    spec = ModelSpec(
        name=name,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_size(file, "feed_forward_length"),
        num_layers=_size(file, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_size(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_required(file, epsilon_key, file.number(epsilon_key)),
        rope_theta=theta,
        max_position_embeddings=_size(file, "context_length"),
        tie_word_embeddings="lm_head.weight" not in tensors,
        rope_scaling=_rope_scaling(file, theta, head_dim),
        eos_token_ids=file.eos_token_ids(),
    )
    check_spec(spec, str(file.path))
    return spec


def _size(file: GGUFFile, field: str, default: int | None = None) -> int:
    """An integer field of the architecture; some writers repeat it for every layer."""
    key = "llama." + field
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
        if (value != value[0]).any():
            raise file.fail(key, "must be the same in every layer")
        return int(value[0])
    return _required(file, key, file.integer(key, default))


def _required[T](file: GGUFFile, key: str, value: T | None) -> T:
    if value is None:
        raise file.fail(key, "this field is missing")
    return value


def _head_dim(file: GGUFFile, hidden_size: int, num_heads: int) -> int:
    key = "llama.attention.key_length"
    head_dim = file.integer(key)
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise file.fail(key, f"is missing, and {hidden_size}/{num_heads} is no integer")
        head_dim = hidden_size // num_heads
    for other in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.integer(other, head_dim) != head_dim:
            raise file.fail(other, f"must equal the head size {head_dim}")
    return head_dim


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """Llama-3.1's scaling is stored as the divisors of the inverse frequencies that it gives.

    They do not say which settings made them. All published models use low 1, high 4 and 8,192
    original positions, so those are tried: with factor 8 and theta 500,000 they give 1 up to pair
    28, 1.07 to 4.6 from there to 34, then 8. Divisors they do not reproduce are refused.
    """
    kind = file.text("llama.rope.scaling.type", "none")
    factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 1.0))
    if kind not in ("none", "linear") or (kind == "linear" and factor not in (0.0, 1.0)):
        raise file.fail("llama.rope.scaling.type", f"{kind!r} (factor {factor}) is not supported")
    if kind == "none" and file.number("llama.rope.scale_linear", 1.0) not in (0.0, 1.0):
        raise file.fail("llama.rope.scale_linear", "linear scaling is not supported")
    info = file.tensors.get(_ROPE_FREQS)
    if info is None:
        return None
    _check_extent(file, _ROPE_FREQS, info)
    if info.shape != (head_dim // 2,) or info.ggml_type != gguf.GGMLQuantizationType.F32:
        raise file.fail(_ROPE_FREQS, f"must be {head_dim // 2} float32 values")
    divisors = _dequantise(_raw_rows(file, info), info).reshape(-1).astype(np.float64)
    if np.allclose(divisors, 1.0):
        return None
    scaling = RopeScaling(float(divisors.max()), 1.0, 4.0, 8192)
    if not np.allclose(divisors, _llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
        raise file.fail(_ROPE_FREQS, "these frequencies are not those of Llama 3.1's scaling")
    return scaling


def _llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return 1 / ((1 - kept) / scaling.factor + kept)


def _block(info: TensorInfo) -> tuple[int, int]:
    """(values, bytes) of one block of the tensor's type."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.ggml_type)]


def _num_bytes(info: TensorInfo) -> int:
    values, size = _block(info)
    return math.prod(info.shape) // values * size


def _check_extent(file: GGUFFile, name: str, info: TensorInfo) -> None:
    try:
        values, _ = _block(info)
    except (KeyError, ValueError) as error:
        raise file.fail(name, f"has the unknown type {info.ggml_type}") from error
    if not info.shape or info.shape[-1] % values:
        raise file.fail(name, f"shape {info.shape} is no whole number of blocks of {values}")
    end = info.offset + _num_bytes(info)
    if end > len(file.data):
        raise ModelError(
            f"{file.path}: is truncated: {name} ends at byte {end:,} of {len(file.data):,}"
        )


def _raw_rows(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes, uint8 `[rows, bytes of a row]`, still on disk."""
    raw = file.data[info.offset : info.offset + _num_bytes(info)]
    return np.asarray(raw).reshape(math.prod(info.shape[:-1]), -1)


def _rotate_half_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's llama files interleave the halves of each head: of 4 rows they hold 0, 2, 1, 3."""
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def _dequantise(rows: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Flat values. Called on pieces of 4,096 blocks because `gguf.dequantize` works on 16 rows at
    a time, which for narrow rows is mostly overhead: 1.6 s instead of 0.6 s for SmolLM2."""
    kind = gguf.GGMLQuantizationType(info.ggml_type)
    if kind in _PLAIN_TYPES:
        return np.ascontiguousarray(rows).view(_PLAIN_TYPES[kind]).reshape(-1)
    values, size = _block(info)
    blocks = rows.reshape(-1, size)
    out = np.empty((len(blocks), values), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        piece = blocks[start : start + _CHUNK_BLOCKS]
        try:
            done = gguf.dequantize(piece.reshape(1, -1), kind)
        except NotImplementedError as error:
            raise ModelError(f"GGUF type {kind.name} cannot be dequantised: {error}") from error
        out[start : start + _CHUNK_BLOCKS] = done.reshape(-1, values)
    return out.reshape(-1)
