"""The dashboard in a browser: what it shows, what its buttons do, sizes, colours, contrast."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Route

from conflux_jax.request import SamplingParams
from conflux_jax.serve.dashboard_data import (
    Details,
    Event,
    Hello,
    Now,
    ShownIteration,
    ShownPool,
    as_event,
)
from conflux_jax.streams import OutputStream
from tests.dashboard.browser import NARROW, SCHEMES, WIDE, Shown, chromium, dashboard
from tests.fakes import LONG, Fake, make_fake, open_stream
from tests.serve.http_harness import HttpClient, eventually, http_serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"max_num_seqs": 3, "max_num_batched_tokens": 60, "ttft_slo_s": 2.0}
BOLD = "<b>bold</b>"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@contextlib.asynccontextmanager
async def served(
    step_s: float = 0.01, **settings: Any
) -> AsyncIterator[tuple[Fake, HttpClient, str]]:
    """Three groups. The engine, its server, and the server's address."""
    settings = SETTINGS | settings
    with make_fake(groups=3, step_s=step_s, **settings) as fake:
        async with http_serving(fake, **settings) as client:
            yield fake, client, str(client.plain.base_url).rstrip("/")


def busy(fake: Fake) -> list[OutputStream]:
    """Three requests that run, one that waits, and one that waits and is late."""
    hurry = SamplingParams(max_tokens=300, ignore_eos=True, ttft_slo_s=0.01)
    streams = [open_stream(fake, "x" * 30, LONG, f"running-{n}") for n in range(3)]
    streams.append(open_stream(fake, "x" * 40, LONG, BOLD))
    return [*streams, open_stream(fake, "x" * 50, hurry, "late")]


async def all_is_there(shown: Shown) -> None:
    await shown.wait("document.querySelectorAll('#requests tbody tr').length === 3")
    await shown.wait("document.querySelectorAll('#queue tbody tr').length === 2")
    await shown.wait("document.querySelector('#out-rate').textContent !== '–'")


HELLO = Hello("made up", 2, 1, 16, 5, False, 4, 60, 2.0, None, 10.0)
ITERATION = ShownIteration(7, 0.02, 0.04, 40, 30, 49, (10, 1), (20, 29), 0)._asdict()
NOW = Now("ok", "", 2, 0, 0, 0, (1, 0), (9, 0), [ITERATION])
POOL = ShownPool(2, 1, 2, [1, 1, 0, 0, 0], [0, 0, 1, 0, 0])._asdict()
DETAILS = Details([], [], 0, 0, 1, [POOL, POOL])


@contextlib.asynccontextmanager
async def told(
    browser: Browser, *events: Event, size: tuple[int, int] = WIDE
) -> AsyncIterator[Shown]:
    """A page that was told these events, and then nothing more."""
    body = b"".join(map(as_event, events))
    async with served() as (_, _, base), dashboard(browser, base, size) as shown:
        await shown.page.route(
            "**/dashboard/events",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        await shown.page.reload()
        await shown.wait_status("no connection")
        yield shown


async def test_cups_are_filled_as_the_iteration_says(browser: Browser):
    """The bucket has 40 rows a group, the level is 30, and both groups are filled up to it."""
    async with told(browser, HELLO, NOW) as shown:
        await asyncio.sleep(0.2)  # they fill by and by
        cups = await shown.evaluate(
            """[...document.querySelectorAll('.cup')].map(cup => {
              const bottom = cup.getBoundingClientRect().top + cup.clientHeight;
              const at = name => {
                const box = cup.querySelector('.' + name).getBoundingClientRect();
                return [(bottom - box.bottom) / cup.clientHeight, box.height / cup.clientHeight];
              };
              return ['decode', 'prefill', 'level', 'padding'].map(at);
            })"""
        )
        height = 40 * 1.1  # a little of a cup is never filled
        for cup, decodes, prefill in zip(cups, (10, 1), (20, 29), strict=True):
            decode_at, prefill_at, level, padding = cup
            assert decode_at == pytest.approx([0.0, decodes / height], abs=0.01)
            assert prefill_at == pytest.approx([decodes / height, prefill / height], abs=0.01)
            assert level == pytest.approx([0.0, 30 / height], abs=0.01)
            assert padding == pytest.approx([0.0, 40 / height], abs=0.01)
        labels = await shown.evaluate(
            "[...document.querySelectorAll('.cup')].map(cup => cup.getAttribute('aria-label'))"
        )
        rest = "level 30, 40 rows in the bucket"
        assert labels == [
            f"Group 0: 10 decode rows, 20 prefill rows, {rest}",
            f"Group 1: 1 decode rows, 29 prefill rows, {rest}",
        ]
        assert "C = 30, room for 49 prefill tokens" in await shown.text("#iteration")
        assert (await shown.text("#step")).split() == ["20.0", "ms", "of", "40.0", "ms"]


async def test_the_map_of_a_pool_has_a_cell_for_each_page(browser: Browser):
    async with told(browser, HELLO, DETAILS) as shown:
        cells = await shown.evaluate(
            """(() => {
              const pen = document.querySelector('.pool canvas').getContext('2d');
              const { data } = pen.getImageData(0, 5, 60, 1);
              return [0, 1, 2, 3, 4].map(cell => {
                const [r, g, b] = data.slice(4 * (12 * cell + 5));
                return '#' + [r, g, b].map(c => c.toString(16).padStart(2, '0')).join('');
              });
            })()"""
        )
        colours = await shown.evaluate("colours")
        kinds = ("prefill", "prefill", "decode", "free", "free")
        assert cells == [colours[kind] for kind in kinds]
        assert "prefill 2, decode 1, free 2" in await shown.text(".pool .head")
        assert (await shown.text("#kv-use")).strip() == "60%"


async def test_the_numbers_and_tables_of_a_busy_engine(browser: Browser):
    async with served() as (fake, _, base), dashboard(browser, base) as shown:
        await shown.wait_status("ok")
        assert await shown.text("#model") == "fake"
        assert await shown.evaluate("document.querySelectorAll('.cup').length") == 3
        streams = busy(fake)
        await all_is_there(shown)
        await shown.wait("document.querySelector('#running').textContent.startsWith('3')")
        assert (await shown.text("#waiting")).split()[0] == "2"
        queue = await shown.evaluate(ROWS.replace("TABLE", "queue"))
        assert [row[0] for row in queue] == ["late", BOLD]  # by deadline, markup as it is written
        assert queue[0][1].startswith("late by") and queue[1][1].startswith(("in ", "late by"))
        assert await shown.evaluate("document.querySelectorAll('td b').length") == 0
        requests = await shown.evaluate(ROWS.replace("TABLE", "requests"))
        assert [row[:2] for row in requests] == [[f"running-{n}", "decoding"] for n in range(3)]
        assert {row[2] for row in requests} == {"0", "1", "2"}
        assert all(row[3] == "30" and row[5].endswith("/ 300") for row in requests)
        pools = await shown.evaluate(
            "[...document.querySelectorAll('.pool canvas')].map(c => c.getAttribute('aria-label'))"
        )
        assert len(pools) == 3 and all("prefill 0, decode" in label for label in pools)
        for stream in streams:
            stream.close()


ROWS = """[...document.querySelectorAll('#TABLE tbody tr')].map(
    row => [...row.cells].map(cell => cell.textContent))"""


async def test_a_request_is_cancelled_by_two_clicks(browser: Browser):
    slow = served(step_s=0.1)  # so that no request ends of itself meanwhile
    async with slow as (fake, _, base), dashboard(browser, base) as shown:
        streams = busy(fake)
        await all_is_there(shown)
        button = shown.page.locator("tr[data-id='running-1'] button")
        await button.click()
        assert await button.inner_text() == "Sure?"
        await asyncio.sleep(1.2)  # two updates of the table: the button is still the same one
        assert await shown.evaluate("document.activeElement.textContent") == "Sure?"
        assert fake.engine.num_live == 5
        await button.click()
        delta = await asyncio.to_thread(streams[1].read_all)
        assert delta.finish_reason == "abort"
        await button.wait_for(state="detached")
        assert "running-1 is cancelled" in await shown.text("#said")
        odd = shown.page.locator(f'tr[data-id="{BOLD}"] button')
        await odd.click()
        await odd.click()
        assert (await asyncio.to_thread(streams[3].read_all)).finish_reason == "abort"
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_it_fits_and_can_be_read(browser: Browser, size: tuple[int, int], scheme: str):
    async with served() as (fake, _, base), dashboard(browser, base, size, scheme) as shown:
        streams = busy(fake)
        await all_is_there(shown)
        assert await shown.evaluate("document.documentElement.scrollWidth") <= size[0]
        boxes = await shown.evaluate(
            "[...document.querySelectorAll('section:not([hidden]), .tile, .cup, canvas')]"
            ".map(e => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.height] })"
        )
        assert all(0 <= left < right <= size[0] and height > 0 for left, right, height in boxes)
        found = await Axe().run(shown.page)
        assert found.violations_count == 0, found.generate_report()
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_large_numbers_stay_in_their_tiles(browser: Browser, size: tuple[int, int]):
    many = Now("ok", "", 1000, 4096, 123_456_789, 1_000_000, (1, 0), (9, 0), [ITERATION])
    async with told(browser, HELLO, many, size=size) as shown:
        assert "123,456,789 tokens to prefill" in await shown.text("#waiting")
        sizes = await shown.evaluate(
            "[...document.querySelectorAll('.tile')].map(tile => [tile, ...tile.children])"
            ".flat().map(e => [e.scrollWidth, e.clientWidth])"
        )
        assert sizes and all(needed <= there for needed, there in sizes), sizes


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


async def test_contrast_of_black_and_white():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


async def test_pictures_have_contrast_in_both_schemes(browser: Browser):
    """What is drawn on canvases no checker sees: 3:1 for shapes, 4.5:1 for words."""
    pages = set()
    async with served() as (_, _, base):
        for scheme in SCHEMES:
            async with dashboard(browser, base, WIDE, scheme) as shown:
                await shown.wait_status("ok")
                names = ("page", "card", "decode", "prefill", "free", "level", "muted")
                style = "getComputedStyle(document.documentElement)"
                colours = {
                    name: await shown.evaluate(f"{style}.getPropertyValue('--{name}').trim()")
                    for name in names
                }
            pages.add(colours["page"])
            for shape in ("decode", "prefill"):
                assert contrast(colours[shape], colours["card"]) >= 3
                assert contrast(colours[shape], colours["free"]) >= 3
                assert contrast(colours[shape], colours["level"]) >= 3
            assert contrast(colours["muted"], colours["card"]) >= 4.5
    assert len(pages) == 2


async def test_pictures_are_drawn(browser: Browser):
    """More than one colour in each."""
    async with served() as (fake, client, base), dashboard(browser, base) as shown:
        await shown.wait_status("ok")
        await client.complete(prompt="abc", max_tokens=30)
        streams = busy(fake)
        await all_is_there(shown)
        await shown.wait("points.length > 2")
        colours = await shown.evaluate(
            """Object.fromEntries([...document.querySelectorAll('canvas')].map((canvas, at) => {
              const pen = canvas.getContext('2d');
              const data = new Uint32Array(
                pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
              return [canvas.id || `pool ${at}`, new Set(data).size];
            }))"""
        )
        assert len(colours) == 9 and all(count > 1 for count in colours.values()), colours
        for stream in streams:
            stream.close()


async def test_a_server_that_goes_and_comes_back(browser: Browser):
    with make_fake(groups=3) as fake:
        async with http_serving(fake) as client:
            base = str(client.plain.base_url).rstrip("/")
            port = client.plain.base_url.port
            stack = contextlib.AsyncExitStack()
            shown = await stack.enter_async_context(dashboard(browser, base))
            await shown.wait_status("ok")
        async with stack:
            await shown.wait_status("no connection")
            async with http_serving(fake, http_port=port):
                await shown.wait_status("ok")


async def test_a_page_that_nobody_sees_does_not_watch(browser: Browser):
    async with served() as (fake, _, base), dashboard(browser, base) as shown:
        await shown.wait_status("ok")
        assert len(fake.engine._observers) == 2
        hide = "Object.defineProperty(document, 'hidden', {value: VALUE, configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        await shown.evaluate(hide.replace("VALUE", "true") + tell)
        await eventually(lambda: len(fake.engine._observers) == 1)
        await shown.evaluate(hide.replace("VALUE", "false") + tell)
        await eventually(lambda: len(fake.engine._observers) == 2)


async def test_a_bearer_token_goes_with_every_request(browser: Browser):
    """In front of the server, someone who wants a token."""
    async with served() as (fake, _, base), dashboard(browser, base) as shown:
        await shown.wait_status("ok")
        sent: list[str | None] = []

        async def guard(route: Route) -> None:
            sent.append(route.request.headers.get("authorization"))
            if sent[-1] == "Bearer secret":
                await route.continue_()
            else:
                error = {"error": {"message": "a bearer token is needed"}}
                await route.fulfill(
                    status=401, body=json.dumps(error), content_type="application/json"
                )

        await shown.page.route("**/dashboard/**", guard)
        await shown.page.reload()
        await shown.wait_status("no connection")
        assert "a bearer token is needed" in await shown.text("#status")
        await shown.page.fill("#token", "secret")
        await shown.page.click("#token-form button")
        await shown.wait_status("ok")
        assert not await shown.page.is_visible("#token-box")
        stream = open_stream(fake, "abc", LONG, "mine")
        button = shown.page.locator("tr[data-id='mine'] button")
        await button.click()
        await button.click()
        assert (await asyncio.to_thread(stream.read_all)).finish_reason == "abort"
        assert sent[0] is None and set(sent[-2:]) == {"Bearer secret"}


async def test_the_timeline_is_saved(browser: Browser, tmp_path: Path):
    async with served() as (_, client, base), dashboard(browser, base) as shown:
        await shown.wait_status("ok")
        await client.complete(prompt="abc", max_tokens=5)
        async with shown.page.expect_download() as download:
            await shown.page.click("#save")
        await (await download.value).save_as(tmp_path / "timeline.json")
        events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
        assert sum(e["name"] in ("prefill", "decode") for e in events if e["pid"] == 0) >= 5
