"""The HTTP server over a scripted engine: what it answers, at once and as streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from conflux_jax.request import Request
from tests.fakes import EOS, make_fake, spell
from tests.scheduler.predictors import Linear
from tests.serve.http_harness import CHAT, CHATS, COMPLETIONS, HttpClient, http_serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT_TOKENS = len("?user\nhi?\n?assistant\n")  # ? stands for a special token


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[HttpClient]:
    """For tests that need nothing special: it says the prompt again and again."""
    with make_fake() as fake:
        async with http_serving(fake) as client:
            yield client


def seeded(request: Request, index: int) -> int:
    """A letter that tells the seed."""
    return ord("a") + request.seed % 26


# Completions


async def test_a_completion_by_the_openai_client(client: HttpClient):
    answer = await client.openai.completions.create(model="fake", prompt="hello ", max_tokens=14)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("hello hello he", "length", 0)
    assert (answer.object, answer.model) == ("text_completion", "fake")
    assert answer.usage is not None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 14, 20)


async def test_the_default_is_sixteen_tokens(client: HttpClient):
    assert (await client.complete(prompt="abc"))["choices"][0]["text"] == "abcabcabcabcabca"


async def test_prompts_may_be_ids_and_several(client: HttpClient):
    texts = {
        "one list of ids": ([104, 105], ["hihi"]),
        "texts": (["ab", "xyz"], ["abab", "xyzx"]),
        "lists of ids": ([[97], [98, 99]], ["aaaa", "bcbc"]),
        "both": (["ab", [99]], ["abab", "cccc"]),
    }
    for prompt, expected in texts.values():
        answer = await client.complete(prompt=prompt, max_tokens=4)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["completion_tokens"] == 4 * len(expected)


async def test_usage_counts_a_prompt_once_and_every_choice(client: HttpClient):
    answer = await client.complete(prompt=["ab", "wxyz"], n=3, max_tokens=5)
    assert [c["text"] for c in answer["choices"]] == ["ababa"] * 3 + ["wxyzw"] * 3
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 30,
        "total_tokens": 36,
    }


async def test_choices_of_a_prompt_count_up_from_the_seed():
    with make_fake(seeded, max_num_seqs=8) as fake:
        async with http_serving(fake) as client:

            async def texts(**body: Any) -> list[str]:
                answer = await client.complete(max_tokens=1, **body)
                return [choice["text"] for choice in answer["choices"]]

            assert await texts(prompt="x", seed=52) == ["a"]
            assert await texts(prompt="x", seed=52, n=3) == ["a", "b", "c"]
            assert await texts(prompt=["x", "y"], seed=52, n=2) == ["a", "b", "a", "b"]
            wrapped = chr(ord("a") + (-(2**63)) % 26)
            assert (await texts(prompt="x", seed=2**63 - 1, n=2))[1] == wrapped


async def test_echo_puts_the_prompt_in_front(client: HttpClient):
    answer = await client.complete(prompt=["ab", [99, 100]], echo=True, max_tokens=3, n=2)
    assert [c["text"] for c in answer["choices"]] == ["ababa"] * 2 + ["cdcdc"] * 2
    events = await client.events(COMPLETIONS, prompt="ab", echo=True, max_tokens=3)
    assert "".join(c["text"] for e in events for c in e["choices"]) == "ababa"


async def test_logprobs_of_a_completion(client: HttpClient):
    answer = await client.openai.completions.create(
        model="fake", prompt=[104, 195, 169], max_tokens=3, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5, -1.5, -2.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"\0": -1.0, "h": -0.5}
    assert logprobs.text_offset == [0, 1, 1]
    plain = await client.complete(prompt="ab", max_tokens=1, logprobs=0)
    assert plain["choices"][0]["logprobs"]["top_logprobs"] is None
    assert plain["choices"][0]["logprobs"]["tokens"] == ["a"]


async def test_logprobs_of_a_stream_are_those_of_the_reply(client: HttpClient):
    body = {"prompt": "hé ", "max_tokens": 9, "logprobs": 2}
    whole = (await client.complete(**body))["choices"][0]["logprobs"]
    events = await client.events(COMPLETIONS, **body)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    for name, values in whole.items():
        assert len(values) == 9
        assert [value for piece in pieces for value in piece[name]] == values


STOPS = ((None, "ď 🫠 龜 end."), ("龜", "ď 🫠 "), (["z", " e"], "ď 🫠 龜"))


async def test_stop_strings_and_split_characters():
    with make_fake(spell("ď 🫠 龜 end.")) as fake:
        async with http_serving(fake) as client:
            for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": CHAT})):
                for stop, text in (
                    (None, "ď 🫠 龜 end."),
                    ("龜", "ď 🫠 "),
                    (["z", " e"], "ď 🫠 龜"),
                ):
                    events = await client.events(path, max_tokens=99, stop=stop, **body)
                    choices = [choice for event in events for choice in event["choices"]]
                    pieces = [c.get("text", c.get("delta", {}).get("content")) for c in choices]
                    assert "".join(piece or "" for piece in pieces) == text
                    assert [c["finish_reason"] for c in choices][-1] == "stop"
                    assert not any(c["finish_reason"] for c in choices[:-1])


# Chat


async def test_a_chat_by_the_openai_client(client: HttpClient):
    answer = await client.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        user="somebody",
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "user\n")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CHAT_TOKENS, 6)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    special, letter = choice.logprobs.content[:2]
    assert (special.token, letter.token, letter.bytes) == ("<|im_start|>", "u", [117])
    assert [(t.token, t.logprob) for t in letter.top_logprobs] == [("\0", -1.0), ("\x01", -2.0)]


async def test_a_chat_may_use_the_whole_context():
    with make_fake(max_model_len=CHAT_TOKENS + 40) as fake:
        async with http_serving(fake) as client:
            answer = (await client.post(CHATS, messages=CHAT, ignore_eos=True)).json()
            assert answer["usage"]["completion_tokens"] == 40


async def test_a_chat_streams_by_the_openai_client(client: HttpClient):
    stream = await client.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=8,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choices) == "user\nhi"
        assert [c.finish_reason for c in choices][-1] == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert (usage.prompt_tokens, usage.completion_tokens) == (CHAT_TOKENS, 16)


async def test_usage_in_every_chunk_or_in_none(client: HttpClient):
    body = {"prompt": "ab", "max_tokens": 6}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events(COMPLETIONS, stream_options=options, **body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-2:] == [6, 6]
    assert all("usage" not in event for event in await client.events(COMPLETIONS, **body))


# Models and tokens


async def test_models_are_told(client: HttpClient):
    (model,) = (await client.openai.models.list()).data
    assert model.id == "fake"
    assert (await client.openai.models.retrieve("fake")).id == "fake"
    assert (await client.plain.get("/v1/models")).json()["data"][0]["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        await client.openai.models.retrieve("gpt-5")


async def test_a_prompt_can_be_estimated(client: HttpClient):
    status, error = await client.error("/v1/estimate", prompt="abc")
    assert (status, error["code"]) == (409, "no_estimate")
    assert "latency_profile" in error["message"]
    with make_fake(predictor=Linear(base_s=0.25)) as fake:
        async with http_serving(fake) as predicted:
            for body in ({"prompt": "x" * 20}, {"messages": CHAT}):
                answer = (await predicted.post("/v1/estimate", **body)).json()
                tokens = CHAT_TOKENS if "messages" in body else 20
                expected = {"ttft_s": 0.25, "queued_s": 0.0, "alone_s": 0.25, "basis": "profile"}
                assert answer == {"prompt_tokens": tokens, **expected}
            assert not fake.executor.plans


async def test_text_to_tokens_and_back(client: HttpClient):
    answer = (await client.post("/tokenize", prompt="hé", return_token_strs=True)).json()
    assert (answer["tokens"], answer["count"]) == ([104, 195, 169], 3)
    assert answer["token_strs"][0] == "h"
    chat = (await client.post("/tokenize", messages=CHAT)).json()
    assert chat["count"] == CHAT_TOKENS
    assert (await client.post("/detokenize", tokens=[104, 195, 169])).json() == {"prompt": "hé"}
    assert (await client.post("/detokenize", tokens=[EOS])).json() == {"prompt": "<|im_end|>"}
    status, error = await client.error("/detokenize", tokens=[300])
    assert (status, error["param"]) == (400, "tokens")
    assert "0 and 299" in error["message"]
