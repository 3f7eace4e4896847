"""Clients that cost next to nothing, so that what is measured is the server: they count what comes
and look into it when all is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from bench.raw_grpc import RawCalls, messages_of
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb

GENERATE = "/conflux.v1.Inference/Generate"
CHANNELS = 4


def generate_requests(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[bytes]:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    messages = [pb.GenerateRequest(sampling=sampling) for _ in prompts]
    for message, prompt in zip(messages, prompts, strict=True):
        message.token_ids.ids.extend(prompt)
    return [message.SerializeToString() for message in messages]


def num_tokens(messages: Iterable[bytes]) -> int:
    return sum(len(pb.GenerateResponse.FromString(part).token_ids) for part in messages)


async def over_grpc(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Tokens of each prompt, all of them streamed at once on one connection. Raises RuntimeError
    where one fails."""
    loop, requests = asyncio.get_running_loop(), generate_requests(prompts, max_tokens)
    transport, calls = await loop.create_connection(
        lambda: RawCalls(GENERATE, requests), "127.0.0.1", port
    )
    try:
        await calls.ended
    finally:
        transport.abort()
    return [num_tokens(messages_of(received)) for received in calls.received]


async def over_grpc_library(
    port: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[int]:
    """The same with gRPC's own client, on a few connections. Raises AioRpcError."""
    requests = generate_requests(prompts, max_tokens)
    own = ("grpc.use_local_subchannel_pool", 1)
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(own,)) for _ in range(CHANNELS)
    ]

    async def one(number: int) -> int:
        method = channels[number % CHANNELS].unary_stream(GENERATE)
        return num_tokens([part async for part in method(requests[number])])

    try:
        return list(await asyncio.gather(*map(one, range(len(prompts)))))
    finally:
        for channel in channels:
            await channel.close()


async def over_http(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Tokens of each prompt, all of them streamed at once as server-sent events, and counted by
    the usage that ends a stream. Raises RuntimeError where one has none."""

    async def one(prompt: Sequence[int]) -> int:
        body = json.dumps(
            {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            return completion_tokens(await reader.read())
        finally:
            writer.close()

    return list(await asyncio.gather(*map(one, prompts)))


def completion_tokens(answer: bytes) -> int:
    """What the last usage of a stream says."""
    _, found, rest = answer.rpartition(b'"completion_tokens":')
    if not found or b"data: [DONE]" not in rest:
        raise RuntimeError(f"a stream was not whole: {answer[-300:]!r}")
    return int(rest[: rest.index(b",")])


async def samples(port: int) -> dict[str, float]:
    """Of the server's metrics, summed over labels."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("vllm:", "conflux:")):
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def step_seconds(before: dict[str, float], after: dict[str, float]) -> Any:
    """(sum of step seconds, iterations) between two looks at the metrics."""
    names = "conflux:engine_step_seconds_total", "conflux:iteration_seconds_count"
    return tuple(after[name] - before[name] for name in names)
