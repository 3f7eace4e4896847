"""The tiny model of `tests/tiny.py` as a GGUF file, as llama.cpp's converter would write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import byte_characters, tiny_weights

Change = Callable[[dict[str, Any], dict[str, Any]], object]
SIZES = (4, 2, 16, 64, 96, 2, 288)  # the defaults of write_tiny_llama
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def default_weights(**options: Any) -> dict[str, np.ndarray]:
    """What `write_tiny_llama` and `write_tiny_gguf` write with their defaults, float32."""
    return tiny_weights(*SIZES, **({"with_head": True, "qk_norm": False, "seed": 0} | options))


def write_tiny_gguf(path: Path, change: Change | None = None, **options: Any) -> Path:
    """`change(fields, tensors)` edits both before they are written: a field's value may be a bool,
    int, float, str or list, a tensor's an array or a pair (raw bytes, GGMLQuantizationType).
    `options` go to `default_weights`."""
    fields: dict[str, Any] = {
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 1024,
        "llama.vocab_size": 288,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.eos_token_id": 258,
    }
    tensors: dict[str, Any] = {
        gguf_name(name): _permuted(name, tensor)
        for name, tensor in default_weights(**options).items()
    }
    if change is not None:
        change(fields, tensors)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", "llama"))
    for key, value in fields.items():
        _ADDERS[type(value)](writer, key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ADDERS: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def tokenizer_fields(pre: str | None, merges: Sequence[str]) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, <s> and </s> (256, 257), the user's token <think>, then
    what the merges make, then one unused entry."""
    tokens = [*byte_characters(), "<s>", "</s>", "<think>"]
    types = [1] * 256 + [CONTROL, CONTROL, USER_DEFINED] + [1] * len(merges) + [UNUSED]
    tokens += [merge.replace(" ", "") for merge in merges] + ["[PAD]"]
    values = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": types,
        "merges": list(merges),
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    if pre is not None:
        values["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor, from Hugging Face's."""
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


def _permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """Rows of the two halves of each query and key head take turns."""
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    if not heads:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
