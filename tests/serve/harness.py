"""A server on a port of its own: in this process over a given engine, or as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conflux_jax.config import ServerConfig
from conflux_jax.serve.grpc_server import SERVICE, GrpcServer
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes import Fake

ROOT = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def generate_request(prompt: str | list[int] | None = "abc", **fields: Any) -> pb.GenerateRequest:
    """`fields`: those of GenerateRequest, and of SamplingParams."""
    own = {
        name: fields.pop(name) for name in ("request_id", "model", "chat", "n") if name in fields
    }
    request = pb.GenerateRequest(sampling=pb.SamplingParams(**fields), **own)
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return request


@dataclass(frozen=True)
class Client:
    """A server and a channel to it."""

    server: GrpcServer
    port: int
    channel: grpc.aio.Channel
    stub: Any

    async def generate(self, *prompt: Any, **fields: Any) -> list[pb.GenerateResponse]:
        call = self.stub.Generate(generate_request(*prompt, **fields))
        return [message async for message in call]

    async def complete(self, *prompt: Any, **fields: Any) -> pb.CompleteResponse:
        return await self.stub.Complete(generate_request(*prompt, **fields))

    async def text(self, *prompt: Any, **fields: Any) -> str:
        return "".join(message.text for message in await self.generate(*prompt, **fields))

    async def health(self) -> set[int]:
        """The statuses of the whole server and of the service."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE)]
        return {(await stub.Check(request)).status for request in requests}

    async def is_free(self, fake: Fake) -> bool:
        """As clients see it: nothing waits, runs or holds a page."""
        load = await self.stub.GetLoad(pb.GetLoadRequest())
        running = load.num_waiting + load.num_prefilling + sum(g.num_decodes for g in load.groups)
        return running == 0 and all(g.free_pages == g.num_pages for g in load.groups)


@contextlib.asynccontextmanager
async def serving(fake: Fake | None, **config: Any) -> AsyncIterator[Client]:
    """`fake` None: the model is still loading."""
    server = GrpcServer(ServerConfig(**{"port": 0, **config}))
    port = await server.start()
    try:
        if fake is not None:
            await server.use(fake.engine)
        async with connect(port) as channel:
            yield Client(server, port, channel, pb_grpc.InferenceStub(channel))
    finally:
        await server.stop(0.0)


def connect(port: int) -> grpc.aio.Channel:
    limit = ("grpc.max_send_message_length", -1)
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(limit,))


@dataclass
class Server:
    """A running server process; `lines` is what it has said on stdout so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def target(self) -> str:
        return re.search(r"--target (\S+)", self.lines[-1])[1]  # type: ignore[index]

    @property
    def http_url(self) -> str:
        """Of a server that was given an HTTP port."""
        return re.search(r"https?://[^/\s]+", "\n".join(self.lines))[0]  # type: ignore[index]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr."""
        assert self.process.stderr is not None
        stderr = self.process.stderr.read()
        return self.process.wait(20), stderr


@contextlib.contextmanager
def running(
    *flags: str, module: str = "tests.serve.fake_server", ready: bool = True, **environment: str
) -> Iterator[Server]:
    """A server process on a free port; with `ready`, once it has said that it serves."""
    command = [sys.executable, "-m", module, "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Server(process)
    try:
        assert process.stdout is not None
        if ready:
            for line in process.stdout:
                server.lines.append(line.rstrip())
                if "--target" in line:
                    break
            else:
                raise AssertionError(process.communicate())
        yield server
    finally:
        process.kill()
        process.wait(20)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
