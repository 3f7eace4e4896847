"""An HTTP server on a port of its own, in this process, over a given engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client.parser import text_string_to_metric_families

from conflux_jax.config import Config
from conflux_jax.llm import LLM
from conflux_jax.serve.http_server import HttpServer
from tests.fakes import Fake

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class HttpClient:
    """A server, and two clients of it: OpenAI's own, and one that sends anything."""

    server: HttpServer
    openai: AsyncOpenAI
    plain: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """As JSON of ASCII characters only, which can say what UTF-8 cannot."""
        headers = {"content-type": "application/json"}
        return await self.plain.post(path, content=json.dumps(body), headers=headers)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = await self.post(path, **body)
        return response.status_code, response.json()["error"]

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """What a stream says, up to the mark that ends it."""
        response = await self.post(path, stream=True, **body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = response.text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels, written as in the text, but without the model's name."""
        response = await self.plain.get("/metrics")
        assert response.status_code == 200
        samples = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                assert len(labels) < len(sample.labels)
                inner = ",".join(f'{name}="{labels[name]}"' for name in sorted(labels))
                samples[sample.name + (f"{{{inner}}}" if inner else "")] = sample.value
        return samples


@contextlib.asynccontextmanager
async def http_serving(served: Fake | LLM | None, **config: Any) -> AsyncIterator[HttpClient]:
    """`served` None: the model is still loading. config: fields of Config."""
    server = HttpServer(Config.from_flat(**{"http_port": 0, **config}))
    port = await server.start()
    base = f"http://127.0.0.1:{port}"
    try:
        if served is not None:
            server.use(served.engine)
        # To read all known certificates takes a while, and nothing here is encrypted.
        transport = DefaultAsyncHttpxClient(verify=False)
        async with (
            httpx.AsyncClient(base_url=base, timeout=30, verify=False) as plain,
            AsyncOpenAI(
                base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=transport
            ) as openai,
        ):
            yield HttpClient(server, openai, plain)
    finally:
        await server.stop()
