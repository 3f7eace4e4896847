"""The dashboard without a browser: its events, what they cost when nobody watches, the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from conflux_jax.request import SamplingParams
from conflux_jax.serve import dashboard
from conflux_jax.serve.dashboard import page
from conflux_jax.serve.dashboard_data import (
    Details,
    Hello,
    Now,
    Points,
    ShownIteration,
    ShownPool,
    ShownRequest,
)
from conflux_jax.serve.latency_series import Point
from tests.fakes import LONG, Fake, make_fake, open_stream
from tests.serve.http_harness import HttpClient, eventually, http_serving

SECRET = "never shown to anybody"


class Events:
    """A watcher, event by event."""

    def __init__(self, lines: AsyncIterator[str]):
        self._lines = lines

    async def read(self) -> tuple[str, dict[str, Any]]:
        name = await anext(self._lines)
        data = await anext(self._lines)
        assert await anext(self._lines) == ""
        assert name.startswith("event: ") and data.startswith("data: ")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def end(self) -> None:
        async for _ in self._lines:
            pass

    async def until(self, kind: str, accepts=lambda event: True) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while True:
                name, event = await self.read()
                if name == kind and accepts(event):
                    return event


@asynccontextmanager
async def watching(client: HttpClient) -> AsyncIterator[Events]:
    async with client.plain.stream("GET", "/dashboard/events") as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Events(response.aiter_lines())


def is_watched(fake: Fake) -> bool:
    return len(fake.engine._observers) > 1  # the metrics are the first


async def test_events_say_what_the_engine_does():
    """Two groups, two requests at once, a third in the queue with a deadline that is over."""
    settings = {"max_num_seqs": 2, "ttft_slo_s": 50.0, "max_num_batched_tokens": 40}
    with make_fake(groups=2, step_s=0.01, **settings) as fake:
        async with http_serving(fake, **settings) as client, watching(client) as events:
            name, hello = await events.read()
            assert name == "hello"
            assert (hello["model"], hello["groups"], hello["page_tokens"]) == ("fake", 2, 16)
            assert (hello["pool_pages"], hello["ttft_slo_s"], hello["tbt_slo_s"]) == (256, 50, None)
            running = [open_stream(fake, SECRET * 3, LONG, f"r{n}") for n in range(2)]
            hurry = SamplingParams(max_tokens=300, ignore_eos=True, ttft_slo_s=0.01)
            queued = open_stream(fake, SECRET, hurry, "<b>late</b>")
            now = await events.until("now", lambda e: sum(e["group_decodes"]) == 2)
            assert (now["status"], now["message"]) == ("ok", "")
            assert (now["running"], now["waiting"]) == (2, 1)
            assert now["prefill_tokens_waiting"] == len(SECRET)
            details = await events.until("details", lambda e: e["queue"])
            assert (details["num_requests"], details["num_queued"]) == (2, 1)
            late = details["queue"][0]
            assert (late["id"], late["phase"], late["group"]) == ("<b>late</b>", "waiting", None)
            assert late["is_late"] and late["due_s"] < 0 and late["ttft_s"] is None
            now = await events.until("now", lambda e: e["iterations"])
            numbers = [iteration["number"] for iteration in now["iterations"]]
            assert numbers == sorted(numbers)
            assert now["iterations"][-1]["level"] == 20
            assert sum(now["iterations"][-1]["decodes"]) == 2
            details = await events.until("details", lambda e: e["requests"][0]["ttft_s"])
            first = details["requests"][0]
            assert (first["id"], first["phase"], first["group"]) == ("r0", "decoding", 0)
            assert first["prompt_tokens"] == 3 * len(SECRET) and not first["is_late"]
            for pool in details["pools"]:
                assert pool["prefill"] + pool["decode"] + pool["free"] == 256
                assert sum(pool["decode_cells"]) == pool["decode"] > 0
            points = (await events.until("points"))["points"]
            assert points[-1]["output_tokens_per_s"] > 0
            for stream in (*running, queued):
                stream.close()


async def test_no_event_holds_a_word_of_a_prompt_or_an_answer():
    with make_fake(step_s=0.005) as fake:
        async with (
            http_serving(fake) as client,
            client.plain.stream("GET", "/dashboard/events") as response,
        ):
            stream = open_stream(fake, SECRET)
            seen = ""
            async with asyncio.timeout(10):
                async for part in response.aiter_text():
                    seen += part
                    if "event: points" in seen:
                        break
            stream.close()
            assert '"output_tokens":' in seen
            assert SECRET not in seen and SECRET[:9] not in seen and "[110,101,118" not in seen


async def test_the_engine_is_left_alone_while_nobody_watches():
    with make_fake() as fake:
        async with http_serving(fake) as client:
            assert not is_watched(fake)
            async with watching(client) as one, watching(client) as other:
                await one.until("details")
                await other.until("details")
                assert is_watched(fake)
            await eventually(lambda: not is_watched(fake))
            posted = []
            snapshot = fake.engine.snapshot
            fake.engine.snapshot = lambda most: posted.append(most) or snapshot(most)
            await asyncio.sleep(3 * dashboard.PERIOD_S)
            assert not posted
            async with watching(client) as again:
                await again.until("details")
            assert posted


async def test_only_so_many_watch_at_once(monkeypatch):
    monkeypatch.setattr(dashboard, "MOST_WATCHERS", 1)
    with make_fake() as fake:
        async with http_serving(fake) as client:
            async with watching(client) as events:
                await events.until("now")
                refused = await client.plain.get("/dashboard/events")
                assert refused.status_code == 429
                assert "1 pages watch already" in refused.json()["error"]["message"]
            await eventually(lambda: not is_watched(fake))
            async with watching(client) as events:
                await events.until("now")


async def test_a_button_ends_a_request():
    with make_fake(step_s=0.005) as fake:
        async with http_serving(fake) as client:
            stream = open_stream(fake, "abc", LONG, "mine")
            path = "/dashboard/cancel"
            done = await client.post(path, request_id="mine")
            assert (done.status_code, done.json()) == (200, {"cancelled": True})
            delta = await asyncio.to_thread(stream.read_all)
            assert delta.finish_reason == "abort"
            assert (await client.post(path, request_id="mine")).json() == {"cancelled": False}
            status, error = await client.error(path, request_id=3)
            assert (status, error["param"]) == (400, "request_id")
            status, error = await client.error(path)
            assert (status, error["param"]) == (400, "request_id")
            form = await client.plain.post(path, data={"request_id": "mine"})
            assert form.status_code == 415  # what a page of another origin could send


async def test_an_engine_that_hangs_or_is_over_is_shown_so(monkeypatch):
    monkeypatch.setattr(dashboard, "ANSWER_S", 0.15)
    with make_fake() as fake:
        async with http_serving(fake) as client, watching(client) as events:
            await events.until("now", lambda e: e["status"] == "ok")
            fake.executor.pause_at(lambda plan: True)
            stream = open_stream(fake)
            await events.until("now", lambda e: e["status"] == "stalled")
            fake.executor.resume()
            await events.until("now", lambda e: e["status"] == "ok")
            stream.close()
            await asyncio.to_thread(fake.engine.close)
            failed = await events.until("now", lambda e: e["status"] == "failed")
            assert failed["message"] == "the engine is closed"


async def test_the_server_stops_though_somebody_watches():
    with make_fake() as fake:
        async with http_serving(fake) as client, watching(client) as events:
            await events.until("now")
            async with asyncio.timeout(1.5):  # less than what open connections get
                await client.server.stop()
            await events.end()


async def test_the_page_is_there_before_the_model():
    async with http_serving(None) as client:
        shown = await client.plain.get("/dashboard")
        assert shown.status_code == 200 and shown.text.startswith("<!doctype html>")
        assert (await client.plain.get("/dashboard/events")).status_code == 503


async def test_the_timeline_has_the_iterations_of_while_somebody_watched():
    with make_fake(groups=2) as fake:
        async with http_serving(fake) as client:
            await client.complete(prompt="unseen", max_tokens=3)
            async with watching(client) as events:
                await events.until("now")
                await client.complete(prompt="seen", max_tokens=5)
            answer = await client.plain.get("/dashboard/timeline")
            assert "attachment" in answer.headers["content-disposition"]
            wholes = [e for e in answer.json()["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
            first = wholes[0]["args"]["iteration"]
            assert first > 0
            assert len(wholes) == len(fake.executor.plans) - first


# The page itself


def test_the_page_takes_nothing_from_elsewhere():
    content, headers = page()
    text = content.decode()
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|src=", text)
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    assert "style=" not in text and not re.findall(r"\bon\w+=", text)  # the policy forbids them
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")


READ = {  # by the names that the page has for them
    "hello": [f.name for f in fields(Hello)],
    "now": [f.name for f in fields(Now)],
    "details": [f.name for f in fields(Details)],
    "event": [f.name for f in fields(Points)],
    "request": ShownRequest._fields,
    "pool": ShownPool._fields,
    "point": Point._fields,
    "iteration": ShownIteration._fields,
}
SAME = {"last": ("iteration", "point"), "i": ("iteration",)}
OF_LANGUAGE = {"target", "preventDefault", "split"}  # of an event of the browser; of a line


def test_the_page_reads_what_the_events_have():
    """Every field that the script reads is one of an event, and every field of an event is read."""
    (script,) = re.findall(r"<script>(.*)</script>", page()[0].decode(), re.DOTALL)
    used = {kind: set[str]() for kind in READ}
    for name, field in re.findall(r"\b(\w+)\.(\w+)\b", script):
        kinds = SAME.get(name, (name,))
        if kinds[0] not in READ or field in OF_LANGUAGE:
            continue
        owners = [kind for kind in kinds if field in READ[kind]]
        assert owners, f"{name}.{field} is in no event"
        for kind in owners:
            used[kind].add(field)
    taken = re.findall(r"const \{ ([\w, ]+) \} = details", script)
    used["details"] |= {field for names in taken for field in names.split(", ")}
    assert {kind: set(names) - used[kind] for kind, names in READ.items()} == {
        kind: set() for kind in READ
    }
