"""Admin page of a router in a real browser (headless Chromium, by Playwright)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from core.types.request import Role
from frontend.service import RouterService
from tests.e2e.conftest import Lab
from tests.support.local_cluster import LocalCluster
from tests.support.plain_http import ask_forever, http_client
from tests.support.router_service import admin_url, http_url, router_service
from tests.support.waiting import becomes, beside, told

_CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="no playwright here: pip install playwright")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not _CHROMIUM, reason="no chromium here: apt-get install chromium"),
]

_SHOWN_MS = 2000  # maximum delay until the page shows an event
_WAIT_MS = 30_000
_HOSTILE = "<img/src=x/onerror=alert(1)>&\"'--><script>alert(2)</script>"
_TREE: dict[str, Any] = {
    "model": {"served_name": "tiny", "dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "prefill": {"replicas": 1, "kv_memory_gib": 0.002},
    "decode": {"replicas": 2, "kv_memory_gib": 0.002},
    "router": {"max_local_prefill": 0},
}


async def test_page_shows_events_and_escapes_client_strings(lab: Lab) -> None:
    directory = lab.checkpoint("llama", max_position_embeddings=256)
    async with (
        lab.own(directory, processes=True, **_TREE) as cluster,
        router_service(cluster) as service,
        beside(_load(service)),
        _page(service) as page,
    ):
        await _look(page, service, cluster)


async def _look(page: Any, service: RouterService, cluster: LocalCluster) -> None:
    await page.wait_for_selector('[data-replica="decode-2"][data-state="ready"]', timeout=_WAIT_MS)
    await page.wait_for_selector("path.flow", timeout=_WAIT_MS)

    # Client-supplied strings are rendered as text everywhere.
    async with http_client(base_url=http_url(service)) as client:
        body = {"prompt": [5 + i % 20 for i in range(70)], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": _HOSTILE}, timeout=60)
        assert answer.status_code == 200
    row = page.locator("#decisions tr", has_text=_HOSTILE)
    await row.first.wait_for(timeout=_WAIT_MS)
    await row.first.locator("a").click()
    await page.wait_for_selector("#life rect.decode", timeout=_WAIT_MS)
    assert _HOSTILE in await page.inner_text("#life-head")
    states = await page.locator("#life text").all_text_contents()
    assert {"compute prefill-0", "wire prefill-0"} <= set(states)
    assert "predicted" in await page.inner_text("#routes")
    assert await page.locator("img").count() == 0 and await page.locator("script").count() == 1

    # Kill a replica and add one.
    victim = next(replica for replica in cluster.pools[Role.DECODE] if replica.id == "decode-1")
    victim.send(signal.SIGKILL)
    began = time.monotonic()
    ready = '[data-replica="{}"][data-state="ready"]'
    await page.wait_for_selector(ready.format("decode-1"), state="detached", timeout=_SHOWN_MS)
    print(f"a kill is shown after {time.monotonic() - began:.2f} s")
    cluster.processes = False  # a replica in this process can switch its role
    added = await cluster.add(Role.DECODE)
    began = time.monotonic()
    await becomes(lambda: service.own.health()["decode"] == 2)
    await page.wait_for_selector(ready.format(added.id), timeout=_SHOWN_MS)
    print(f"a replica more is shown {time.monotonic() - began:.2f} s after it can be used")
    await page.locator("#events tr", has_text="decode-1").first.wait_for(timeout=_WAIT_MS)
    if path := os.environ.get("XPYD_SCREENSHOT"):
        await _picture(page, service, path)

    # Switch a role and remove a replica.
    successor = await cluster.switch(added)
    began = time.monotonic()
    await becomes(lambda: service.own.health()["prefill"] == 2)
    await page.wait_for_selector(ready.format(successor.id), timeout=_SHOWN_MS)
    await page.wait_for_selector(ready.format(added.id), state="detached", timeout=_SHOWN_MS)
    print(f"a role switch is shown {time.monotonic() - began:.2f} s after it")
    for rank in successor.ranks:
        rank.drain()
    await page.wait_for_selector(ready.format(successor.id), state="detached", timeout=_SHOWN_MS)


async def _picture(page: Any, service: RouterService, path: str) -> None:
    """Take the screenshots for the documentation."""
    async with http_client(base_url=http_url(service)) as client:
        body = {"prompt": [6 + i % 19 for i in range(90)], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        await client.post("/v1/completions", json=body, headers={"x-request-id": "chat-42"}, timeout=60)
    await page.locator("#decisions a", has_text="chat-42").first.click()
    await page.locator("#life-head", has_text="chat-42").wait_for(timeout=_WAIT_MS)
    points = "() => document.querySelector('#rate path').getAttribute('d').split('L').length"
    await told(lambda: _is_more(page, points, 90), within_s=150)
    await page.screenshot(path=path, full_page=True)


async def _is_more(page: Any, number: str, than: int) -> bool:
    found: int = await page.evaluate(number)
    return found > than


async def _load(service: RouterService) -> None:
    url = f"{http_url(service)}/v1/completions"

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        prompt = [5 + (number * 7 + i * (1 + number % 3)) % 20 for i in range(64 + number % 5 * 16)]
        body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        await client.post(url, json=body, timeout=60)

    await ask_forever(ask, at_once=4)


@asynccontextmanager
async def _page(service: RouterService) -> AsyncIterator[Any]:
    """Open the page. Browser errors and requests to other hosts fail the test."""
    admin = admin_url(service)
    errors: list[str] = []
    foreign_urls: list[str] = []
    async with playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append("a dialog"))
        page.on("request", lambda request: foreign_urls.append(request.url))
        await page.goto(f"{admin}/ui")
        try:
            yield page
        finally:
            await browser.close()
    assert not [one for one in foreign_urls if not one.startswith(admin + "/")]
    assert not errors
