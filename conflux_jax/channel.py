"""A client's connection to the service: plain or encrypted, with a token or without."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import grpc

from conflux_jax.serve.auth import read_tokens

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
FLAGS = {
    "tls_ca_file": "PEM file of the authorities to trust, or of the server itself; encrypts",
    "tls_cert_file": "PEM file of the client's own certificate; encrypts",
    "tls_key_file": "PEM file of its key; encrypts",
    "token_file": "file whose first token is sent with each call",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT")
    for name, help in FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), metavar="FILE", help=help)


def open_channel(parsed: argparse.Namespace) -> grpc.Channel:
    """To be closed by its caller. Raises OSError or ConfigError where a file is not as it must be;
    nobody has been called by then."""
    token = read_tokens(parsed.token_file, "token-file")[0] if parsed.token_file else None
    files = (parsed.tls_ca_file, parsed.tls_key_file, parsed.tls_cert_file)
    if any(files):
        credentials = grpc.ssl_channel_credentials(*(path and _read(path) for path in files))
        channel = grpc.secure_channel(parsed.target, credentials, options=OPTIONS)
    else:
        channel = grpc.insecure_channel(parsed.target, options=OPTIONS)
    return channel if token is None else grpc.intercept_channel(channel, _WithToken(token))


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


class _Details(grpc.ClientCallDetails):
    """Those of a call, with other metadata; gRPC's own class has no constructor."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]):
        self.method, self.timeout = details.method, details.timeout
        given: Any = metadata
        self.metadata, self.credentials = given, details.credentials
        self.wait_for_ready, self.compression = details.wait_for_ready, details.compression


class _WithToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Not gRPC's call credentials: they go over encrypted connections only, and a proxy on the same
    machine may be what encrypts."""

    def __init__(self, token: str):
        self._field = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> _Details:
        return _Details(details, [*(details.metadata or ()), self._field])
