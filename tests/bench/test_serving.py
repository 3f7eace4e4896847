"""The figures of bench.serving, and its clients against a scripted server."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from bench.serving import Round, Served, report
from bench.serving_clients import (
    completion_tokens,
    over_grpc,
    over_grpc_library,
    over_http,
    samples,
    step_seconds,
)
from tests.fakes import make_fake
from tests.serve.harness import serving
from tests.serve.http_harness import eventually, http_serving


def test_overheads_are_medians_of_differences_within_a_round(capsys: pytest.CaptureFixture[str]):
    rounds = [
        Round({"generate": base, "grpc": base + grpc, "http": base + http}, dict.fromkeys(
            ("generate", "grpc", "http"), 0.1), {"grpc": base / 10, "http": base / 5})
        for base, grpc, http in ((2.0, 0.2, 0.5), (9.0, 0.1, 0.4), (3.0, 7.0, 0.3))
    ]  # fmt: skip
    rounds[0].step_s["grpc"] = 0.11
    rounds[1].step_s["grpc"] = 0.12
    figures = report(rounds, True, 20.0)
    assert figures["grpc_overhead_ms_per_token_p50"] == pytest.approx(0.2)
    assert figures["http_overhead_ms_per_token_p50"] == pytest.approx(0.4)
    assert figures["grpc_step_slowdown_p50"] == pytest.approx(0.1)
    assert figures["grpc_loop_cpu_ms_per_token_p50"] == pytest.approx(0.3)
    assert figures["http_loop_cpu_ms_per_token_p50"] == pytest.approx(0.6)
    assert figures["streams_2000_ok"] == 1.0
    assert "grpc: steps +10.0% (target: at most 5%)" in capsys.readouterr().out
    assert report(rounds, False, 20.0)["streams_2000_ok"] == 0.0


def test_the_loops_time_is_that_of_a_process_first_thread():
    """What other threads do meanwhile does not count."""
    served, done = Served(os.getpid(), (0, 0)), threading.Event()

    def work(until: Callable[[], bool]) -> None:
        while not until():
            sum(range(1000))

    other = threading.Thread(target=work, args=(done.is_set,))
    first_s, own_s = served.loop_s(), time.thread_time()
    other.start()
    work(lambda: time.thread_time() - own_s > 0.2)
    done.set()
    other.join()
    expected = time.thread_time() - own_s
    assert served.loop_s() - first_s == pytest.approx(expected, abs=0.03)


async def test_the_clients_count_every_token():
    with make_fake() as fake:
        async with serving(fake) as grpc, http_serving(fake) as http:
            prompts, port = [[97, 98], [99], [100] * 5], http.plain.base_url.port
            assert port is not None
            before = await samples(port)
            assert await over_grpc(grpc.port, prompts, 7) == [7, 7, 7]
            assert await over_grpc_library(grpc.port, prompts, 7) == [7, 7, 7]
            assert await over_http(port, prompts, 9) == [9, 9, 9]
            seconds, iterations = step_seconds(before, await samples(port))
            assert iterations == len(fake.executor.plans) and seconds > 0.0


async def test_a_call_that_is_refused_has_no_tokens():
    with make_fake(max_model_len=64) as fake:
        async with serving(fake) as grpc:
            assert await over_grpc(grpc.port, [[97], [97] * 100], 7) == [7, 0]


async def test_a_server_that_goes_is_an_error():
    with make_fake(step_s=0.01) as fake:
        async with serving(fake) as grpc:
            task = asyncio.create_task(over_grpc(grpc.port, [[97]], 300))
            await eventually(lambda: fake.engine.num_live == 1)
            await grpc.server.stop(0.0)
            with pytest.raises(RuntimeError, match=r"the server sent|was lost"):
                await task


@pytest.mark.parametrize(
    "answer", [b"", b'data: {"choices":[]}', b'{"completion_tokens":4,"total_tokens":5}}\n\n']
)
def test_a_stream_that_is_not_whole_is_no_measurement(answer: bytes):
    with pytest.raises(RuntimeError, match="not whole"):
        completion_tokens(answer)
