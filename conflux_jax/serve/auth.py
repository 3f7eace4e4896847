"""Bearer tokens: who has one of a file's may use the service."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

from conflux_jax.config import ConfigError, ServerConfig
from conflux_jax.serve.watched_files import WatchedFiles

MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 4096  # a shorter one could be guessed
COMMENT = "#"


class Unauthenticated(RuntimeError):
    """A call without a token that is known."""


class Tokens:
    """The tokens of a file, one a line; blank lines and those that begin with # are none. A change
    of the file holds from the next call on. Raises ConfigError that never quotes a token."""

    def __init__(self, path: str):
        self._files = WatchedFiles([path], lambda: _load(path))

    @classmethod
    def of(cls, config: ServerConfig) -> Tokens | None:
        return None if config.auth_token_file is None else cls(config.auth_token_file)

    def check(self, authorization: str | None) -> None:
        """`authorization`: the header, `Bearer TOKEN`; or, for browsers, which ask their user for
        it, `Basic` with the token as password and any user name. Raises Unauthenticated."""
        token = _token(authorization or "")
        if token is None:
            raise Unauthenticated("a token is needed: send 'Authorization: Bearer TOKEN'")
        digest = _digest(token)
        # Digests are of one length, and all of them are compared, so that the time says nothing.
        known = [hmac.compare_digest(digest, other) for other in self._files.current()]
        if not any(known):
            raise Unauthenticated("the token is not known here")


def _token(authorization: str) -> str | None:
    scheme, _, rest = authorization.strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip() or None
        case "basic":
            try:
                pair = base64.b64decode(rest.strip(), validate=True).decode()
            except (binascii.Error, ValueError):
                return None
            return pair.partition(":")[2] or None
        case _:
            return None


def read_tokens(path: str | Path, name: str) -> list[str]:
    """The tokens of a file. Raises ConfigError; `name`: the setting that it names."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {path}: is no text in UTF-8") from error
    tokens = []
    for number, line in enumerate(lines, 1):
        token = line.strip()
        if not token or token.startswith(COMMENT):
            continue
        plain = token.isascii() and token.isprintable() and " " not in token
        if not plain or not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
            raise ConfigError(
                f"{name}: {path}: line {number}: a token must be {MIN_TOKEN_CHARS} to "
                f"{MAX_TOKEN_CHARS} printable ASCII characters without spaces"
            )
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"{name}: {path}: has no token in it; write one on each line")
    return tokens


def _load(path: str) -> tuple[bytes, ...]:
    return tuple(_digest(token) for token in read_tokens(path, "auth_token_file"))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
