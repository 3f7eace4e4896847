"""The server and the client as processes: start, answers on a terminal, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conflux_jax import client
from conflux_jax.config import Config, ServerConfig
from conflux_jax.serve import __main__ as serve
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes import wait_until
from tests.serve.certificates import make_identity
from tests.serve.harness import NOT_SERVING, ROOT, Server, generate_request, running


@contextlib.contextmanager
def connected(server: Server) -> Iterator[tuple[grpc.Channel, Any]]:
    with grpc.insecure_channel(server.target) as channel:
        yield channel, pb_grpc.InferenceStub(channel)


def one_line(error: str) -> str:
    """stderr, which must be one line of error and no traceback (progress may come before)."""
    (line,) = [line for line in error.splitlines() if not line.startswith("load ")]
    assert line.startswith("error: "), error
    return line


def stream_in_thread(stub: Any, started: threading.Semaphore) -> tuple[int, str]:
    """Tokens received and how the call ended."""
    count, reason = 0, pb.FINISH_REASON_UNSPECIFIED
    call = stub.Generate(generate_request("ab", max_tokens=256, ignore_eos=True))
    try:
        for message in call:
            if count < 20 <= count + len(message.token_ids):
                started.release()
            count += len(message.token_ids)
            reason = message.finish_reason
    except grpc.RpcError as error:
        return count, error.code().name  # type: ignore[attr-defined]
    return count, pb.FinishReason.Name(reason)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_four_streams_finish_and_refuses_new_ones(number: signal.Signals):
    with (
        running("--drain-s", "20", FAKE_STEP_S="0.004") as server,
        connected(server) as (channel, stub),
        ThreadPoolExecutor(4) as pool,
    ):
        started = threading.Semaphore(0)
        streams = [pool.submit(stream_in_thread, stub, started) for _ in range(4)]
        for _ in streams:
            assert started.acquire(timeout=20)
        server.send(number)
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        wait_until(lambda: health.Check(request).status == NOT_SERVING)
        wait_until(lambda: _is_refused(stub))
        assert [stream.result(20) for stream in streams] == [(256, "FINISH_REASON_LENGTH")] * 4
        code, stderr = server.wait()
        assert code == 0
        assert "Traceback" not in stderr


def _is_refused(stub: Any) -> bool:
    try:
        list(stub.Generate(generate_request("new", max_tokens=1)))
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    return False


def test_streams_that_outlast_the_drain_get_a_final_status():
    with (
        running("--drain-s", "0.2", FAKE_STEP_S="0.02") as server,
        connected(server) as (_, stub),
        ThreadPoolExecutor(6) as pool,
    ):
        started = threading.Semaphore(0)
        streams = [pool.submit(stream_in_thread, stub, started) for _ in range(6)]
        assert started.acquire(timeout=20)
        server.send(signal.SIGTERM)
        assert {stream.result(20)[1] for stream in streams} == {"UNAVAILABLE"}
        assert server.wait()[0] == 0


def test_a_second_signal_ends_the_process_at_once():
    with running("--drain-s", "60", FAKE_STEP_S="0.5") as server, connected(server) as (_, stub):
        next(stub.Generate(generate_request(max_tokens=256)))
        server.send(signal.SIGTERM)
        assert server.process.stderr is not None
        assert any("draining" in line for line in server.process.stderr)
        server.send(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM


def test_a_signal_while_the_model_loads_ends_the_process():
    with running(ready=False, FAKE_BUILD_S="60") as server:
        assert server.process.stderr is not None
        assert "load" in server.process.stderr.readline()
        server.send(signal.SIGTERM)
        code, stderr = server.wait()
        assert code == 0
        assert re.fullmatch(r"20[0-9T:.-]+Z info stopped while loading\n", stderr)


def test_http_beside_grpc_as_the_printed_line_says_until_it_drains():
    flags = ("--http-port", "0", "--drain-s", "20")
    with running(*flags, FAKE_STEP_S="0.004") as server:
        first, line, _ = server.lines
        assert first.startswith("Serving fake with gRPC on 127.0.0.1:")
        curl, url, header, value, data, body = shlex.split(line)
        assert (curl, header, data) == ("curl", "-H", "-d")
        assert f" and HTTP on {httpx.URL(url).netloc.decode()}. To talk to it:" in first
        headers = dict([value.split(": ")])
        with httpx.Client(headers=headers, timeout=20, verify=False) as http:
            answer = http.post(url, content=body).json()
            assert answer["choices"][0]["text"] == "The capital of F"
            fields = {"stream": True, "max_tokens": 256, "ignore_eos": True}
            long = json.dumps(json.loads(body) | fields)
            with http.stream("POST", url, content=long) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                server.send(signal.SIGTERM)
                *_, last, done = [line for line in lines if line]
                assert done == "data: [DONE]" and '"finish_reason":"length"' in last
        code, stderr = server.wait()
        assert code == 0
        assert "Traceback" not in stderr


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for tests that only talk to it."""
    with running(FAKE_STEP_S="0.01") as server:
        yield server


def test_the_line_that_is_printed_can_be_pasted(shared: Server):
    done = subprocess.run(
        shared.lines[-1], shell=True, cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("The capital of France is" * 3)[:64] + "\n"


def test_the_client_streams(shared: Server, capsys: pytest.CaptureFixture[str]):
    target = ("--target", shared.target)
    assert client.main([*target, "--prompt", "ab", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "ababa\n"
    sampling = "--temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 3 --stop b --stats"
    assert client.main([*target, "--prompt", "ab", *sampling.split()]) == 0
    captured = capsys.readouterr()
    assert captured.out == "a\n"
    assert captured.err.startswith("2 prompt tokens, 2 tokens, stop; first after ")
    assert client.main([*target, "--prompt", "hi", "--chat", "--max-tokens", "1"]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "ab", "--temperature", "-1"], "INVALID_ARGUMENT: temperature: must be"),
        (["--prompt", ""], "INVALID_ARGUMENT: prompt: must have at least one token"),
        (["--prompt", "a", "--model", "gpt-5"], "NOT_FOUND: model: 'gpt-5'"),
        (["--prompt", "a" * 2000], "OUT_OF_RANGE: prompt: "),
    ],
)
def test_the_client_says_what_was_refused(shared: Server, capsys, flags: list[str], words: str):
    assert client.main(["--target", shared.target, *flags]) == 1
    captured = capsys.readouterr()
    assert words in one_line(captured.err)
    assert captured.out == ""


def test_a_timeline_that_is_not_kept_cannot_be_asked_for(shared: Server):
    """SIGUSR1 would end a process that does not expect it."""
    for _ in range(2):
        shared.send(signal.SIGUSR1)
        assert client.main(["--target", shared.target, "--prompt", "abc", "--max-tokens", "3"]) == 0
    assert shared.process.poll() is None


def test_a_client_that_is_killed_frees_its_request(shared: Server):
    command = [sys.executable, "-m", "conflux_jax.client", "--target", shared.target]
    command += ["--prompt", "ab", "--max-tokens", "1000"]

    def num_decodes(stub: Any) -> int:
        return sum(g.num_decodes for g in stub.GetLoad(pb.GetLoadRequest()).groups)

    with (
        connected(shared) as (_, stub),
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(3) == b"aba"
        assert num_decodes(stub) == 1
        process.kill()
        wait_until(lambda: num_decodes(stub) == 0, 2.0)


def test_the_client_names_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert client.main(["--target", f"127.0.0.1:{port}", "--prompt", "x"]) == 1
    assert f"no server at 127.0.0.1:{port}" in one_line(capsys.readouterr().err)


def test_a_port_in_use_is_one_line(shared: Server, capsys: pytest.CaptureFixture[str]):
    port = shared.target.rpartition(":")[2]
    assert serve.main(["--port", port]) == 1
    captured = capsys.readouterr()
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert expected in one_line(captured.err)
    assert captured.out == ""
    assert serve.main(["--port", "0", "--http-port", port]) == 1
    assert expected in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("host", ["", "\udcff"])
def test_a_host_that_is_none_is_one_line(host: str, capfd: pytest.CaptureFixture[str]):
    assert serve.main(["--host", host, "--port", "0"]) == 1
    assert one_line(capfd.readouterr().err).startswith("error: cannot listen on ")


TLS: dict[str, Any] = {"tls_cert_file": "c", "tls_key_file": "k"}
TOKEN: dict[str, Any] = {"auth_token_file": "t"}


@pytest.mark.parametrize(
    ("settings", "missing", "there"),
    [
        ({}, ["encrypted", "authenticated"], []),
        (TLS, ["authenticated"], ["encrypted"]),
        (TOKEN, ["encrypted"], ["authenticated"]),
    ],
)
def test_a_host_that_others_may_reach_is_warned_of(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], missing, there
):
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        serve.warn_of_exposure(ServerConfig(host=host, **settings))
    assert caplog.messages == []
    for host in ("0.0.0.0", "::", "10.1.2.3", "server.example"):
        caplog.clear()
        serve.warn_of_exposure(ServerConfig(host=host, **settings))
        (message,) = caplog.messages
        assert caplog.records[0].levelname == "WARNING"
        assert message.startswith(f"host {host} may be reached")
        assert all(word in message for word in missing)
        assert not any(word in message for word in there)


def test_a_host_that_is_safe_is_not_warned_of(caplog: pytest.LogCaptureFixture):
    serve.warn_of_exposure(ServerConfig(host="0.0.0.0", **TLS, **TOKEN))
    serve.warn_of_exposure(ServerConfig(host="0.0.0.0", **TLS, tls_client_ca_file="a"))
    assert caplog.messages == []


def test_a_missing_model_is_one_line():
    command = [sys.executable, "-m", "conflux_jax.serve", "--port", "0", "--model", "/no/such"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "/no/such" in one_line(done.stderr)


def test_a_bad_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "bad.yaml"
    for text, words in (
        ("mesh:\n  sp: 0\n", "sp: must be at least 1"),
        ("meshes:\n  sp: 1\n", "meshes: no such section"),
        ("mesh:\n  sq: 1\n", "mesh.sq: no such setting"),
    ):
        config.write_text(text)
        assert serve.main(["--config", str(config)]) == 1
        assert f"{config}: {words}" in one_line(capsys.readouterr().err)


def test_with_tls_and_a_token_the_printed_line_works_and_the_log_is_json(tmp_path: Path):
    identity, tokens = make_identity(tmp_path), tmp_path / "tokens"
    tokens.write_text("# mine\nabcdefghijklmnop\n")
    flags = ("--tls-cert-file", str(identity.cert), "--tls-key-file", str(identity.key))
    flags += ("--auth-token-file", str(tokens), "--log-format", "json", "--http-port", "0")
    with running(*flags, "--host", "0.0.0.0", "--drain-s", "20", FAKE_STEP_S="0.001") as server:
        first, curl, command = server.lines
        assert "Serving fake with gRPC on 0.0.0.0:" in first
        assert curl.startswith(f"curl --cacert {identity.cert} -H ") and " https://" in curl
        # The certificate is an authority's; a client needs that, not the server's own.
        command = command.replace(str(identity.cert), str(identity.ca))
        done = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("The capital of France is" * 3)[:64] + "\n"
        server.send(signal.SIGTERM)
        code, stderr = server.wait()
    assert code == 0
    lines = [json.loads(line) for line in stderr.splitlines()]
    messages = [line["message"] for line in lines]
    assert not any("may be reached from other machines" in message for message in messages)
    assert "draining for at most 20 s" in messages and messages[-1] == "drained"
    (request,) = [line for line in lines if line["message"] == "request finished"]
    assert (request["prompt_tokens"], request["output_tokens"]) == (24, 64)
    assert "capital" not in stderr and "abcdefgh" not in stderr


def test_the_configs_of_this_repository_load():
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert paths
    assert all(Config.from_yaml(path) for path in paths)
