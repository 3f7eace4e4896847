"""What one client of the storm does: each of these ends in a word for the tally, or raises what is
wrong with the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.soak import http
from tests.soak.cases import BAD_BODIES, BAD_SAMPLING, NOT_MESSAGES, Answer, Case

GENERATE = "/conflux.v1.Inference/Generate"
LONG = {"max_tokens": 300, "ignore_eos": True}
Code = grpc.StatusCode


class Wrong(AssertionError):
    """The server did what it must not."""


@dataclass
class Client:
    """Where calls go, and what is right. draw: what is left to chance."""

    grpc_port: int
    http_port: int
    channels: list[grpc.aio.Channel]
    cases: list[Case]
    answers: Mapping[int, Answer]
    draw: random.Random
    num_ids: int = field(default=0)

    @property
    def stub(self) -> Any:
        return pb_grpc.InferenceStub(self.draw.choice(self.channels))

    @property
    def case(self) -> Case:
        return self.draw.choice(self.cases)

    def check(self, case: Case, given: Any, expected: Any) -> None:
        if given != expected:
            raise Wrong(f"case {case.number} said {given!r}, and alone {expected!r}")

    def new_id(self) -> str:
        self.num_ids += 1
        return f"soak-{self.num_ids}"


def channel_to(port: int, *options: tuple[str, int]) -> grpc.aio.Channel:
    own = ("grpc.use_local_subchannel_pool", 1)  # a connection of its own
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(own, *options))


# Calls that are read to their end


async def grpc_whole(client: Client) -> str:
    case, tokens, text = client.case, [], ""
    async for message in client.stub.Generate(case.message()):
        tokens += message.token_ids
        text += message.text
    client.check(case, Answer(tuple(tokens), text), client.answers[case.number])
    return "whole"


async def grpc_pauses(client: Client) -> str:
    """A reader that takes its time in between gets all the same."""
    case, tokens = client.case, []
    async for message in client.stub.Generate(case.message()):
        tokens += message.token_ids
        await asyncio.sleep(client.draw.choice((0.0, 0.0, 0.2)))
    client.check(case, tuple(tokens), client.answers[case.number].token_ids)
    return "whole"


async def http_whole(client: Client) -> str:
    case = client.case
    status, body = await http.exchange(client.http_port, case.body())
    _expect(status == 200, f"{status}: {body!r}")
    client.check(case, json.loads(body)["choices"][0]["text"], client.answers[case.number].text)
    return "whole"


async def http_stream(client: Client) -> str:
    case = client.case
    status, body = await http.exchange(client.http_port, case.body(stream=True))
    _expect(status == 200, f"{status}: {body!r}")
    text = "".join(event["choices"][0]["text"] for event in http.events_of(body))
    client.check(case, text, client.answers[case.number].text)
    return "whole"


# Calls that are given up


async def grpc_cancel(client: Client) -> str:
    """After some messages, or none; what came until then is right."""
    case, tokens = client.case, []
    call = client.stub.Generate(case.message())
    patience = client.draw.randrange(4)
    try:
        async for message in call:
            tokens += message.token_ids
            if (patience := patience - 1) <= 0:
                break
    finally:
        call.cancel()
    expected = client.answers[case.number].token_ids
    client.check(case, tuple(tokens), expected[: len(tokens)])
    return "cancelled"


async def grpc_cancel_unread(client: Client) -> str:
    """Nothing is read, for a while."""
    call = client.stub.Generate(client.case.message(**LONG))
    await asyncio.sleep(client.draw.uniform(0.0, 0.3))
    call.cancel()
    return "cancelled"


async def grpc_deadline(client: Client) -> str:
    timeout_s = client.draw.choice((0.001, 0.01, 0.05, 0.2))
    status = await _status(client.stub.Generate(client.case.message(**LONG), timeout=timeout_s))
    _expect(status in (Code.DEADLINE_EXCEEDED, Code.OK), status)
    return "deadline"


async def grpc_abort(client: Client) -> str:
    """By its id, from another call, once it has begun."""
    name = client.new_id()
    call = client.stub.Generate(client.case.message(name, **LONG))
    last = None
    async for message in call:
        if last is None:
            await client.stub.Abort(pb.AbortRequest(request_id=name))
        last = message
    _expect(last is not None and last.finish_reason == pb.FINISH_REASON_ABORT, last)
    return "aborted"


async def grpc_connection_lost(client: Client) -> str:
    """A connection of its own, cut while several calls are in progress on it."""
    async with channel_to(client.grpc_port) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        calls = [stub.Generate(client.case.message(**LONG)) for _ in range(3)]
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        first, patience_s = asyncio.FIRST_COMPLETED, client.draw.uniform(0.0, 1.0)
        await asyncio.wait(reads, return_when=first, timeout=patience_s)
    await asyncio.gather(*reads, return_exceptions=True)
    return "connection lost"


async def http_connection_lost(client: Client) -> str:
    """Before the answer, or within it; before the whole body, at times."""
    case, draw = client.case, client.draw
    body = case.body(stream=draw.random() < 0.7, **LONG)
    sent = http.request_bytes(body)
    if draw.random() < 0.3:
        sent = sent[: draw.randrange(len(sent))]
    async with http.connection(client.http_port) as (reader, writer):
        writer.write(sent)
        try:
            async with asyncio.timeout(draw.uniform(0.0, 0.3)):
                await reader.read(draw.choice((1, 500, 5000)))
        except TimeoutError:
            pass
    return "connection lost"


# Calls that must be refused


async def grpc_bad_field(client: Client) -> str:
    bad = client.draw.choice(BAD_SAMPLING)
    status = await _status(client.stub.Generate(client.case.message(**bad)))
    _expect(status is Code.INVALID_ARGUMENT, f"{bad}: {status}")
    return "refused"


async def grpc_too_long(client: Client) -> str:
    request = pb.GenerateRequest(text="x" * client.draw.choice((400, 100_000)))
    status = await _status(client.stub.Generate(request))
    _expect(status is Code.OUT_OF_RANGE, status)
    return "refused"


async def grpc_no_message(client: Client) -> str:
    data = client.draw.choice(NOT_MESSAGES)
    method = client.draw.choice(client.channels).unary_stream(GENERATE)
    status = await _status(method(data))
    _expect(status is Code.INVALID_ARGUMENT, f"{data!r}: {status}")
    return "refused"


async def http_bad_body(client: Client) -> str:
    body = client.draw.choice(BAD_BODIES)
    status, answer = await http.exchange(client.http_port, body)
    error = json.loads(answer)["error"]
    _expect(400 <= status < 500 and error["param"], f"{body!r}: {status} {error}")
    return "refused"


async def noise(client: Client) -> str:
    """Bytes of no protocol, at either port."""
    port = client.draw.choice((client.grpc_port, client.http_port))
    async with http.connection(port) as (_, writer):
        writer.write(client.draw.randbytes(client.draw.randrange(200)))
        await asyncio.sleep(client.draw.choice((0.0, 0.05)))
    return "noise"


def _expect(condition: object, problem: object) -> None:
    if not condition:
        raise Wrong(str(problem))


async def _status(call: Any) -> grpc.StatusCode:
    """How a call ends, read to its end."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


Action = Callable[[Client], Awaitable[str]]
ACTIONS: dict[Action, float] = {
    grpc_whole: 40,
    grpc_pauses: 3,
    http_whole: 8,
    http_stream: 8,
    grpc_cancel: 10,
    grpc_cancel_unread: 2,
    grpc_deadline: 8,
    grpc_abort: 3,
    grpc_connection_lost: 1,
    http_connection_lost: 5,
    grpc_bad_field: 5,
    grpc_too_long: 2,
    grpc_no_message: 2,
    http_bad_body: 5,
    noise: 2,
}  # by weight
