"""TLS and mutual TLS over gRPC and HTTP, with files that change while they are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from conflux_jax import client
from conflux_jax.config import Config, ConfigError, ServerConfig
from conflux_jax.serve.grpc_server import GrpcServer
from conflux_jax.serve.http_server import HttpServer
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from conflux_jax.serve.tls import Tls
from tests.fakes import make_fake
from tests.serve.certificates import (
    HOST,
    Identity,
    channel_credentials,
    client_context,
    make_identity,
)

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class GrpcClient:
    def __init__(self, port: int, ca: Path, own: Identity | None = None):
        credentials = channel_credentials(ca, own)
        target = f"{HOST}:{port}"
        self._channel = grpc.aio.secure_channel(target, credentials, options=OWN_CONNECTION)
        self._stub: Any = pb_grpc.InferenceStub(self._channel)

    async def ask(self) -> bool:
        try:
            answer = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return answer.model == "fake"

    async def close(self) -> None:
        await self._channel.close()


class HttpsClient:
    def __init__(self, port: int, ca: Path, own: Identity | None = None):
        base = f"https://{HOST}:{port}"
        self._http = httpx.AsyncClient(base_url=base, verify=client_context(ca, own))

    async def ask(self) -> bool:
        try:
            answer = await self._http.get("/v1/models")
        except httpx.TransportError:
            return False
        return answer.json()["data"][0]["id"] == "fake"

    async def close(self) -> None:
        await self._http.aclose()


CLIENTS = {"grpc": GrpcClient, "http": HttpsClient}


@contextlib.asynccontextmanager
async def serving(
    kind: str, identity: Identity, client_ca: Path | None = None
) -> AsyncIterator[Callable[..., Any]]:
    """A server with these files, as a function of (ca, own) that makes a client of it."""
    flags: dict[str, Any] = {
        "tls_cert_file": str(identity.cert),
        "tls_key_file": str(identity.key),
    }
    if client_ca is not None:
        flags["tls_client_ca_file"] = str(client_ca)
    config = Config.from_flat(port=0, http_port=0, **flags)
    with make_fake() as fake:
        server: Any = GrpcServer(config.server) if kind == "grpc" else HttpServer(config)
        port = await server.start()
        clients: list[Any] = []

        def connect(ca: Path, own: Identity | None = None) -> Any:
            clients.append(CLIENTS[kind](port, ca, own))
            return clients[-1]

        try:
            begun = server.use(fake.engine)
            if begun is not None:
                await begun
            yield connect
        finally:
            for one in clients:
                await one.close()
            await server.stop()


async def is_plainly_served(port: int) -> bool:
    async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=OWN_CONNECTION) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        try:
            await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        except grpc.aio.AioRpcError:
            return False
    return True


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, Identity]:
    """Two that know nothing of each other."""
    folder = tmp_path_factory.mktemp("certificates")
    return make_identity(folder / "one"), make_identity(folder / "other")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_only_who_trusts_the_certificate_is_served(kind: str, folders):
    one, other = folders
    async with serving(kind, one) as connect:
        assert await connect(one.ca).ask()
        assert not await connect(other.ca).ask()


async def test_a_server_with_a_certificate_speaks_nothing_else(folders):
    one, _ = folders
    config = ServerConfig(port=0, tls_cert_file=str(one.cert), tls_key_file=str(one.key))
    with make_fake() as fake:
        server = GrpcServer(config)
        port = await server.start()
        await server.use(fake.engine)
        assert not await is_plainly_served(port)
        await server.stop(0.0)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_with_an_authority_for_clients_each_must_show_a_certificate(kind: str, folders):
    one, other = folders
    async with serving(kind, one, client_ca=other.ca) as connect:
        assert await connect(one.ca, other).ask()
        assert not await connect(one.ca).ask()
        assert not await connect(one.ca, one).ask()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_changed_files_hold_for_new_connections(kind: str, folders, tmp_path: Path, caplog):
    one, other = folders
    served = make_identity(tmp_path)
    one.copy_to(served)
    async with serving(kind, served, client_ca=served.ca) as connect:
        early = connect(one.ca, one)
        assert await early.ask()
        # Half of a change: a certificate without its key. The last good pair is served on.
        served.cert.write_bytes(other.cert.read_bytes())
        for _ in range(2):
            assert await connect(one.ca, one).ask()
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and "tls_cert_file, tls_key_file" in errors[0].getMessage()
        other.copy_to(served)
        assert await connect(other.ca, other).ask()
        assert not await connect(other.ca, one).ask()  # whom the old authority vouched for
        assert not await connect(one.ca, one).ask()
        assert await early.ask()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings that are right, to be made wrong."""
    identity = make_identity(tmp_path)
    return {
        "tls_cert_file": str(identity.cert),
        "tls_key_file": str(identity.key),
        "tls_client_ca_file": str(identity.ca),
    }


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_a_file_that_is_missing_or_wrong_is_named(files: dict[str, Any], name: str):
    assert Tls.of(ServerConfig(**files)) is not None
    path = Path(files[name])
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError) as caught:
        Tls.of(ServerConfig(**files))
    assert name in str(caught.value) and str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=f"^{name}: {path}: No such file or directory$"):
        Tls.of(ServerConfig(**files))


def test_settings_that_need_each_other_say_so(files: dict[str, Any]):
    assert Tls.of(ServerConfig()) is None
    with pytest.raises(ConfigError, match="tls_cert_file: needs tls_key_file"):
        Tls.of(ServerConfig(tls_cert_file=files["tls_cert_file"]))
    for name in ("tls_key_file", "tls_client_ca_file"):
        with pytest.raises(ConfigError, match=f"{name}: needs tls_cert_file"):
            Tls.of(Config.from_flat(**{name: files[name]}).server)


async def test_the_client_speaks_tls_and_shows_a_certificate(folders, capsys):
    one, other = folders
    config = ServerConfig(
        port=0,
        tls_cert_file=str(one.cert),
        tls_key_file=str(one.key),
        tls_client_ca_file=str(other.ca),
    )
    with make_fake() as fake:
        server = GrpcServer(config)
        port = await server.start()
        await server.use(fake.engine)
        flags = ["--target", f"{HOST}:{port}", "--prompt", "ab", "--max-tokens", "3"]
        flags += ["--tls-ca-file", str(one.ca)]
        own = ["--tls-cert-file", str(other.cert), "--tls-key-file", str(other.key)]
        assert await asyncio.to_thread(client.main, flags + own) == 0
        assert capsys.readouterr().out == "aba\n"
        assert await asyncio.to_thread(client.main, flags) == 1
        assert capsys.readouterr().err.startswith("error: ")
        assert await asyncio.to_thread(client.main, [*flags, "--tls-ca-file", "none.pem"]) == 1
        assert "none.pem" in capsys.readouterr().err
        await server.stop(0.0)
