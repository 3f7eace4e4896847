"""Tiny random Llama checkpoints in the Hugging Face layout, written without torch.

They stand in for real models wherever a test needs weights but not meaning: any head counts, any
sharding of the files, with a byte-level tokenizer so that text goes in and comes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import load_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
EOS_TOKEN_ID = 258
TOKENIZER_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_tiny_llama(
    directory: str | Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    layers: int = 2,
    vocab_size: int = 288,
    tied: bool = False,
    store_tied_head: bool = False,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int = 1024,
    qk_norm: bool = False,
    eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,),
    tokenizer: bool = True,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json, generation_config.json, safetensors (with an index when `shards` > 1)
    and, by default, a tokenizer whose id `b` is the byte `b`; returns `directory` as a Path.

    `config` overrides keys of config.json last; a value of `...` removes the key.
    `store_tied_head` writes a copy of the embedding as lm_head.weight, as some checkpoints do.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": dtype,
    } | dict(config or {})
    settings = {key: value for key, value in settings.items() if value is not ...}
    _write_json(directory / "config.json", settings)
    _write_json(directory / "generation_config.json", {"eos_token_id": list(eos_token_ids)})
    tensors = tiny_weights(
        num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, layers, vocab_size,
        with_head=not tied, qk_norm=qk_norm, seed=seed,
    )  # fmt: skip
    if tied and store_tied_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    cast = {name: np.ascontiguousarray(x.astype(_DTYPES[dtype])) for name, x in tensors.items()}
    _write_weights(directory, cast, shards)
    if tokenizer:
        write_byte_tokenizer(directory)
    return directory


def tiny_weights(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    vocab_size: int,
    *,
    with_head: bool,
    qk_norm: bool,
    seed: int,
) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 tensor.

    Linear weights have standard deviation gain/sqrt(in), so each sublayer adds about as much as the
    stream holds; embeddings are small, so that a tied head does not just repeat the last token;
    queries and keys have gain 1.5, so that attention is neither flat nor one-hot and the output
    depends on every position.
    """
    rng = np.random.default_rng(seed)

    def linear(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.normal(0, gain / columns**0.5, (rows, columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.7, 1.3, size).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": 0.25 * linear(vocab_size, hidden_size, hidden_size**0.5)
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(hidden_size),
            prefix + "self_attn.q_proj.weight": linear(num_heads * head_dim, hidden_size, 1.5),
            prefix + "self_attn.k_proj.weight": linear(num_kv_heads * head_dim, hidden_size, 1.5),
            prefix + "self_attn.v_proj.weight": linear(num_kv_heads * head_dim, hidden_size, 1.5),
            prefix + "self_attn.o_proj.weight": linear(hidden_size, num_heads * head_dim, 1.5),
            prefix + "post_attention_layernorm.weight": norm(hidden_size),
            prefix + "mlp.gate_proj.weight": linear(intermediate_size, hidden_size, 1.5),
            prefix + "mlp.up_proj.weight": linear(intermediate_size, hidden_size, 1.5),
            prefix + "mlp.down_proj.weight": linear(hidden_size, intermediate_size, 1.5),
        }
        if qk_norm:
            tensors[prefix + "self_attn.q_norm.weight"] = norm(head_dim)
            tensors[prefix + "self_attn.k_norm.weight"] = norm(head_dim)
    tensors["model.norm.weight"] = norm(hidden_size)
    if with_head:
        tensors["lm_head.weight"] = linear(vocab_size, hidden_size, 2.0)
    return tensors


def spoil_token(directory: str | Path, token_id: int) -> None:
    """Makes the embedding of one token NaN, in a checkpoint of one file: whoever reads it has no
    finite logits."""
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token_id] = np.nan
    _save(path, tensors)


def write_byte_tokenizer(directory: str | Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE without merges: id = byte,
    then SPECIAL_TOKENS; no BOS is added; the chat template is ChatML."""
    directory = Path(directory)
    characters = byte_characters()
    vocab = {characters[byte]: byte for byte in range(256)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": 256 + i, "content": text, **flags, "special": True}
        for i, text in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None, "decoder": byte_level | {"use_regex": True}, "model": model,
    }  # fmt: skip
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_weights(directory: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        _save(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    for shard in range(shards):
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        _save(directory / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    specs = {
        name: TensorSpec(
            dtype=x.dtype.name, shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes
        )
        for name, x in tensors.items()
    }
    serialize_file(specs, str(path), metadata={"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
