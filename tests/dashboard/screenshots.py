"""`python -m tests.dashboard.screenshots --config configs/x.yaml [--out docs/dashboard]`

Serves the model that the flags name, with made-up traffic over HTTP, and takes pictures of the
dashboard: narrow and wide, light and dark. Without --latency-profile it makes a quick one first, so
that there is a level to be seen. With --scripted three groups of a scripted engine serve, all of
whose iterations take 60 ms: it needs no model, and a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from conflux_jax.build import build_engine
from conflux_jax.config import Config
from conflux_jax.engine import Engine
from conflux_jax.progress import ProgressBar
from conflux_jax.serve.http_server import HttpServer
from tests.dashboard.browser import NARROW, SCHEMES, WIDE, Shown, chromium, dashboard
from tests.fakes import make_fake
from tests.scheduler.predictors import Linear

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("cups", "fill", "with", "decode", "rows", "below", "and", "prefill", "rows", "above")
SIZES = {"narrow": NARROW, "wide": WIDE}
HEIGHTS = {"narrow": 1900, "wide": 1100}  # of what a picture has of the page, at most
SCRIPTED: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 384, "tbt_slo_s": 0.12}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard")
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic, before pictures")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--scripted", action="store_true", help="no model, but a scripted engine")
    own, rest = parser.parse_known_args(arguments)
    if own.scripted:
        fake = make_fake(
            groups=3,
            step_s=0.06,
            predictor=Linear(0.05, 0.0001),
            max_model_len=8192,
            pool_tokens=8192,
            **SCRIPTED,
        )
        config = Config.from_flat(sp=3, http_port=0, **SCRIPTED)
        asyncio.run(take(config, fake.engine, own.out, own.seconds, own.rate))
        return
    settings = argparse.ArgumentParser(prog="settings of the server")
    Config.add_arguments(settings)
    config = Config.from_arguments(settings.parse_args(rest))
    with tempfile.TemporaryDirectory() as folder:
        if config.scheduler.latency_profile is None:
            profile = Path(folder) / "profile.json"
            calibrate(rest, profile)
            config = Config.from_flat(config, latency_profile=str(profile))
        engine = build_engine(config, ProgressBar())
        asyncio.run(take(config, engine, own.out, own.seconds, own.rate))


def calibrate(flags: Sequence[str], profile: Path) -> None:
    """In a process of its own, whose memory is free again afterwards."""
    command = [sys.executable, "-m", "conflux_jax.calibrate", *flags]
    subprocess.run([*command, "--quick", "--out", str(profile)], check=True)


async def take(config: Config, engine: Engine, folder: Path, seconds: float, rate: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    server = HttpServer(config)
    base = f"http://127.0.0.1:{await server.start()}"
    with engine:
        server.use(engine)
        try:
            async with contextlib.AsyncExitStack() as stack:
                browser = await stack.enter_async_context(chromium())
                # The first stays open, so that the others have a history.
                first = await stack.enter_async_context(dashboard(browser, base))
                await first.wait_status("ok")
                async with asyncio.TaskGroup() as group:
                    traffic = group.create_task(send(base, rate))
                    await asyncio.sleep(seconds)
                    for name, size in SIZES.items():
                        for scheme in SCHEMES:
                            async with dashboard(browser, base, size, scheme) as shown:
                                await shown.wait("iterations.length > 30 && points.length > 0")
                                await shown.wait("document.querySelectorAll('tbody tr').length > 2")
                                path = folder / f"{name}-{scheme}.png"
                                await picture(shown, path, size[0], HEIGHTS[name])
                                print(path, path.stat().st_size, "bytes")
                    traffic.cancel()
        finally:
            await server.stop()


async def picture(shown: Shown, path: Path, width: int, most: int) -> None:
    """Of the page's upper part."""
    height = min(await shown.evaluate("document.documentElement.scrollHeight"), most)
    clip: Any = {"x": 0, "y": 0, "width": width, "height": height}
    await shown.page.screenshot(path=path, full_page=True, clip=clip)


async def send(base: str, rate: float) -> None:
    """Requests at random times and of random lengths, a few at once now and then."""
    draw = random.Random(0)
    async with (
        httpx.AsyncClient(base_url=base, timeout=600) as client,
        asyncio.TaskGroup() as group,
    ):
        while True:
            for _ in range(draw.choice((1, 1, 1, 4))):
                words = " ".join(draw.choices(WORDS, k=draw.choice((20, 60, 200, 700))))
                body = {
                    "prompt": words,
                    "max_tokens": draw.choice((40, 120, 240)),
                    "ignore_eos": True,
                    "ttft_slo_s": draw.choice((4.0, 10.0, 30.0)),
                }
                group.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(draw.expovariate(rate / 1.75))


if __name__ == "__main__":
    main()
