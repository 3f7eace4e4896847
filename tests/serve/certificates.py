"""Certificate authorities and certificates of theirs, as files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Identity:
    """A certificate for HOST and its key, and the authority that vouches for it: paths."""

    cert: Path
    key: Path
    ca: Path

    def copy_to(self, other: Identity) -> None:
        """In place of what `other` is."""
        for name in ("cert", "key", "ca"):
            getattr(other, name).write_bytes(getattr(self, name).read_bytes())


def make_identity(folder: Path) -> Identity:
    """By an authority of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    identity.cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    identity.key.write_bytes(issued.private_key_pem.bytes())
    identity.ca.write_bytes(authority.cert_pem.bytes())
    return identity


def channel_credentials(ca: Path, own: Identity | None = None) -> grpc.ChannelCredentials:
    """For a client that trusts `ca` and, with `own`, shows who it is."""
    if own is None:
        return grpc.ssl_channel_credentials(ca.read_bytes())
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)


def client_context(ca: Path, own: Identity | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context
