"""Our reading and arithmetic against transformers', and the goldens against a new run."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from conflux_jax.models.loading import open_source
from conflux_jax.text import open_text
from tests.goldens.generate import NEAR_TIE_MARGIN, build
from tests.goldens.inputs import CORPUS
from tests.tiny import write_tiny_llama
from tests.tiny_gguf import tokenizer_fields, write_tiny_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def our_logits(path: Path, token_ids: list[int], sp: int = 1, chunk: int = 64) -> np.ndarray:
    """`[tokens, vocab]` float32."""
    from tests.forward import forward_logits

    return np.asarray(forward_logits(open_source(path), token_ids, sp=sp, chunk=chunk))


def their_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    return model(torch.tensor([token_ids])).logits[0].numpy()


def assert_same_logits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    assert theirs.std() > 0.3, "logits near zero would agree whatever the arithmetic"
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def random_ids(count: int, vocab_size: int = 160) -> list[int]:
    return np.random.default_rng(count).integers(0, vocab_size, count).tolist()


def random_model(directory: Path, qwen3: bool = False, shard_size: str = "5GB", **changes: Any):
    """A model with random weights, saved as transformers saves it."""
    settings: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    } | changes
    kind = "Qwen3" if qwen3 else "Llama"
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones otherwise, and a norm left out would go unnoticed
            parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "changes"),
    [
        (4, 4, {}),
        (8, 2, {}),
        (9, 3, {"hidden_size": 72}),
        (8, 2, {"head_dim": 16}),  # not hidden / heads: case 15
        (4, 2, {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}}),
        (4, 2, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        (4, 1, {"rms_norm_eps": 1e-2, "num_hidden_layers": 1}),
    ],
)
def test_logits_of_llama(
    tmp_path: Path, num_heads: int, num_kv_heads: int, changes: dict[str, Any], tied: bool
):
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    model = random_model(tmp_path, tie_word_embeddings=tied, **heads, **changes)
    ids = random_ids(45)
    assert_same_logits(our_logits(tmp_path, ids), their_logits(model, ids))


@pytest.mark.parametrize("sp", [2, 3, 4])
def test_logits_over_groups(tmp_path: Path, sp: int):
    changes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = random_model(tmp_path, **changes)
    ids = random_ids(37)
    assert_same_logits(our_logits(tmp_path, ids, sp), their_logits(model, ids))


def test_logits_of_qwen3(tmp_path: Path):
    model = random_model(
        tmp_path, qwen3=True, head_dim=16, num_attention_heads=8, num_key_value_heads=2
    )
    ids = random_ids(45)
    assert_same_logits(our_logits(tmp_path, ids), their_logits(model, ids))


LLAMA31 = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
QWEN3 = {"rope_type": "default", "rope_theta": 1000000.0}


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize(
    ("qwen3", "rope", "changes"),
    [
        (False, LLAMA31, {"num_attention_heads": 4, "num_key_value_heads": 2}),
        (True, QWEN3, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}),
    ],
)
def test_logits_past_8192_positions(
    tmp_path: Path, qwen3: bool, rope: dict[str, Any], changes: dict[str, Any], sp: int
):
    """Past the context that Llama-3.1's scaling stretches; every logit from the first token on."""
    settings = {"rope_parameters": rope, "max_position_embeddings": 16384, **changes}
    model = random_model(tmp_path, qwen3, attn_implementation="sdpa", **settings)
    ids = random_ids(8192 + 300)
    assert_same_logits(our_logits(tmp_path, ids, sp, chunk=1024), their_logits(model, ids))


def test_logits_from_shards(tmp_path: Path):
    model = random_model(tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = random_ids(20)
    assert_same_logits(our_logits(tmp_path, ids), their_logits(model, ids))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16", "tied": True},
        {"dtype": "float32", "tied": True, "store_tied_head": True},
        {"config": {"tie_word_embeddings": True}},  # and a head of its own
    ],
)
def test_logits_of_the_checkpoints_that_other_tests_write(tmp_path: Path, options: dict[str, Any]):
    """`tests/tiny.py` makes what transformers reads in the same way."""
    write_tiny_llama(tmp_path, shards=2, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = random_ids(30, 288)
    assert_same_logits(our_logits(tmp_path, ids), their_logits(model, ids))


@pytest.mark.parametrize(
    "flags",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}],
)
def test_directory_tokenizer(tmp_path: Path, flags: dict[str, bool]):
    write_tiny_llama(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    ours, theirs = open_text(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, world! 龜", "", "<|im_start|>user\nhi<|im_end|> 🫠"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    messages = [{"role": "user", "content": "hi"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == prompt
    assert ours.encode_chat(messages) == theirs.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "default"])
def test_gguf_tokenizer(tmp_path: Path, pre: str):
    """Not for "smollm", which transformers splits in its own way (see goldens/generate.py)."""
    merges = ("1 2", "3 4", "12 34", "\u0120 \u0120", "\u010a \u010a", "h e", "l l", "he ll")
    fields = tokenizer_fields(pre, merges) | {"tokenizer.ggml.add_bos_token": True}
    path = write_tiny_gguf(tmp_path / "a.gguf", lambda own, _: own.update(fields))
    ours = open_text(path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    # transformers adds GPT-2's own special token to every vocabulary of this kind.
    for text in (text for text in CORPUS if "<|endoftext|>" not in text):
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ours.encode(text) == theirs.encode(composed)
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(composed), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("tied", [False, True])
def test_logits_from_gguf(tmp_path: Path, tied: bool):
    fields = tokenizer_fields("default", ("1 2",))
    path = write_tiny_gguf(
        tmp_path / "a.gguf", lambda own, _: own.update(fields), with_head=not tied
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = random_ids(30, 288)
    assert_same_logits(our_logits(path, ids), their_logits(model, ids))


@pytest.mark.timeout(1800)
def test_goldens_are_what_transformers_computes(smollm2_path: Path):
    """Equal but for rounding: margins within 2e-3, and a near tie may be decided differently."""
    for name, made in build(smollm2_path).items():
        made = json.loads(json.dumps(made))
        committed = json.loads((GOLDENS / name).read_text("utf-8"))
        if name == "smollm2.json":
            for ours, theirs in zip(committed.pop("prompts"), made.pop("prompts"), strict=True):
                assert_same_continuation(ours, theirs)
        assert_close(committed, made)


def assert_same_continuation(committed: dict[str, Any], made: dict[str, Any]) -> None:
    derived = {"output_ids", "text", "margins", "near_ties", "first_eos"}
    for key in committed.keys() - derived:
        assert committed[key] == made[key], (committed["name"], key)
    for i, (a, b) in enumerate(zip(committed["output_ids"], made["output_ids"], strict=True)):
        if a != b:
            assert committed["margins"][i] < NEAR_TIE_MARGIN, (committed["name"], i)
            return
        assert abs(committed["margins"][i] - made["margins"][i]) < 2e-3
    assert committed["text"] == made["text"]


def assert_close(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6, abs=2e-3)
    else:
        assert a == b
