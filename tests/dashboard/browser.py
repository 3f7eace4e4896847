"""Headless Chromium, the system's own, with a page that is the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
NARROW, WIDE = (400, 800), (1600, 1000)
SCHEMES = ("light", "dark")


def chromium_path() -> str:
    """Playwright would download one of its own; any that is installed will do."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise RuntimeError(f"no browser: none of {', '.join(NAMES)} is installed")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    # Root has no sandbox, and a container may have little shared memory. Only own pages are shown.
    flags = ["--disable-dev-shm-usage"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Shown:
    """The dashboard in a page. complaints: what the browser found wrong, but for what the network
    did: errors of the script, and what the policy forbids."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def wait(self, script: str) -> None:
        """Until a JavaScript expression is true. Asked again and again from here: what waits in the
        page is forbidden by the page's policy."""
        async with asyncio.timeout(10):
            while not await self.page.evaluate(script):
                await asyncio.sleep(0.03)

    async def wait_status(self, name: str) -> None:
        await self.wait(f"document.body.dataset.status === '{name}'")

    async def evaluate(self, script: str) -> Any:
        return await self.page.evaluate(script)


@contextlib.asynccontextmanager
async def dashboard(
    browser: Browser, base: str, size: tuple[int, int] = WIDE, scheme: str = "light"
) -> AsyncIterator[Shown]:
    """base: the server's address. Leaves nothing behind; fails where the browser complained."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        locale="en-US",
    )
    shown = Shown(await context.new_page())

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            shown.complaints.append(message.text)

    shown.page.on("console", note)
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    try:
        await shown.page.goto(f"{base}/dashboard")
        yield shown
    finally:
        await context.close()
    assert not shown.complaints, shown.complaints
