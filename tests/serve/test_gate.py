"""Who may call: bearer tokens, and how much may be in progress at once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc import StatusCode
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conflux_jax import client as command
from conflux_jax.config import Config, ConfigError
from conflux_jax.serve.auth import Tokens, Unauthenticated
from conflux_jax.serve.gate import Gate
from conflux_jax.serve.grpc_server import GrpcServer
from conflux_jax.serve.http_server import HttpServer
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes import make_fake
from tests.serve.harness import SERVING, Client, connect, generate_request
from tests.serve.http_harness import COMPLETIONS

TOKEN, NEXT_TOKEN = "first-0123456789abcdef", "second-0123456789abcdef"
LONG = {"max_tokens": 900, "ignore_eos": True}


@contextlib.asynccontextmanager
async def both(**config: Any) -> AsyncIterator[tuple[Client, httpx.AsyncClient]]:
    """The two servers of one process, over one slow engine, and a client of each."""
    settings = Config.from_flat(port=0, http_port=0, **config)
    gate = Gate(settings.server)
    servers = GrpcServer(settings.server, gate), HttpServer(settings, gate)
    with make_fake(step_s=0.01) as fake:
        port, http_port = [await server.start() for server in servers]
        await servers[0].use(fake.engine)
        servers[1].use(fake.engine)
        base = f"http://127.0.0.1:{http_port}"
        try:
            async with (
                connect(port) as channel,
                httpx.AsyncClient(base_url=base, timeout=20, verify=False) as http,
            ):
                yield Client(servers[0], port, channel, pb_grpc.InferenceStub(channel)), http
        finally:
            await servers[0].stop(0.0)
            await servers[1].stop()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the first team\n{TOKEN}\n\n")
    return path


# Tokens


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "a token is needed"),
        ("", "a token is needed"),
        ("Bearer", "a token is needed"),
        (TOKEN, "a token is needed"),
        (f"Digest {TOKEN}", "a token is needed"),
        ("Basic ***", "a token is needed"),
        (basic(TOKEN), "a token is needed"),
        (f"Bearer {TOKEN[:-1]}", "not known"),
        (f"Bearer {TOKEN}0", "not known"),
        (f"Bearer {TOKEN.upper()}", "not known"),
        ("Bearer # of the first team", "not known"),
        (basic(f"user:{TOKEN}0"), "not known"),
        ("Bearer \udc80", "not known"),
    ],
)
def test_what_is_no_token_of_the_file_is_refused(token_file: Path, header: str, words: str):
    with pytest.raises(Unauthenticated, match=words) as caught:
        Tokens(str(token_file)).check(header)
    assert TOKEN[:5] not in str(caught.value)


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic(f"u:{TOKEN}")])
def test_a_token_may_come_as_headers_come(token_file: Path, header: str):
    Tokens(str(token_file)).check(header)


def test_every_token_is_compared_and_none_by_its_length(token_file: Path, monkeypatch):
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    token_file.write_text(f"{TOKEN}\n{NEXT_TOKEN}\n{NEXT_TOKEN * 2}\n")
    tokens = Tokens(str(token_file))
    tokens.check(f"Bearer {TOKEN}")
    with pytest.raises(Unauthenticated):
        tokens.check("Bearer short")
    assert compared == [(32, 32)] * 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no token in it"),
        ("# only this\n", "has no token in it"),
        (f"{TOKEN}\nsecret\n", "line 2: a token must be 16 to 4096"),
        (f"{TOKEN}\n{TOKEN} secret\n", "line 2: a token must be"),
        (f"{'secret' * 1000}\n", "line 1: a token must be"),
    ],
)
def test_a_bad_file_is_named_but_not_quoted(token_file: Path, text: str, words: str):
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="auth_token_file: ") as caught:
        Tokens(str(token_file))
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(token_file: Path):
    token_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"auth_token_file: {token_file}: is no text"):
        Tokens(str(token_file))
    token_file.unlink()
    with pytest.raises(ConfigError, match=f"auth_token_file: {token_file}: No such file"):
        Tokens(str(token_file))


async def code_of(call: Any) -> StatusCode:
    """How a call ends; what a refusal says has no token in it."""
    (result,) = await asyncio.gather(call, return_exceptions=True)
    if not isinstance(result, grpc.aio.AioRpcError):
        return StatusCode.OK
    assert TOKEN not in (result.details() or "")
    return result.code()


async def test_without_a_token_nothing_is_served_but_health(token_file: Path):
    async with both(auth_token_file=str(token_file)) as (client, http):
        channel: Any = client.channel
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        info = pb.GetModelInfoRequest()
        for metadata, code in (
            ([], StatusCode.UNAUTHENTICATED),
            ([("authorization", f"Bearer {NEXT_TOKEN}")], StatusCode.UNAUTHENTICATED),
            ([("authorization", f"Bearer {TOKEN}")], StatusCode.OK),
        ):
            known = {"metadata": metadata}
            generate = client.stub.Generate(generate_request(max_tokens=1), **known)
            assert await code_of(generate.read()) is code
            assert await code_of(client.stub.GetModelInfo(info, **known)) is code
            assert (
                await code_of(reflect.ServerReflectionInfo(iter([asked]), **known).read()) is code
            )
        assert await client.health() == {SERVING}

        for path in ("/health", "/live"):
            assert (await http.get(path)).status_code == 200
        for path in ("/metrics", "/v1/models", "/none"):
            response = await http.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/metrics", headers=bearer(TOKEN))).status_code == 200


async def test_the_openai_client_is_refused_in_its_own_way(token_file: Path):
    async with both(auth_token_file=str(token_file)) as (_, http):
        settings = {"base_url": f"{http.base_url}/v1", "max_retries": 0}
        transport = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(api_key="no", http_client=transport, **settings) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                await wrong.completions.create(model="fake", prompt="ab", max_tokens=2)
            assert caught.value.code == "invalid_api_key"
            assert caught.value.type == "invalid_request_error"
            right = wrong.with_options(api_key=TOKEN)
            answer = await right.completions.create(model="fake", prompt="ab", max_tokens=2)
            assert answer.choices[0].text == "ab"


async def test_a_changed_file_of_tokens_holds_at_once(token_file: Path):
    async with both(auth_token_file=str(token_file)) as (client, http):

        async def statuses() -> list[int]:
            answers = [await http.get("/v1/models", headers=bearer(t)) for t in (TOKEN, NEXT_TOKEN)]
            return [answer.status_code for answer in answers]

        assert await statuses() == [200, 401]
        token_file.write_text("oops\n")  # the tokens before stay
        assert await statuses() == [200, 401]
        token_file.write_text(f"{NEXT_TOKEN}\n")
        assert await statuses() == [401, 200]
        metadata = [("authorization", f"Bearer {TOKEN}")]
        info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
        assert await code_of(info) is StatusCode.UNAUTHENTICATED


async def test_the_command_sends_the_token_of_its_file(token_file: Path, tmp_path: Path, capsys):
    async with both(auth_token_file=str(token_file)) as (client, _):
        flags = ["--target", f"127.0.0.1:{client.port}", "--prompt", "ab", "--max-tokens", "3"]
        assert await asyncio.to_thread(command.main, flags) == 1
        assert capsys.readouterr().err.startswith("error: UNAUTHENTICATED: a token is needed")
        known = [*flags, "--token-file", str(token_file)]
        assert await asyncio.to_thread(command.main, known) == 0
        assert capsys.readouterr().out == "aba\n"
    missing = str(tmp_path / "none")
    assert command.main(["--prompt", "x", "--token-file", missing]) == 1
    assert capsys.readouterr().err == f"error: token-file: {missing}: No such file or directory\n"


# How much at once


async def test_max_streams_holds_over_both_interfaces_and_is_named():
    async with both(max_streams=2) as (client, http):
        body = {"prompt": "ab", "stream": True, **LONG}
        first = client.stub.Generate(generate_request(**LONG))
        await first.read()
        async with http.stream("POST", COMPLETIONS, json=body) as second:
            lines = second.aiter_lines()
            await anext(lines)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(max_tokens=1)
            assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
            assert (caught.value.details() or "").startswith("max_streams: 2 calls")
            refused = await http.post(COMPLETIONS, json={"prompt": "ab"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["message"].startswith("max_streams: 2 calls")
            # Who watches over the server is always answered.
            assert await client.health() == {SERVING}
            for path in ("/health", "/live", "/metrics"):
                assert (await http.get(path)).status_code == 200
            first.cancel()
            for _ in range(100):
                if (await http.post(COMPLETIONS, json={"prompt": "ab"})).status_code == 200:
                    break
            else:
                raise AssertionError("a call that is over counts on")
        assert await client.text("ab", max_tokens=2) == "ab"
