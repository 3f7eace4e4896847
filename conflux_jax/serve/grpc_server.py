"""The gRPC server: `conflux.v1.Inference`, health and reflection, on one asyncio loop; and vLLM's
contract, where the package that defines it is installed.

The server listens before its model is loaded, and answers UNAVAILABLE until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from conflux_jax.config import ServerConfig
from conflux_jax.engine import Engine
from conflux_jax.serve.gate import Gate, GrpcGate
from conflux_jax.serve.grpc_decoding import DecodingInterceptor
from conflux_jax.serve.inference_service import EngineHolder, InferenceService
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from conflux_jax.serve.tls import Tls

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
LIVENESS = "liveness"  # a name of health's: SERVING unless a restart would help
HEALTH_PERIOD_S = 0.5
MAX_PENDING_CALLS = 50_000
MIN_PING_INTERVAL_MS = 250  # of a client; one that pings more often is taken for an attack
CLOSE_GRACE_S = 2.0  # for handlers to send the final statuses, once every request is over


class GrpcServer:
    """Binds, listens, takes an engine once there is one, drains and stops.

    Health, for the whole server ("") and each service: SERVING only while there is an engine that
    is healthy and takes requests; for LIVENESS also while it loads or drains. gate: shared with
    the other server of the process, if any. Raises ConfigError for a bad certificate or file of
    tokens.
    """

    def __init__(self, config: ServerConfig, gate: Gate | None = None):
        self._config, self._tls = config, Tls.of(config)
        limit = config.max_message_mib * 2**20
        self._server = grpc.aio.server(
            interceptors=(GrpcGate(gate or Gate(config)), DecodingInterceptor()),
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # gRPC cancels calls at random once a thousand wait for their handlers to start, as
                # they do where thousands come at once. What is too much says the engine.
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
                # A peer that vanished is noticed. A client that waits for a long prefill, or keeps
                # a connection for later, may ask as often as this whether we are there.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ),
        )
        self._holder = EngineHolder(config)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._monitor: asyncio.Task[None] | None = None
        service = InferenceService(self._holder)
        pb_grpc.add_InferenceServicer_to_server(service, self._server)
        self._services = (SERVICE, *add_vllm_service(self._holder, self._server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Bind and listen; returns the port. Raises OSError when the address cannot be had."""
        host, port = self._config.host, self._config.port
        _check_free(host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await self._set_health(serving=False)
        await self._set_alive(True)
        await self._server.start()
        return bound

    async def use(self, engine: Engine) -> None:
        """Serve with this engine, which stays its caller's to close."""
        self._holder.engine = engine
        await self._set_health(serving=engine.healthy)
        self._monitor = asyncio.create_task(self._watch(engine))

    async def drain(self) -> bool:
        """Health false, no new requests, running ones finish within `drain_s` or are ended. True if
        all finished. The server still answers, so that clients hear of it."""
        await self._set_health(serving=False)
        engine = self._holder.engine
        return engine is None or await asyncio.to_thread(engine.drain, float(self._config.drain_s))

    async def stop(self, grace_s: float = CLOSE_GRACE_S) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
        await self._server.stop(grace_s)
        self._holder.close()

    async def _watch(self, engine: Engine) -> None:
        healthy = True
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            if engine.healthy != healthy:
                healthy = not healthy
                await self._set_alive(healthy)
                await self._set_health(healthy and not engine.state_message)

    async def _set_health(self, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def _set_alive(self, alive: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(LIVENESS, statuses.SERVING if alive else statuses.NOT_SERVING)


def add_vllm_service(holder: EngineHolder, server: grpc.aio.Server) -> tuple[str, ...]:
    """Its name, if the package with its messages is installed (the extra `vllm-grpc`)."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        return ()
    from conflux_jax.serve import vllm_grpc

    return (vllm_grpc.add_to_server(holder, server),)


def _check_free(host: str, port: int) -> None:
    """Raises OSError as binding would, before gRPC tries and logs it in its own way."""
    if not host:
        raise OSError("host must not be empty")
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
