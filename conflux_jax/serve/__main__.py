"""`python -m conflux_jax.serve --config configs/x.yaml [--model ... --port ... --http-port ...]`

Binds its ports, loads and compiles with a progress bar, prints a line to paste, serves. SIGTERM or
SIGINT: health false, no new requests, running ones finish within `drain_s`, exit 0; a second signal
ends the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from conflux_jax.build import Progress, build_engine
from conflux_jax.config import Config, ConfigError, ServerConfig
from conflux_jax.engine import Engine
from conflux_jax.models.spec import ModelError
from conflux_jax.platform import python_command
from conflux_jax.progress import ProgressBar
from conflux_jax.serve.file_limit import raise_file_limit
from conflux_jax.serve.gate import Gate
from conflux_jax.serve.grpc_server import CLOSE_GRACE_S, GrpcServer
from conflux_jax.serve.logs import ServerLog
from conflux_jax.serve.request_log import RequestLog
from conflux_jax.timeline import TimelineFile, check_path

if TYPE_CHECKING:
    from conflux_jax.serve.http_server import HttpServer

LOGGER = logging.getLogger("conflux_jax.serve")
Builder = Callable[[Config, Progress], Engine]
ANY_ADDRESS = ("0.0.0.0", "::")


def main(arguments: Sequence[str] | None = None, build: Builder = build_engine) -> int:
    """Serve until a signal; returns the exit code. What is wrong with a setting, the port or the
    model is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.serve", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    Config.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        config = Config.from_arguments(parsed)
        with ServerLog(config.server) as log:
            return asyncio.run(serve(config, build, log))
    except (ConfigError, ModelError, ImportError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1


async def serve(config: Config, build: Builder, log: ServerLog) -> int:
    raise_file_limit(config.server)
    signals = _Signals(log)
    timeline = _Timeline(config)
    gate = Gate(config.server)
    server, http = GrpcServer(config.server, gate), _http_server(config, gate)
    ports = [await _bound(config.server.host, config.server.port, server.start)]
    try:
        if http is not None:
            ports.append(await _bound(config.server.host, config.server.http_port, http.start))
        warn_of_exposure(config.server)
        progress = ProgressBar() if config.server.log_format == "text" else _LoggedProgress()
        loading = _in_daemon_thread(lambda: build(config, progress))
        await asyncio.wait({loading, signals.first}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await _stop(server, http, 0)
            # A compilation cannot be interrupted.
            _exit_now(log, 0, "stopped while loading")
        engine = loading.result()
    except BaseException:
        await _stop(server, http, 0)
        raise
    with engine, timeline.of(engine):
        # What is loaded stays: Python's collector of cycles need not go through it again and again.
        gc.collect()
        gc.freeze()
        RequestLog(config.server, engine)
        await server.use(engine)
        if http is not None:
            http.use(engine)
        print(greeting(engine.info.name, config.server, *ports), flush=True)
        await signals.first
        LOGGER.info("draining for at most %g s", config.server.drain_s)
        finished = await server.drain()
        LOGGER.info("drained" if finished else "the time to drain is over: ended what still ran")
        await _stop(server, http)
    return 0


def _http_server(config: Config, gate: Gate) -> HttpServer | None:
    """Imported only where it is wanted: it takes a second."""
    if config.server.http_port is None:
        return None
    from conflux_jax.serve.http_server import HttpServer

    return HttpServer(config, gate)


async def _bound(host: str, port: int | None, start: Callable[[], Awaitable[int]]) -> int:
    try:
        return await start()
    except (OSError, UnicodeError) as error:  # a name that is none in any encoding
        why = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host}:{port}: {why}") from error


async def _stop(
    server: GrpcServer, http: HttpServer | None, grace_s: float = CLOSE_GRACE_S
) -> None:
    await asyncio.gather(server.stop(grace_s), *([] if http is None else [http.stop()]))


def greeting(model: str, config: ServerConfig, port: int, http_port: int | None = None) -> str:
    """What serves, and lines to paste: to this machine, by whoever may read the server's files."""
    host = "127.0.0.1" if config.host in ANY_ADDRESS else config.host
    host = f"[{host}]" if ":" in host else host
    lines = [f"Serving {model} with gRPC on {config.host}:{port}"]
    if http_port is not None:
        lines[0] += f" and HTTP on {config.host}:{http_port}"
        body = json.dumps({"prompt": "The capital of France is"})
        lines.append(
            f"curl {_curl_flags(config)}://{host}:{http_port}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{body}'"
        )
    lines[0] += ". To talk to it:"
    client = f"{python_command()} -m conflux_jax.client --target {host}:{port}"
    client += "".join(f" {flag}" for flag in _client_flags(config))
    return "\n".join([*lines, client + ' --prompt "The capital of France is"'])


def _curl_flags(config: ServerConfig) -> str:
    """What comes before `://` in a line for curl."""
    flags = []
    if config.tls_cert_file is not None:
        flags.append(f"--cacert {shlex.quote(config.tls_cert_file)}")
        if config.tls_client_ca_file is not None:
            flags.append("--cert CERT.pem --key KEY.pem")
    if config.auth_token_file is not None:
        flags.append('-H "Authorization: Bearer $TOKEN"')
    return " ".join([*flags, "http" if config.tls_cert_file is None else "https"])


def _client_flags(config: ServerConfig) -> list[str]:
    flags = []
    if config.tls_cert_file is not None:
        flags.append(f"--tls-ca-file {shlex.quote(config.tls_cert_file)}")
        if config.tls_client_ca_file is not None:
            flags.append("--tls-cert-file CERT.pem --tls-key-file KEY.pem")
    if config.auth_token_file is not None:
        flags.append(f"--token-file {shlex.quote(config.auth_token_file)}")
    return flags


def warn_of_exposure(config: ServerConfig) -> None:
    """Whoever reaches the ports is served, so say it where that may be other machines."""
    missing = []
    if config.tls_cert_file is None:
        missing.append("encrypted (tls_cert_file)")
    if config.auth_token_file is None and config.tls_client_ca_file is None:
        missing.append("authenticated (auth_token_file or tls_client_ca_file)")
    if missing and not is_loopback(config.host):
        LOGGER.warning(
            "host %s may be reached from other machines, and requests are not %s",
            config.host,
            " nor ".join(missing),
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Timeline:
    """With --timeline, SIGUSR1 writes it; so does the end of `of`, however it comes. Without, the
    signal does nothing: it would end the process. Raises ConfigError for a file that cannot be
    made."""

    def __init__(self, config: Config):
        self._settings = config.server
        self._file: TimelineFile | None = None
        if self._settings.timeline is not None:
            check_path(self._settings.timeline)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._on_signal)

    @contextlib.contextmanager
    def of(self, engine: Engine) -> Iterator[None]:
        if self._settings.timeline is None:
            yield
            return
        most = self._settings.timeline_iterations
        self._file = TimelineFile(self._settings.timeline, most, engine)
        try:
            yield
        finally:
            self._write()

    def _on_signal(self) -> None:
        if self._settings.timeline is None:
            print("timeline: needs --timeline FILE", file=sys.stderr, flush=True)
        elif self._file is None:
            print("timeline: nothing has run yet", file=sys.stderr, flush=True)
        else:
            threading.Thread(target=self._write, name="conflux-timeline", daemon=True).start()

    def _write(self) -> None:
        assert self._file is not None
        try:
            message = f"{self._file.write()} iterations in {self._file.path}"
        except OSError as error:
            message = f"cannot be written: {error}"
        print(f"timeline: {message}", file=sys.stderr, flush=True)


class _Signals:
    """`first` is done at the first SIGTERM or SIGINT; the second one ends the process."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first.done():
            _exit_now(self._log, 128 + number, "ended by a second signal")
        self.first.set_result(None)


def _in_daemon_thread(work: Callable[[], Engine]) -> asyncio.Future[Engine]:
    """Run `work` on a thread that does not keep the process alive, as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, name="conflux-build", daemon=True).start()
    return future


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _LoggedProgress:
    """For a log whose lines are all of one form: where a stage begins, and where it ends."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or done == total:
            self._stage = stage
            fields = {"stage": stage, "done": done, "total": total}
            LOGGER.info("loading", extra={"fields": fields})


def _exit_now(log: ServerLog, code: int, message: str) -> NoReturn:
    LOGGER.info(message)
    log.finish()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
