"""`python -m conflux_jax.serve --config configs/x.yaml [--model ... --port ... --http-port ...]`

Binds its ports, loads and compiles with a progress bar, prints a line to paste, serves. SIGTERM or
SIGINT: health false, no new requests, running ones finish within `drain_s`, exit 0; a second signal
ends the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from conflux_jax.build import Progress, build_engine
from conflux_jax.config import Config, ConfigError, ServerConfig
from conflux_jax.engine import Engine
from conflux_jax.models.spec import ModelError
from conflux_jax.platform import python_command
from conflux_jax.progress import ProgressBar
from conflux_jax.serve.grpc_server import CLOSE_GRACE_S, GrpcServer

if TYPE_CHECKING:
    from conflux_jax.serve.http_server import HttpServer

Builder = Callable[[Config, Progress], Engine]
ANY_ADDRESS = ("0.0.0.0", "::")


def main(arguments: Sequence[str] | None = None, build: Builder = build_engine) -> int:
    """Serve until a signal; returns the exit code. What is wrong with a setting, the port or the
    model is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m conflux_jax.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    Config.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        return asyncio.run(serve(Config.from_arguments(parsed), build))
    except (ConfigError, ModelError, ImportError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1


async def serve(config: Config, build: Builder) -> int:
    signals = _Signals()
    server, http = GrpcServer(config.server), _http_server(config)
    ports = [await _bound(config.server.host, config.server.port, server.start)]
    try:
        if http is not None:
            ports.append(await _bound(config.server.host, config.server.http_port, http.start))
        warn_of_exposure(config.server)
        loading = _in_daemon_thread(lambda: build(config, ProgressBar()))
        await asyncio.wait({loading, signals.first}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await _stop(server, http, 0)
            _exit_now(0, "stopped while loading")  # a compilation cannot be interrupted
        engine = loading.result()
    except BaseException:
        await _stop(server, http, 0)
        raise
    with engine:
        # What is loaded stays: Python's collector of cycles need not go through it again and again.
        gc.collect()
        gc.freeze()
        await server.use(engine)
        if http is not None:
            http.use(engine)
        print(greeting(engine.info.name, config.server, *ports), flush=True)
        await signals.first
        print(f"draining for at most {config.server.drain_s:g} s", file=sys.stderr, flush=True)
        await server.drain()
        await _stop(server, http)
    return 0


def _http_server(config: Config) -> HttpServer | None:
    """Imported only where it is wanted: it takes a second."""
    if config.server.http_port is None:
        return None
    from conflux_jax.serve.http_server import HttpServer

    return HttpServer(config)


async def _bound(host: str, port: int | None, start: Callable[[], Awaitable[int]]) -> int:
    try:
        return await start()
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise OSError(message) from error


async def _stop(
    server: GrpcServer, http: HttpServer | None, grace_s: float = CLOSE_GRACE_S
) -> None:
    await asyncio.gather(server.stop(grace_s), *([] if http is None else [http.stop()]))


def greeting(model: str, config: ServerConfig, port: int, http_port: int | None = None) -> str:
    """What serves, and lines to paste."""
    host = "127.0.0.1" if config.host in ANY_ADDRESS else config.host
    host = f"[{host}]" if ":" in host else host
    lines = [f"Serving {model} with gRPC on {config.host}:{port}"]
    if http_port is not None:
        lines[0] += f" and HTTP on {config.host}:{http_port}"
        body = json.dumps({"prompt": "The capital of France is"})
        lines.append(
            f"curl http://{host}:{http_port}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{body}'"
        )
    lines[0] += ". To talk to it:"
    client = f"{python_command()} -m conflux_jax.client --target {host}:{port}"
    return "\n".join([*lines, client + ' --prompt "The capital of France is"'])


def warn_of_exposure(config: ServerConfig) -> None:
    """Whoever reaches the ports is served, so say it where that may be other machines."""
    if not is_loopback(config.host):
        print(
            f"warning: host {config.host} may be reached from other machines, and requests are "
            "neither encrypted nor authenticated",
            file=sys.stderr,
            flush=True,
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Signals:
    """`first` is done at the first SIGTERM or SIGINT; the second one ends the process."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first.done():
            _exit_now(128 + number, "ended by a second signal")
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


def _exit_now(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
