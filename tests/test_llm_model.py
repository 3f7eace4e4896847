"""`LLM` and the server over a real (tiny, random) model: everything from text to text."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from conflux_jax import LLM, SamplingParams, client, convert
from conflux_jax.config import ConfigError
from conflux_jax.request import FinishReason
from tests.serve.harness import generate_request, running, serving
from tests.serve.http_harness import http_serving
from tests.tiny import write_tiny_llama

SETTINGS = {
    "sp": 3,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_pool_tokens": 1024,
    "decode_rows_ladder": (4,),
    "rows_ladder": (48,),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["The capital", "x", "ď 🫠 龜 " * 12, "a rather long prompt, " * 7, "Once upon a time"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_heads=6, num_kv_heads=3)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model=model, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[int, ...]]:
    """Tokens of each prompt alone."""
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


def test_more_groups_than_memory_are_refused_before_loading(model: Path):
    """It counts: 3 groups with 10^12 tokens of KV each cannot be."""
    settings: dict[str, Any] = SETTINGS | {"kv_pool_tokens": 10**12}
    with pytest.raises(
        ConfigError, match=r"sp: 3 groups hold .* GB of KV and .* GB of tables .*; this machine has"
    ):
        LLM(model=model, **settings)


def test_a_cache_folder_that_cannot_be_is_refused(model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compilation_cache_dir: .*file"):
        LLM(model=model, **SETTINGS, compilation_cache_dir=str(tmp_path / "file" / "cache"))


def test_a_batch_is_each_prompt_alone(llm: LLM, expected):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    free = set(llm.engine.load().result(10).free_pages)
    assert free == {llm.engine.info.num_pages}


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM):
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    (alone,) = llm.generate("a seeded prompt", params)
    others = [SamplingParams(max_tokens=12, seed=i) for i in range(3)]
    among = llm.generate(["b", "cc", "a seeded prompt", "ddd"], [*others[:2], params, others[2]])
    assert among[2].token_ids == alone.token_ids


def test_logprobs_belong_to_the_tokens(llm: LLM):
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True)
    (output,) = llm.generate("abc", params)
    assert output.logprobs is not None
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.top[0] == (token_id, pytest.approx(entry.sampled, abs=1e-5))
        assert entry.sampled < 0
        assert len(entry.top) == 3


def test_a_converted_model_says_the_same(llm: LLM, model: Path, expected, tmp_path: Path):
    assert convert.main([str(model), str(tmp_path / "orbax")]) == 0
    with LLM(model=tmp_path / "orbax", **SETTINGS) as restored:
        outputs = restored.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert restored.engine.info == llm.engine.info


def test_ids_without_a_token_are_never_sampled(llm: LLM):
    """Case 19: a tenth of this model's vocabulary has no token, and hot sampling would find it."""
    info, text = llm.engine.info, llm.engine.tokenizer
    assert text.vocab_size < 0.91 * info.vocab_size
    each = [
        SamplingParams(max_tokens=40, temperature=2.0, seed=seed, ignore_eos=True, logprobs=20)
        for seed in range(4)
    ]
    for output in llm.generate(["x"] * len(each), each):
        assert len(output.token_ids) == 40 and max(output.token_ids) < text.vocab_size
        for entry in output.logprobs or ():
            assert all(token_id < text.vocab_size for token_id, _ in entry.top)


async def test_the_service_says_what_the_library_says(llm: LLM, expected):
    async with serving(None) as client:
        await client.server.use(llm.engine)
        for prompt, token_ids in zip(PROMPTS, expected, strict=True):
            fields = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
            call = client.stub.Generate(generate_request(prompt, **fields))
            messages = [message async for message in call]
            assert tuple(i for m in messages for i in m.token_ids) == token_ids


async def test_http_says_what_the_library_says(llm: LLM, expected):
    """The prompts at once, as one call; and choices, each by a seed of its own."""
    async with http_serving(llm) as client:
        greedy = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = await client.complete(prompt=PROMPTS, **greedy)
        decode = llm.engine.tokenizer.decode
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [decode(token_ids, continuation=True) for token_ids in expected]
        answer = await client.complete(prompt="abc", n=2, seed=7, max_tokens=12, ignore_eos=True)
        each = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in (7, 8)]
        alone = [llm.generate("abc", params)[0].text for params in each]
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert alone[0] != alone[1]
        seen = await client.metrics()
        assert seen["vllm:generation_tokens_total"] == 12 * (len(PROMPTS) + 2 + 2)


def test_a_server_process_serves_it_from_start_to_sigterm(llm: LLM, model: Path, expected, capsys):
    """After `llm`, whose compiled programs are in the cache now."""
    flags = ["--model", str(model)]
    for name, value in SETTINGS.items():
        values = value if isinstance(value, tuple) else (value,)
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    devices = str(len(jax.devices()))  # as here, or the cache would not know the programs
    with running(*flags, module="conflux_jax.serve", JAX_NUM_CPU_DEVICES=devices) as server:
        arguments = ["--target", server.target, "--prompt", PROMPTS[0], "--max-tokens", "12"]
        assert client.main(arguments) == 0
        text = llm.engine.tokenizer.decode(expected[0])
        assert capsys.readouterr().out == text + "\n"
        server.send(signal.SIGTERM)
        code, stderr = server.wait()
        assert code == 0, stderr
        assert "Traceback" not in stderr
        assert "compile" in stderr
