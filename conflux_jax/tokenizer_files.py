"""Where a model's tokenizer comes from: a GGUF file's metadata or a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from conflux_jax.models.loading import find_model
from conflux_jax.models.loading.gguf_file import GGUFFile
from conflux_jax.models.loading.huggingface_config import eos_token_ids, read_json
from conflux_jax.models.spec import ModelError

# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same but for digits, one at a time: Qwen2's tokenizer.json
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Spelling:
    """How the text of a token encodes bytes.

    `byte_level`: GPT-2's, one printable character a byte. Otherwise SentencePiece's: "▁" is a
    space, and with `byte_fallback` "<0x41>" is the byte 0x41. `drops_first_space`: the space that
    encoding puts before a text is taken off when a text is decoded.
    """

    byte_level: bool
    byte_fallback: bool = False
    drops_first_space: bool = False


@dataclass(frozen=True)
class TokenizerParts:
    """All that text handling needs to know of a model. `special_tokens` are the names that chat
    templates use: `bos_token`, `eos_token`, ..."""

    tokenizer: Tokenizer
    spelling: Spelling
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def read_tokenizer(model: str | Path) -> TokenizerParts:
    """For the same names and paths as `open_source`. Raises ModelError."""
    path = find_model(model)
    return _from_directory(path) if path.is_dir() else _from_gguf(GGUFFile(path))


# GGUF


@dataclass(frozen=True)
class _PreTokenizer:
    """What `tokenizer.ggml.pre` stands for: how text is cut before merging, and the rest that
    llama.cpp ties to that name."""

    steps: tuple[Any, ...]
    normalizer: Any = None
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _pre_tokenizer(name: str) -> _PreTokenizer | None:
    bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2", "gpt2"):
        return _PreTokenizer((gpt2,))
    if name == "smollm":  # digits apart first, so that "\n\n1" keeps its two line ends together
        return _PreTokenizer((pre.Digits(individual_digits=True), gpt2))
    if name in ("llama-bpe", "llama3", "llama-v3"):
        split = pre.Split(Regex(_LLAMA3_SPLIT), "isolated")
        return _PreTokenizer((split, bytes_only), ignore_merges=True, add_bos=True)
    if name == "qwen2":
        split = pre.Split(Regex(_QWEN2_SPLIT), "isolated")
        return _PreTokenizer((split, bytes_only), normalizer=normalizers.NFC())
    return None


def _from_gguf(file: GGUFFile) -> TokenizerParts:
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise file.fail("tokenizer.ggml.model", f"only 'gpt2' (byte-level BPE), got {kind!r}")
    name = file.text("tokenizer.ggml.pre", "default") or "default"
    rules = _pre_tokenizer(name)
    if rules is None:
        raise file.fail("tokenizer.ggml.pre", f"{name!r} is not supported")
    tokens, types = _tokens_and_types(file)
    tokenizer = _gguf_bpe(file, tokens, types, rules)
    special_tokens = _gguf_special_tokens(file, tokens)
    if file.flag("tokenizer.ggml.add_eos_token", False):
        raise file.fail("tokenizer.ggml.add_eos_token", "true is not supported")
    if file.flag("tokenizer.ggml.add_bos_token", rules.add_bos):
        if "bos_token" not in special_tokens:
            raise file.fail("tokenizer.ggml.bos_token_id", "this field is missing")
        bos = special_tokens["bos_token"]
        tokenizer.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos}:0 $A:0", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return TokenizerParts(
        tokenizer=tokenizer,
        spelling=Spelling(byte_level=True),
        vocab_size=1 + int(np.flatnonzero(types != _UNUSED)[-1]),
        eos_token_ids=file.eos_token_ids(),
        special_tokens=special_tokens,
        chat_template=file.text("tokenizer.chat_template"),
    )


def _tokens_and_types(file: GGUFFile) -> tuple[list[str], np.ndarray]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.fail("tokenizer.ggml.tokens", "this list is missing")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return tokens, np.full(len(tokens), _NORMAL)
    if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
        raise file.fail("tokenizer.ggml.token_type", f"must have {len(tokens)} entries")
    if (types == _UNUSED).all():
        raise file.fail("tokenizer.ggml.token_type", "marks every token as unused")
    return tokens, types


def _gguf_bpe(
    file: GGUFFile, tokens: Sequence[str], types: np.ndarray, rules: _PreTokenizer
) -> Tokenizer:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise file.fail("tokenizer.ggml.merges", "this list is missing")
    vocab = {tokens[i]: i for i in np.flatnonzero(types != _UNUSED).tolist()}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise file.fail("tokenizer.ggml.merges", "each must be two tokens with a space between")
    try:
        bpe = models.BPE(vocab, pairs, ignore_merges=rules.ignore_merges)
    except Exception as error:  # tokenizers raises nothing narrower
        raise file.fail("tokenizer.ggml.merges", str(error)) from error
    tokenizer = Tokenizer(bpe)
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = pre.Sequence(list(rules.steps))
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [tokens[i] for i in np.flatnonzero(types == kind).tolist()]
        added = [AddedToken(text, normalized=False, special=special) for text in found]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _gguf_special_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for key, name in names.items():
        token_id = file.integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise file.fail(f"tokenizer.ggml.{key}_token_id", f"{token_id} is no token")
        found[name] = tokens[token_id]
    return found


# Hugging Face


def _from_directory(directory: Path) -> TokenizerParts:
    """tokenizer.json says everything about tokens, a BOS in front included; as in transformers 5,
    the flags `add_bos_token` and `add_eos_token` of tokenizer_config.json do not count beside it.
    """
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        problem = f"cannot be read: {error}" if path.is_file() else "no such file"
        raise ModelError(f"{path}: {problem}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    special_tokens = _special_tokens(config)
    eos_ids = list(eos_token_ids(directory))
    if (text := special_tokens.get("eos_token")) is not None:
        eos_ids += [i for i in [tokenizer.token_to_id(text)] if i is not None]
    return TokenizerParts(
        tokenizer=tokenizer,
        spelling=_spelling(path, tokenizer),
        vocab_size=1 + max(tokenizer.get_vocab().values(), default=-1),
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        special_tokens=special_tokens,
        chat_template=_chat_template(directory, config_path, config),
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_template(directory: Path, config_path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json: one template, or several with
    names, of which "default" is for plain conversations."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    except (KeyError, TypeError) as error:
        raise ModelError(f"{config_path}: chat_template: must be text or named texts") from error


def _spelling(path: Path, tokenizer: Tokenizer) -> Spelling:
    """From the decoder's parts, which say how tokens become text."""
    decoder = tokenizer.decoder
    state: dict[str, Any] = {"type": "no decoder"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())  # pyright: ignore[reportArgumentType]
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    by_type = {part["type"]: part for part in parts}
    if set(by_type) == {"ByteLevel"}:
        return Spelling(byte_level=True)
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not set(by_type) <= known or not {"Replace", "Metaspace"} & set(by_type):
        raise ModelError(f"{path}: decoder: {', '.join(by_type)} is not supported")
    drops = "Strip" in by_type
    if "Metaspace" in by_type:
        drops = by_type["Metaspace"].get("prepend_scheme") != "never"
    return Spelling(False, "ByteFallback" in by_type, drops)
