"""Sampling options of the HTTP server: what reaches the engine, and how prompts are reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from conflux_jax.request import SamplingParams
from tests.fakes import Fake, make_fake
from tests.serve.http_harness import CHAT, CHATS, COMPLETIONS, HttpClient, http_serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[tuple[Fake, HttpClient]]:
    with make_fake() as fake:
        async with http_serving(fake) as client:
            yield fake, client


def last_params(fake: Fake) -> SamplingParams:
    return [a for plan in fake.executor.plans for a in plan.admissions][-1].request.params


async def test_options_reach_the_engine(served: tuple[Fake, HttpClient]):
    fake, client = served
    extra = {
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "bad_token_ids": [8],
        "bad_words": ["z"],
        "allowed_token_ids": [97, 98, 99],
    }
    expected = SamplingParams(
        max_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={97: -100, 98: 2.5},
        min_tokens=2,
        stop_token_ids=(7,),
        bad_token_ids=(8, ord("z")),
        allowed_token_ids=(97, 98, 99),
    )
    settings: Any = {"presence_penalty": 0.5, "frequency_penalty": -1, "max_tokens": 3}
    settings |= {"logit_bias": {"97": -100, "98": 2.5}, "extra_body": extra}
    await client.openai.completions.create(model="fake", prompt="abc", **settings)
    assert last_params(fake) == expected
    messages: Any = CHAT
    await client.openai.chat.completions.create(model="fake", messages=messages, **settings)
    assert last_params(fake) == expected


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"logit_bias": [1]}, "logit_bias", "must map token ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "whole numbers, got 'a'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "whole numbers, got '-1'"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "whole numbers"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"5": None}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "outside the model's vocabulary (0 to 299)"),
    ({"presence_penalty": 2.5}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": "x"}, "frequency_penalty", "a number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
    ({"min_tokens": 17}, "min_tokens", "at most max_tokens (16)"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "at least 0"),
    ({"bad_words": ["a" * 17]}, "bad_words", "17 of"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream to be false"),
]


async def test_bad_options_are_refused_by_field(served: tuple[Fake, HttpClient]):
    fake, client = served
    before = len(fake.executor.plans)
    for body, param, words in BAD:
        status, error = await client.error(COMPLETIONS, prompt="x", max_tokens=16, **body)
        assert (status, error["param"]) == (400, param), error
        assert error["message"].startswith(f"{param}: ") and words in error["message"]
    assert len(fake.executor.plans) == before


async def test_an_echoed_prompt_has_its_log_probabilities(served: tuple[Fake, HttpClient]):
    _, client = served
    body = {"prompt": [104, 195, 169], "echo": True, "logprobs": 1, "max_tokens": 2}
    answer = await client.openai.completions.create(model="fake", **body)
    (choice,) = answer.choices
    assert choice.text == "hé" + "h\ufffd"
    found = choice.logprobs
    assert found is not None and found.top_logprobs is not None
    assert found.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "h", "bytes:\\xc3"]
    assert found.token_logprobs == [None, -0.25, -0.5, -0.5, -1.5]
    assert found.top_logprobs[:2] == [None, {"\0": -1.0, "bytes:\\xc3": -0.25}]
    assert found.top_logprobs[3] == {"\0": -1.0, "h": -0.5}
    assert found.text_offset == [0, 1, 1, 2, 3]
    assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_a_stream_of_an_echoed_prompt_says_what_the_reply_does(
    served: tuple[Fake, HttpClient],
):
    _, client = served
    for prompt in ("ab", "x" * 150, "y"):
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 9, "n": 2}
        whole = (await client.complete(**body))["choices"]
        choices = [c for e in await client.events(COMPLETIONS, **body) for c in e["choices"]]
        for index in (0, 1):
            mine = [c for c in choices if c["index"] == index]
            assert "".join(c["text"] for c in mine) == whole[index]["text"]
            for name, values in whole[index]["logprobs"].items():
                assert len(values) == len(prompt) + 9
                assert [v for c in mine for v in c["logprobs"][name]] == values
    plain = (await client.complete(**body | {"logprobs": 0, "n": 1}))["choices"][0]["logprobs"]
    assert plain["top_logprobs"] is None and len(plain["tokens"]) == 10


async def test_prompt_logprobs_are_vllms(served: tuple[Fake, HttpClient]):
    _, client = served
    answer = await client.complete(prompt=["b\0b", "c"], max_tokens=1, prompt_logprobs=2)
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])

    def entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    assert first == [
        None,
        {"0": entry(-0.25, 1, "\0"), "1": entry(-2.0, 2, "\x01")},
        {"98": entry(-0.5, 2, "b"), "0": entry(-1.0, 1, "\0"), "1": entry(-2.0, 2, "\x01")},
    ]
    assert second == [None]
    chat = (await client.post(CHATS, messages=CHAT, max_tokens=1, prompt_logprobs=0)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    plain = await client.complete(prompt="abc", max_tokens=1)
    assert "prompt_logprobs" not in plain and "prompt_logprobs" not in plain["choices"][0]
