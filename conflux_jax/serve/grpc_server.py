"""The gRPC service: `conflux.v1.Inference`, health and reflection, on one asyncio loop.

The server listens before its model is loaded, and answers UNAVAILABLE until then. Handlers write
with `context.write` and are no generators: a cancelled call then raises inside the handler, which
closes its stream there and then, and so frees the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from conflux_jax.config import ServerConfig
from conflux_jax.engine import Engine, EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.request import FinishReason
from conflux_jax.serve import messages
from conflux_jax.serve.errors import EXPECTED_ERRORS, status_of
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_PERIOD_S = 0.5
CLOSE_GRACE_S = 2.0  # for handlers to send the final statuses, once every request is over


class InferenceService(pb_grpc.InferenceServicer):
    """`engine` is None while the model is loading."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        try:
            await self._generate(request, context)
        except EXPECTED_ERRORS as error:
            await _refuse(context, error)

    async def _generate(self, message: pb.GenerateRequest, context: Any) -> None:
        engine = self._ready()
        request = await asyncio.to_thread(messages.prepare, engine, message)
        num_tokens = 0
        with await engine.submit(request) as stream:
            await context.send_initial_metadata((("x-request-id", _header(request.request_id)),))
            async for delta in stream:
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineFailed(delta.message)
                num_tokens += len(delta.token_ids)
                await context.write(messages.response_of(request, delta, num_tokens))
                if delta.finish_reason is FinishReason.ABORT and delta.message:
                    raise Unavailable(delta.message)  # not the client's doing: the server ends

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        try:
            found = await asyncio.wrap_future(self._ready().abort(request.request_id))
        except EXPECTED_ERRORS as error:
            await _refuse(context, error)
        return pb.AbortResponse(found=found)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> Any:
        try:
            return messages.model_info_of(self._ready().info)
        except EXPECTED_ERRORS as error:
            await _refuse(context, error)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> Any:
        try:
            engine = self._ready()
            load = await asyncio.wrap_future(engine.load())
            return messages.load_of(load, engine.info, accepting=not engine.state_message)
        except EXPECTED_ERRORS as error:
            await _refuse(context, error)

    def _ready(self) -> Engine:
        if self.engine is None:
            raise Unavailable("the model is still loading")
        return self.engine


class GrpcServer:
    """Binds, listens, takes an engine once there is one, drains and stops.

    Health, for the whole server ("") and the service: SERVING only while there is an engine that
    is healthy and takes requests.
    """

    def __init__(self, config: ServerConfig):
        self._config = config
        limit = config.max_message_mib * 2**20
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # A peer that vanished is noticed, and a client may wait for a long prefill.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        self._service = InferenceService()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._monitor: asyncio.Task[None] | None = None
        pb_grpc.add_InferenceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Bind and listen; returns the port. Raises OSError when the address cannot be had."""
        host, port = self._config.host, self._config.port
        _check_free(host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await self._set_health(serving=False)
        await self._server.start()
        return bound

    async def use(self, engine: Engine) -> None:
        """Serve with this engine, which stays its caller's to close."""
        self._service.engine = engine
        await self._set_health(serving=engine.healthy)
        self._monitor = asyncio.create_task(self._watch(engine))

    async def drain(self) -> bool:
        """Health false, no new requests, running ones finish within `drain_s` or are ended. True if
        all finished. The server still answers, so that clients hear of it."""
        await self._health.enter_graceful_shutdown()
        engine = self._service.engine
        return engine is None or await asyncio.to_thread(engine.drain, float(self._config.drain_s))

    async def stop(self, grace_s: float = CLOSE_GRACE_S) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
        await self._server.stop(grace_s)

    async def _watch(self, engine: Engine) -> None:
        serving = True
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            if engine.healthy != serving:
                serving = not serving
                await self._set_health(serving)

    async def _set_health(self, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _check_free(host: str, port: int) -> None:
    """Raises OSError as binding would, before gRPC tries and logs it in its own way."""
    if port == 0:
        return
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _header(text: str) -> str:
    """As metadata may carry it: printable ASCII."""
    return text.encode("ascii", "backslashreplace").decode()


async def _refuse(context: Any, error: Exception) -> NoReturn:
    await context.abort(status_of(error), str(error))
    raise AssertionError("abort raises")
