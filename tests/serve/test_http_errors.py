"""What the HTTP server refuses: every error has a status, and names its field and limit."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fakes import make_fake
from tests.serve.http_harness import CHAT, CHATS, COMPLETIONS, HttpClient, http_serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[HttpClient]:
    with make_fake() as fake:
        async with http_serving(fake) as client:
            yield client


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "at least one token"),
    ({"prompt": 3}, "prompt", "token ids"),
    ({"prompt": {}}, "prompt", "token ids"),
    ({"prompt": ["a", 3]}, "prompt[1]", "token ids"),
    ({"prompt": ["a", [True]]}, "prompt[1]", "token ids"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts"),
    ({"prompt": [300]}, "prompt", "0 to 299"),
    ({"prompt": ["a", [300]]}, "prompt[1]", "0 to 299"),
    ({"prompt": "\ud800"}, "prompt", "Unicode"),
    ({"prompt": "x" * 1024}, "prompt", "max_model_len is 1024"),
    ({"prompt": "x", "n": 0}, "n", "between 1 and 128"),
    ({"prompt": "x", "n": 129}, "n", "between 1 and 128"),
    ({"prompt": ["x"] * 9, "n": 128}, "n", "more than 1024 choices"),
    ({"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "a number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "x", "top_k": -2}, "top_k", "between 0"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "between 1"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "an integer"),
    ({"prompt": "x", "seed": 2**63}, "seed", "between"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"prompt": "x", "stop": [1]}, "stop", "a string"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt": "x", "logprobs": True}, "logprobs", "an integer"),
    ({"prompt": "x", "echo": 1}, "echo", "true or false"),
    ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "x", "stream": True, "stream_options": 1}, "stream_options", "an object"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "true or false",
    ),
    ({"prompt": "x", "tempreature": 1}, "tempreature", "no such parameter"),
    ({"prompt": "x", "best_of": 2}, "best_of", "only n of them are made: must be 1, got 2"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [1]}, "messages", "an object"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "role"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "a text part",
    ),
    ({"messages": [{"role": "user", "content": "x" * 1024}]}, "messages", "1024"),
    ({"messages": CHAT, "top_logprobs": 1}, "top_logprobs", "logprobs"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"messages": CHAT, "logprobs": 2}, "logprobs", "true or false"),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "between 1"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format", "not"),
]


async def test_bad_bodies_are_refused_by_field_and_leave_nothing():
    with make_fake() as fake:
        async with http_serving(fake) as client:
            cases = [(COMPLETIONS, *case) for case in BAD_COMPLETIONS]
            for path, body, param, words in [*cases, *((CHATS, *case) for case in BAD_CHATS)]:
                status, error = await client.error(path, **body)
                assert (status, error["param"]) == (400, param), (body, error)
                assert error["message"].startswith(f"{param}: ") and words in error["message"]
                assert error["type"] == "invalid_request_error"
            assert not fake.executor.plans
            assert fake.is_free


async def test_neutral_values_of_what_is_not_supported_are_taken(client: HttpClient):
    answer = await client.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        response_format={"type": "text"},
        tool_choice="none",
        extra_body={"suffix": "", "length_penalty": 1.0, "top_k": -1, "tools": None},
    )
    assert answer.choices[0].finish_reason == "length"


async def test_a_long_prompt_has_openais_code(client: HttpClient):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.openai.completions.create(model="fake", prompt="x" * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_another_model_is_not_found(client: HttpClient):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.openai.completions.create(model="gpt-5", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_paths_methods_and_bodies_that_are_none(client: HttpClient):
    plain = client.plain
    assert (await plain.get("/v2/x")).json()["error"]["message"] == "GET /v2/x: Not Found"
    assert (await plain.get(COMPLETIONS)).status_code == 405
    assert (await plain.post(f"{COMPLETIONS}/", json={"prompt": "x"})).status_code == 404
    lost = await plain.get("/" + "x" * 50_000)
    assert lost.status_code == 404 and len(lost.json()["error"]["message"]) < 1100
    headers = {"content-type": "application/json; charset=utf-8"}
    broken = [b"", b"{", b"[]", b"\xff", b"1" * 5000, b"[" * 100_000, b'{"prompt": NaN}', b"\x00"]
    for content in broken:
        response = await plain.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 400, content
        assert response.json()["error"]["param"] in ("body", "prompt")
    packed = gzip.compress(b'{"prompt": "x"}')
    headers["content-encoding"] = "gzip"
    response = await plain.post(COMPLETIONS, content=packed, headers=headers)
    assert response.status_code == 415
    assert "Content-Encoding is not supported, got 'gzip'" in response.json()["error"]["message"]
    form = await plain.post(COMPLETIONS, content=b'{"prompt": "x"}')
    assert (form.status_code, form.json()["error"]["param"]) == (415, "body")


@pytest.mark.parametrize("path", ["/health", "/live", "/metrics", "/dashboard", "/v1/models"])
async def test_who_only_looks_gets_the_head(client: HttpClient, path: str):
    head, whole = await client.plain.head(path), await client.plain.get(path)
    assert (head.status_code, head.content) == (200, b"") and whole.content
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_the_best_of_as_many_as_there_are(client: HttpClient):
    body = await client.complete(prompt="ab", max_tokens=2, n=3, best_of=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


async def test_errors_stay_short_and_are_json_whatever_they_quote(client: HttpClient):
    status, error = await client.error(COMPLETIONS, prompt="x", temperature="\ud800" * 10**6)
    assert status == 400
    assert len(error["message"]) < 1100


async def test_the_body_limit_is_an_option():
    with make_fake() as fake:
        async with http_serving(fake, max_message_mib=1) as client:
            status, error = await client.error(COMPLETIONS, prompt="x" * 2**20)
            assert status == 413
            assert "max_message_mib: 1 MiB" in error["message"]
            assert (await client.complete(prompt="ab", max_tokens=2))["choices"][0]["text"] == "ab"


async def test_the_request_id_can_be_the_clients(client: HttpClient):
    body = {"prompt": "x", "max_tokens": 1}
    headers = {"x-request-id": "mine"}
    response = await client.plain.post(COMPLETIONS, json=body, headers=headers)
    assert response.headers["x-request-id"] == response.json()["id"] == "cmpl-mine"
    headers = {"x-request-id": "x" * 201}
    response = await client.plain.post(COMPLETIONS, json=body, headers=headers)
    assert response.json()["error"]["param"] == "X-Request-Id"
