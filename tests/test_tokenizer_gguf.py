"""Tokenizers that are built from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conflux_jax.models.spec import ModelError
from conflux_jax.text import TextCodec, open_text
from tests.tiny_gguf import tokenizer_fields, write_tiny_gguf

MERGES = ("1 2", "3 4", "12 34", "\u0120 \u0120", "\u010a \u010a")  # digits, spaces, line ends
TWELVE, THIRTY_FOUR, ALL_FOUR, SPACES, LINES = range(259, 264)


def open_codec(directory: Path, pre: str | None, **fields: Any) -> TextCodec:
    """A value of None leaves the field out."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    values = tokenizer_fields(pre, MERGES) | changes
    values = {key: value for key, value in values.items() if value is not None}
    return open_text(write_tiny_gguf(directory / "a.gguf", lambda f, _: f.update(values)))


@pytest.mark.parametrize(
    ("pre", "digits", "lines_before_digit"),
    [
        ("smollm", [*b"1234"], [LINES]),
        ("qwen2", [*b"1234"], [LINES]),
        ("llama-bpe", [TWELVE, *b"34"], [LINES]),  # three at a time
        ("gpt-2", [ALL_FOUR], [10, 10]),
        ("default", [ALL_FOUR], [10, 10]),
        (None, [ALL_FOUR], [10, 10]),
    ],
)
def test_how_text_is_split(
    tmp_path: Path, pre: str | None, digits: list[int], lines_before_digit: list[int]
):
    codec = open_codec(tmp_path, pre, add_bos_token=False)
    assert codec.encode("1234") == digits
    assert codec.encode("\n\n7") == [*lines_before_digit, ord("7")]
    assert codec.encode("a   b") == [ord("a"), SPACES, ord(" "), ord("b")]
    for text in ("1234", "\n\n7", "a   b", "a'll \u9f9c"):
        assert codec.decode(codec.encode(text)) == text


def test_bos(tmp_path: Path):
    """Llama 3's files often do not say that a BOS goes first."""
    assert open_codec(tmp_path, "llama-bpe").encode("7") == [256, ord("7")]
    assert open_codec(tmp_path, "llama-bpe", add_bos_token=False).encode("7") == [ord("7")]
    assert open_codec(tmp_path, "smollm").encode("7") == [ord("7")]
    codec = open_codec(tmp_path, "smollm", add_bos_token=True)
    assert codec.encode("7") == [256, ord("7")]
    assert codec.encode("<s>7") == [256, ord("7")]  # once
    assert codec.encode("") == [256]
    assert codec.encode("7", add_special_tokens=False) == [ord("7")]


def test_tokens_written_out_in_text(tmp_path: Path):
    codec = open_codec(tmp_path, "smollm")
    ids = codec.encode("a</s><think>b")
    assert ids == [ord("a"), 257, 258, ord("b")]
    assert codec.decode(ids) == "a<think>b"  # a control token is not shown, a user's token is
    assert codec.decode(ids, skip_special_tokens=False) == "a</s><think>b"


def test_unused_entries_are_no_tokens(tmp_path: Path):
    codec = open_codec(tmp_path, "smollm")
    assert codec.vocab_size == 264
    assert codec.decode([264]) == ""
    assert codec.encode("[PAD]") == [*b"[PAD]"]


def test_llama3_takes_whole_words_whatever_the_merges_say(tmp_path: Path):
    words = tokenizer_fields("llama-bpe", MERGES)["tokenizer.ggml.tokens"]
    words = [*words[:-1], "xyz"]
    types = [1] * 256 + [3, 3, 4] + [1] * 6
    for pre, expected in (("llama-bpe", [264]), ("smollm", [*b"xyz"])):
        codec = open_codec(tmp_path, pre, tokens=words, token_type=types, add_bos_token=False)
        assert codec.encode("xyz") == expected


def test_qwen2_composes_characters(tmp_path: Path):
    assert open_codec(tmp_path, "qwen2").encode("e\u0301") == [*"é".encode()]
    assert open_codec(tmp_path, "smollm").encode("e\u0301") == [*"e\u0301".encode()]


def test_all_ids_that_end_an_answer(tmp_path: Path):
    codec = open_codec(tmp_path, "smollm", eot_token_id=256, eom_token_id=257)
    assert codec.eos_token_ids == (257, 256)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: only 'gpt2'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: 'tekken' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens: this list is missing"),
        ({"merges": None}, "tokenizer.ggml.merges: this list is missing"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges: each must be two tokens"),
        ({"merges": ["a zz"]}, "tokenizer.ggml.merges: .*zz"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: must have 265 entries"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token: true is not supported"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id: this field is missing"),
        ({"bos_token_id": 900}, "tokenizer.ggml.bos_token_id: 900 is no token"),
        ({"eos_token_id": "last"}, "tokenizer.ggml.eos_token_id: must be an integer, got 'last'"),
    ],
)
def test_refused_tokenizers(tmp_path: Path, fields: dict[str, Any], problem: str):
    with pytest.raises(ModelError, match=problem) as caught:
        open_codec(tmp_path, fields.pop("pre", "smollm"), **fields)
    assert "a.gguf" in str(caught.value)
