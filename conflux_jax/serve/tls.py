"""TLS for both servers, from files in PEM form that may change while they serve.

A new connection gets the certificates that the files hold then; open ones keep theirs. With a file
of client certificate authorities, clients must show a certificate of one of them (mutual TLS).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from conflux_jax.config import ConfigError, ServerConfig
from conflux_jax.serve.watched_files import WatchedFiles


@dataclass(frozen=True)
class Certificates:
    """What the files hold, checked to belong together; and OpenSSL's form of it, for HTTP."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, self.client_ca)


class Tls:
    """The certificates of these settings. Raises ConfigError that names the file that is wrong."""

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str | None):
        self._needs_client = client_ca_file is not None
        paths = [cert_file, key_file, *([client_ca_file] if client_ca_file else [])]
        self._files = WatchedFiles(paths, lambda: _load(cert_file, key_file, client_ca_file))

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """None where the settings name no certificate."""
        cert_file, key_file = config.tls_cert_file, config.tls_key_file
        if cert_file is None:
            for name in ("tls_key_file", "tls_client_ca_file"):
                if getattr(config, name) is not None:
                    raise ConfigError(f"{name}: needs tls_cert_file")
            return None
        if key_file is None:
            raise ConfigError("tls_cert_file: needs tls_key_file")
        return cls(cert_file, key_file, config.tls_client_ca_file)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Their server asks for the certificates at each connection, on threads of gRPC's own."""
        given = self._files.current()

        def fetch() -> Any:  # None: as before
            nonlocal given
            current = self._files.current()
            if current is given:
                return None
            given = current
            return current.for_grpc()

        return grpc.dynamic_ssl_server_credentials(given.for_grpc(), fetch, self._needs_client)

    def http_context(self) -> ssl.SSLContext:
        """One whose connections are given the newest context. OpenSSL asks for it by the name that
        a client wants, whether or not the client says one."""
        context = self._files.current().context

        def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._files.current().context

        context.sni_callback = choose
        return context


def _load(cert_file: str, key_file: str, client_ca_file: str | None) -> Certificates:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 0  # a session taken up again would not be asked for its certificate
    context.options |= ssl.OP_NO_TICKET
    certificate = _read("tls_cert_file", cert_file)
    key = _read("tls_key_file", key_file)
    client_ca = None
    try:
        # Without the function OpenSSL would ask a terminal for the password of a locked key.
        context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_cert_file, tls_key_file: {cert_file} and {key_file} are no certificate and its "
            f"key in PEM form, without a password: {error}"
        ) from error
    if client_ca_file is not None:
        client_ca = _read("tls_client_ca_file", client_ca_file)
        try:
            context.load_verify_locations(client_ca_file)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca_file: {client_ca_file}: no certificates in PEM form: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificates(certificate, key, client_ca, context)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror or error}") from error
