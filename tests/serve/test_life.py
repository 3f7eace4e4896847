"""What keeps a connection and a process alive: pings while nothing is said, liveness, readiness."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conflux_jax.serve.grpc_server import LIVENESS
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes import make_fake
from tests.serve.harness import NOT_SERVING, SERVING, Client, generate_request, serving
from tests.serve.http_harness import eventually, http_serving

PINGING = (
    ("grpc.keepalive_time_ms", 300),  # gRPC's own client makes a second of it
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
SILENCE_S = 4.5  # some pings more than a server forgives by itself


async def status_after_silence(port: int) -> grpc.StatusCode:
    """Of a call that hears nothing for a while, of a client that pings."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=PINGING) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        call = stub.Generate(generate_request("ab", max_tokens=2))
        async for _ in call:
            pass
        return await call.code()


class _Silent(pb_grpc.InferenceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        await asyncio.sleep(SILENCE_S)
        await context.write(pb.GenerateResponse(text="ab"))


async def test_a_client_may_ping_through_a_long_silent_prefill():
    """A server of gRPC's defaults takes the same client for an attack: the pings are there."""
    strict = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(_Silent(), strict)
    strict_port = strict.add_insecure_port("127.0.0.1:0")
    await strict.start()
    with make_fake() as fake:
        async with serving(fake) as client:
            fake.executor.pause_at(lambda plan: bool(plan.chunks))

            async def ours() -> grpc.StatusCode:
                asked = asyncio.create_task(status_after_silence(client.port))
                await asyncio.sleep(SILENCE_S)
                fake.executor.resume()
                return await asked

            theirs = asyncio.create_task(status_after_silence(strict_port))
            assert await ours() is grpc.StatusCode.OK
            (refused,) = await asyncio.gather(theirs, return_exceptions=True)
    await strict.stop(0.0)
    assert isinstance(refused, grpc.aio.AioRpcError)
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.details() == "Too many pings"


async def is_alive(client: Client) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
    return answer.status == SERVING


async def test_liveness_is_lost_only_where_a_restart_would_help():
    async with serving(None) as client, http_serving(None) as http:
        assert await is_alive(client)  # while the model loads
        assert (await http.plain.get("/live")).status_code == 200
        assert await client.health() == {NOT_SERVING}
    with make_fake(step_s=0.01) as fake:
        async with serving(fake, drain_s=20.0) as client, http_serving(fake) as http:
            call = client.stub.Generate(generate_request("ab", max_tokens=200, ignore_eos=True))
            await call.read()
            draining = asyncio.create_task(client.server.drain())
            await eventually(lambda: bool(fake.engine.state_message))
            assert await client.health() == {NOT_SERVING}
            assert await is_alive(client)
            assert (await http.plain.get("/live")).status_code == 200
            await asyncio.sleep(0.6)  # the watch over the engine has looked again
            assert await client.health() == {NOT_SERVING}
            fake.executor.fail_with = RuntimeError("broken")
            await draining
            async with asyncio.timeout(5.0):
                while await is_alive(client):
                    await asyncio.sleep(0.05)
            live = await http.plain.get("/live")
            assert live.status_code == 503 and "broken" in live.json()["message"]
