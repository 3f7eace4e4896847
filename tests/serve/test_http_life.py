"""The HTTP server under load, with clients that go, and from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from conflux_jax.config import Config, ConfigError
from conflux_jax.serve.http_server import HttpServer
from tests.fakes import HeldCodec, make_fake
from tests.scheduler.predictors import Linear
from tests.serve.http_harness import COMPLETIONS, HttpClient, eventually, http_serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"prompt": "ab", "max_tokens": 300, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[HttpClient]:
    with make_fake() as fake:
        async with http_serving(fake) as client:
            yield client


# Under load


async def test_many_streams_at_once_each_get_their_own(client: HttpClient):
    async def one(number: int) -> str:
        prompt = f"<{number}>"
        stream = await client.openai.completions.create(
            model="fake", prompt=prompt, max_tokens=len(prompt) * 3, n=1 + number % 2, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [prompt * 3, prompt * 3 if number % 2 else ""]
        return texts[0]

    answers = await asyncio.gather(*(one(number) for number in range(30)))
    assert answers == [f"<{number}>" * 3 for number in range(30)]


async def test_what_is_written_goes_out_at_once(client: HttpClient):
    await client.complete(prompt="ab", max_tokens=1)
    assert client.server.connections
    for connection in client.server.connections:
        accepted = connection.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = b'Content-Length: 32\r\n\r\n{"prompt": "ab", "max_tokens":2}'
UNFINISHED = {
    "nothing": b"",
    "half of a head": HEAD[:40],
    "half of a body": HEAD + WHOLE[:-5],
    "half of the next": HEAD + WHOLE + HEAD[:40],
}


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nope"])
@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["at once", "later"])
async def test_a_body_that_stops_being_http_ends_its_call_and_nothing_else(
    path: str, pause_s: float, caplog: pytest.LogCaptureFixture
):
    """Whether its answer has not begun, or is over."""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path.encode()
    with make_fake() as fake:
        async with http_serving(fake) as client:
            port = client.plain.base_url.port
            for parts in ([b"ZZZ\r\n"], [b"2\r\n{}\r\n", b"\x00\xff\r\n"]):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.timeout(10):
                    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
                    for part in parts:
                        await asyncio.sleep(pause_s)
                        writer.write(part)
                    answer = await _until_the_end(reader)
                writer.close()
                assert re.match(rb"HTTP/1.1 (400|404|405) ", answer)
                assert answer.count(b"HTTP/1.1 ") == 1
            await eventually(lambda: not client.server.connections)
            body = await client.complete(prompt="ab", max_tokens=2)
            assert body["choices"][0]["text"] == "ab"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
async def test_a_request_that_does_not_come_is_not_waited_for_for_ever(sent: bytes):
    """Meanwhile it may have the only place; who has asked, and reads on, is not cut."""
    with make_fake(step_s=0.01) as fake:
        async with http_serving(fake, max_streams=1, read_timeout_s=0.5) as client:
            port = client.plain.base_url.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(10):
                    started_s = time.monotonic()
                    writer.write(sent)
                    answer = await _until_the_end(reader)
            finally:
                writer.transport.abort()
            assert 0.4 < time.monotonic() - started_s < 3
            assert answer.count(b'"text":"ab"') == sent.count(WHOLE)
            await eventually(lambda: not client.server.connections)
            started_s = time.monotonic()
            body = await client.complete(prompt="ab", max_tokens=100)
            assert body["choices"][0]["text"] == "ab" * 50
            assert time.monotonic() - started_s > 0.9  # twice as long as a request may take to come
            kept = list(client.server.connections)
            await asyncio.sleep(0.7)
            assert kept and client.server.connections == kept  # idle, between two requests


async def test_texts_that_take_long_to_tokenise_hold_up_no_prompt():
    with make_fake() as fake:
        held: Any = HeldCodec(fake.engine.tokenizer)
        fake.engine.tokenizer = held  # of /tokenize; prompts have the other
        async with http_serving(fake) as client, asyncio.timeout(20):
            texts = [asyncio.create_task(client.post("/tokenize", prompt="abc")) for _ in range(50)]
            await asyncio.sleep(0.1)
            assert (await client.complete(prompt="ab", max_tokens=2))["choices"][0]["text"] == "ab"
            assert not any(text.done() for text in texts)
            held.may.set()
            assert {(await text).json()["count"] for text in texts} == {3}


async def _until_the_end(reader: asyncio.StreamReader) -> bytes:
    """All of it, from a connection that may be cut."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(4096):
            answer += part
    return answer


async def test_a_full_queue_takes_all_of_a_call_or_nothing():
    with make_fake(max_num_seqs=1, max_waiting=2, step_s=0.02) as fake:
        async with http_serving(fake) as client:
            async with client.plain.stream(
                "POST", COMPLETIONS, json={**LONG, "stream": True}
            ) as running:
                lines = running.aiter_lines()
                await anext(lines)
                response = await client.post(COMPLETIONS, **LONG, n=3)
                assert response.status_code == 429
                assert response.headers["retry-after"] == "1"
                assert "max_waiting: 2" in response.json()["error"]["message"]
                await eventually(lambda: fake.engine.num_live == 1)
            await eventually(lambda: fake.is_free)


async def test_a_refusal_says_when_half_of_the_queue_should_be_served():
    """The one slot is free after at most 300 iterations of 0.1 s: half of that, or a bit less."""
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_waiting": 1, "step_s": 0.05}
    with make_fake(predictor=Linear(base_s=0.1), **settings) as fake:
        async with http_serving(fake) as client:
            bodies = [{**LONG, "stream": True}] * 2
            streams = [client.plain.stream("POST", COMPLETIONS, json=body) for body in bodies]
            async with streams[0] as running, streams[1]:
                lines = running.aiter_lines()  # when it is collected, the stream is closed
                await anext(lines)
                response = await client.post(COMPLETIONS, **LONG)
                assert response.status_code == 429
                assert 5 < int(response.headers["retry-after"]) <= 16


# Clients that go


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"prompt": ["ab", "cd"], "n": 2}])
async def test_a_client_that_leaves_a_stream_frees_it(extra: dict[str, Any]):
    with make_fake(step_s=0.01) as fake:
        async with http_serving(fake) as client:
            body = {**LONG, "stream": True, **extra}
            async with client.plain.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                assert fake.engine.num_live
            await eventually(lambda: fake.is_free, 1.0)
            assert len(fake.executor.plans) < 150


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_client_that_leaves_before_its_reply_frees_it(waiting: bool):
    with make_fake(step_s=0.01, max_num_seqs=1) as fake:
        async with http_serving(fake) as client:
            calls = [asyncio.create_task(client.complete(**LONG)) for _ in range(1 + waiting)]
            await eventually(lambda: fake.engine.num_live == len(calls))
            for call in calls:
                call.cancel()
            await eventually(lambda: fake.is_free, 1.0)
            assert len(fake.executor.plans) < 150


async def test_an_id_of_the_clients_choosing_aborts_it():
    with make_fake() as fake:
        async with http_serving(fake) as client:
            fake.executor.pause_at(lambda plan: len(plan.decodes[0]) == 2)
            body, headers = {**LONG, "n": 2, "max_tokens": 50}, {"x-request-id": "mine"}
            call = asyncio.create_task(client.plain.post(COMPLETIONS, json=body, headers=headers))
            await asyncio.to_thread(fake.executor.wait_paused)
            aborted = fake.engine.abort("cmpl-mine-1")
            fake.executor.resume()
            assert await asyncio.wrap_future(aborted)
            choices = (await call).json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["length", "abort"]


# Life of the server


async def test_while_the_model_loads_nothing_is_served():
    async with http_serving(None) as client:
        health = await client.plain.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        for path in ("/v1/models", "/metrics"):
            assert (await client.plain.get(path)).status_code == 503
        with pytest.raises(openai.InternalServerError, match="still loading") as caught:
            await client.openai.completions.create(model="fake", prompt="x")
        assert caught.value.status_code == 503
        with make_fake() as fake:
            client.server.use(fake.engine)
            assert (await client.plain.get("/health")).json() == {"status": "ok"}
            assert (await client.complete(prompt="ab", max_tokens=2))["choices"][0]["text"] == "ab"
            await client.server.stop()


async def test_draining_finishes_streams_and_refuses_new_ones():
    with make_fake(step_s=0.005) as fake:
        async with http_serving(fake) as client:
            streams = [
                asyncio.create_task(client.events(COMPLETIONS, **{**LONG, "max_tokens": 80}))
                for _ in range(4)
            ]
            await eventually(lambda: fake.engine.num_live == 4)
            draining = asyncio.create_task(asyncio.to_thread(fake.engine.drain, 20.0))
            await eventually(lambda: bool(fake.engine.state_message))
            health = await client.plain.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            status, error = await client.error(COMPLETIONS, prompt="x")
            assert status == 503 and "shutting down" in error["message"]
            for events in await asyncio.gather(*streams):
                assert "".join(e["choices"][0]["text"] for e in events) == "ab" * 40
            assert await draining is True


@pytest.mark.parametrize("fails", [False, True])
async def test_what_the_engine_ends_is_an_error(fails: bool):
    """By its failure or at the end of a drain; before a reply, and within a stream."""
    with make_fake(step_s=0.01) as fake:
        async with http_serving(fake) as client:
            stream = asyncio.create_task(client.events(COMPLETIONS, **LONG))
            both = asyncio.create_task(client.events(COMPLETIONS, **LONG, n=2))
            reply = asyncio.create_task(client.error(COMPLETIONS, **LONG))
            await eventually(lambda: fake.engine.num_live == 4)
            if fails:
                fake.executor.fail_with = RuntimeError("out of memory")
                status, words = 500, "out of memory"
            else:
                assert await asyncio.to_thread(fake.engine.drain, 0.05) is False
                status, words = 503, "shutdown after 0.05 s"
            assert (await reply)[0] == status
            errors = [(await stream)[-1], (await both)[-1], {"error": (await reply)[1]}]
            assert all(words in error["error"]["message"] for error in errors)
            health = await client.plain.get("/health")
            assert health.json()["status"] == ("failed" if fails else "draining")


async def test_an_error_within_a_stream_raises_in_the_openai_client():
    with make_fake(step_s=0.01) as fake:
        async with http_serving(fake) as client:
            stream = await client.openai.completions.create(
                model="fake", prompt="ab", max_tokens=300, stream=True
            )
            await anext(aiter(stream))
            fake.executor.fail_with = RuntimeError("out of memory")
            with pytest.raises(openai.APIError, match="out of memory"):
                async for _ in stream:
                    pass


async def test_a_closed_engine_ends_what_waits_for_it():
    with make_fake(step_s=0.01) as fake:
        async with http_serving(fake) as client:
            call = asyncio.create_task(client.error(COMPLETIONS, **LONG))
            await eventually(lambda: fake.engine.num_live == 1)
            await asyncio.to_thread(fake.engine.close)
            status, error = await asyncio.wait_for(call, 5.0)
            assert status == 503 and "the engine was closed" in error["message"]


async def test_a_port_in_use_and_a_bad_prefix_are_errors_of_their_own():
    with make_fake() as fake:
        async with http_serving(fake) as client:
            port = client.plain.base_url.port
            with pytest.raises(OSError, match="in use"):
                await HttpServer(Config.from_flat(http_port=port)).start()
    with pytest.raises(ConfigError, match="metrics_prefix: must be letters"):
        HttpServer(Config.from_flat(metrics_prefix="a b"))
