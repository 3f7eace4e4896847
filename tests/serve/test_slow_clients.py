"""Clients that stop reading: what waits for them is bounded, nobody else notices, and in the end
they are told, or cut off."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import grpc

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes import make_fake
from tests.serve.harness import Client, generate_request, serving
from tests.serve.http_harness import HttpClient, eventually, http_serving

# With twenty alternatives a token, each message has 300 bytes and more.
WORDY = {"max_tokens": 900, "ignore_eos": True, "logprobs": 20}
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))


def small_channel(client: Client) -> grpc.aio.Channel:
    """A connection on which little is under way."""
    own = (("grpc.use_local_subchannel_pool", 1), *SMALL_WINDOW)
    return grpc.aio.insecure_channel(f"127.0.0.1:{client.port}", options=own)


async def rest(call: Any) -> tuple[list[pb.GenerateResponse], grpc.StatusCode, str]:
    """All that is left, and how it ends."""
    messages = []
    try:
        async for message in call:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error.code(), error.details() or ""
    return messages, grpc.StatusCode.OK, ""


async def test_a_grpc_stream_that_is_not_read_ends_and_says_so():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake, max_unread_tokens=50) as client, small_channel(client) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)
            call = stub.Generate(generate_request("ab", **WORDY))
            await call.initial_metadata()
            await eventually(lambda: not fake.engine.num_live)
            assert len(await client.text("cd", max_tokens=40)) == 40
            messages, status, details = await rest(call)
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_unread_tokens: 50 tokens were left unread" in details
            tokens = [i for message in messages for i in message.token_ids]
            assert 50 < len(tokens) < 900
            assert bytes(tokens) == (b"ab" * 450)[: len(tokens)]
            assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT
            assert await client.is_free(fake)


async def test_a_grpc_stream_that_is_never_read_is_left():
    """Though it is at its end for the engine, who has handed out all of it."""
    with make_fake() as fake:
        config = {"max_unread_tokens": 1000, "write_timeout_s": 0.3}
        async with serving(fake, **config) as client, small_channel(client) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)
            call = stub.Generate(generate_request("ab", **(WORDY | {"max_tokens": 500})))
            await call.initial_metadata()
            await eventually(lambda: not fake.engine.num_live)
            await asyncio.sleep(0.6)
            messages, status, details = await rest(call)
            assert 0 < len(messages) < 500
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "write_timeout_s: nothing was read for 0.3 s" in details


async def unread_stream(client: HttpClient) -> tuple[Any, Any]:
    """A stream of which only the head is read, over buffers that hold little."""
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        port = client.plain.base_url.port
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=raw.dup(), limit=4096)
    await eventually(lambda: bool(client.server.connections))
    for connection in client.server.connections:
        accepted = connection.get_extra_info("socket")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps({"prompt": "ab", "stream": True, **WORDY}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    transport: Any = writer.transport
    transport.pause_reading()
    return reader, writer


async def test_an_http_stream_that_is_not_read_ends_and_says_so():
    with make_fake(step_s=0.001) as fake:
        async with http_serving(fake, max_unread_tokens=50) as client:
            reader, writer = await unread_stream(client)
            await eventually(lambda: not fake.engine.num_live)
            writer.transport.resume_reading()
            said = (await reader.read()).decode()
            writer.close()
            assert '"code":"read_too_slowly"' in said
            assert "max_unread_tokens: 50 tokens were left unread" in said
            assert "data: [DONE]" in said
            assert await asyncio.to_thread(lambda: fake.is_free)


async def test_an_http_stream_that_is_never_read_is_cut():
    with make_fake() as fake:
        config = {"max_unread_tokens": 1000, "write_timeout_s": 0.3}
        async with http_serving(fake, **config) as client:
            _, writer = await unread_stream(client)
            await eventually(lambda: not fake.engine.num_live)
            await eventually(lambda: not client.server.connections)
            writer.transport.abort()
            assert await asyncio.to_thread(lambda: fake.is_free)
