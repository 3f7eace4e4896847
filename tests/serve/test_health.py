"""Readiness over gRPC and over HTTP: the same answer, whatever the engine does."""

from __future__ import annotations

import asyncio
import time

from conflux_jax.request import FinishReason, SamplingParams
from conflux_jax.watchdog import SUSPECT_S
from tests.fakes import make_fake
from tests.serve.harness import NOT_SERVING, SERVING, Client, serving
from tests.serve.http_harness import HttpClient, http_serving

LONG = SamplingParams(max_tokens=300, ignore_eos=True)


async def agree(grpc: Client, http: HttpClient, ready: bool) -> None:
    """Both say so, within seconds."""
    async with asyncio.timeout(5):
        while True:
            status = (await http.plain.get("/health")).status_code
            answer = await grpc.health()
            if (answer, status) == (({SERVING}, 200) if ready else ({NOT_SERVING}, 503)):
                return
            await asyncio.sleep(0.05)


async def test_both_notice_a_hang_that_passes_and_one_that_does_not():
    with make_fake() as fake:
        async with serving(fake) as grpc, http_serving(fake) as http:
            await agree(grpc, http, ready=True)
            fake.executor.pause_at(lambda plan: plan.iteration == 3)
            stream = await fake.engine.submit(fake.engine.prepare("ab", LONG))
            await asyncio.to_thread(fake.executor.wait_paused)
            late = SUSPECT_S + 1.0
            fake.engine._watchdog._clock = lambda: time.monotonic() + late
            await agree(grpc, http, ready=False)
            late = 0.0
            fake.executor.resume()
            assert [delta async for delta in stream][-1].finish_reason is FinishReason.LENGTH
            await agree(grpc, http, ready=True)

            fake.executor.pause_at(lambda plan: True)
            stream = await fake.engine.submit(fake.engine.prepare("ab", LONG))
            await asyncio.to_thread(fake.executor.wait_paused)
            late = 31.0  # more than any engine may take
            last = [delta async for delta in stream][-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "no progress for 30 s" in last.message
            await agree(grpc, http, ready=False)
            assert "no progress" in (await http.plain.get("/health")).json()["message"]
