"""The table of status codes in docs/operations.md: every row is provoked, and none is missing."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from conflux_jax.serve.errors import STATUS_CODES
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from tests.fakes import make_fake
from tests.scheduler.predictors import Linear
from tests.serve.harness import ROOT, generate_request, serving
from tests.serve.test_grpc import LONG, start


def table() -> list[tuple[str, str]]:
    """(status, when) of every row."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.partition("\n## gRPC\n")[2].partition("\n## ")[0]
    rows = section.partition("| status | when |\n| --- | --- |\n")[2].partition("\n\n")[0]
    return [(row[1], row[2]) for row in re.finditer(r"^\| (\w+) \| (.+) \|$", rows, re.MULTILINE)]


async def status_of(call: Any) -> grpc.StatusCode:
    """Of a unary call, or of a stream read to its end."""
    try:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


async def answered() -> grpc.StatusCode:
    with make_fake() as fake:
        async with serving(fake) as client:
            return await status_of(client.stub.Generate(generate_request()))


async def cancelled() -> grpc.StatusCode:
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            (call,) = await start(client, 1)
            call.cancel()
            return await status_of(call)


async def refused(**fields: Any) -> grpc.StatusCode:
    with make_fake() as fake:
        async with serving(fake) as client:
            return await status_of(client.stub.Complete(generate_request(**fields)))


async def deadline_passed() -> grpc.StatusCode:
    with make_fake(step_s=0.01) as fake:
        async with serving(fake) as client:
            call = client.stub.Generate(generate_request(**LONG), timeout=0.2)
            assert (await anext(aiter(call))).token_ids
            return await status_of(call)


async def deadline_refused() -> grpc.StatusCode:
    with make_fake(predictor=Linear(base_s=20.0)) as fake:
        async with serving(fake) as client:
            async with asyncio.timeout(3.0):
                call = client.stub.Generate(generate_request(**LONG), timeout=10.0)
                return await status_of(call)


async def id_in_use() -> grpc.StatusCode:
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            await start(client, 1, request_id="same")
            return await status_of(client.stub.Complete(generate_request(request_id="same")))


async def queue_full() -> grpc.StatusCode:
    with make_fake(max_num_seqs=1, max_waiting=1, step_s=0.01) as fake:
        async with serving(fake) as client:
            await start(client, 2)
            return await status_of(client.stub.Complete(generate_request()))


async def too_large() -> grpc.StatusCode:
    with make_fake() as fake:
        async with serving(fake, max_message_mib=1) as client:
            return await status_of(client.stub.Complete(generate_request("x" * 2_000_000)))


async def too_many_calls() -> grpc.StatusCode:
    with make_fake(step_s=0.01) as fake:
        async with serving(fake, max_streams=1) as client:
            await start(client, 1)
            return await status_of(client.stub.Complete(generate_request()))


async def no_token() -> grpc.StatusCode:
    with make_fake() as fake, tempfile.NamedTemporaryFile("w") as tokens:
        tokens.write("0123456789abcdef\n")
        tokens.flush()
        async with serving(fake, auth_token_file=tokens.name) as client:
            return await status_of(client.stub.Complete(generate_request()))


async def no_estimate() -> grpc.StatusCode:
    with make_fake() as fake:
        async with serving(fake) as client:
            return await status_of(client.stub.Estimate(pb.EstimateRequest(num_tokens=5)))


async def no_answer() -> grpc.StatusCode:
    with make_fake() as fake:
        async with serving(fake) as client:
            channel: Any = client.channel
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            return await status_of(stub.Embed(vllm_engine_pb2.EmbedRequest()))


async def engine_fails() -> grpc.StatusCode:
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            (call,) = await start(client, 1)
            fake.executor.fail_with = RuntimeError("out of memory")
            return await status_of(call)


async def loading() -> grpc.StatusCode:
    async with serving(None) as client:
        return await status_of(client.stub.GetLoad(pb.GetLoadRequest()))


async def draining() -> grpc.StatusCode:
    with make_fake(step_s=0.01) as fake:
        async with serving(fake, drain_s=0.3) as client:
            (call,) = await start(client, 1)
            drain = asyncio.create_task(client.server.drain())
            while not fake.engine.state_message:
                await asyncio.sleep(0.005)
            late = await status_of(client.stub.Complete(generate_request()))
            assert not await drain
            running = await status_of(call)
            assert late is running
            return running


async def engine_gone() -> grpc.StatusCode:
    """It hangs: the watchdog gives it up, and what ran then ends as failed."""
    with make_fake(engine={"stall_limit_s": 0.2}) as fake:
        fake.executor.pause_at(lambda plan: True)
        async with serving(fake) as client:
            hanging = client.stub.Complete(generate_request(**LONG))
            assert await status_of(hanging) is grpc.StatusCode.INTERNAL
            return await status_of(client.stub.Complete(generate_request()))


SCENARIOS: dict[tuple[str, str], Callable[[], Awaitable[grpc.StatusCode]]] = {
    ("OK", "the answer"): answered,
    ("CANCELLED", "the client cancels"): cancelled,
    ("INVALID_ARGUMENT", "a field is wrong"): lambda: refused(temperature=-1.0),
    ("DEADLINE_EXCEEDED", "the client's deadline passes"): deadline_passed,
    ("DEADLINE_EXCEEDED", "at once"): deadline_refused,
    ("NOT_FOUND", "another `model`"): lambda: refused(model="gpt-5"),
    ("ALREADY_EXISTS", "another request has this `request_id`"): id_in_use,
    ("RESOURCE_EXHAUSTED", "`max_waiting` requests"): queue_full,
    ("RESOURCE_EXHAUSTED", "a message is larger"): too_large,
    ("RESOURCE_EXHAUSTED", "`max_streams` calls"): too_many_calls,
    ("UNAUTHENTICATED", "no token"): no_token,
    ("FAILED_PRECONDITION", "`Estimate` with neither"): no_estimate,
    ("OUT_OF_RANGE", "the prompt can never fit"): lambda: refused(prompt="x" * 2000),
    ("UNIMPLEMENTED", "a call of vLLM's contract"): no_answer,
    ("INTERNAL", "the engine fails"): engine_fails,
    ("UNAVAILABLE", "the model is still loading"): loading,
    ("UNAVAILABLE", "the server drains"): draining,
    ("UNAVAILABLE", "the engine has failed"): engine_gone,
}


@pytest.mark.parametrize("row", table(), ids=lambda row: "-".join(row)[:60])
async def test_every_row_happens_as_it_says(row: tuple[str, str]):
    status, when = row
    found = [scenario for (s, words), scenario in SCENARIOS.items() if when.startswith(words)]
    assert len(found) == 1, f"{len(found)} scenarios for the row {when!r}"
    assert (await found[0]()).name == status


def test_the_table_has_every_status_that_the_server_gives():
    rows = table()
    assert len(rows) == len(SCENARIOS)
    for status, words in SCENARIOS:
        assert any(row[0] == status and row[1].startswith(words) for row in rows), words
    assert {code.name for _, code in STATUS_CODES} <= {status for status, _ in rows}
