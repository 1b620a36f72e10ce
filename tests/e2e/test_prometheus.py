"""Dashboards, alerts and configuration of deploy/monitoring in a real Prometheus (Debian's package)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from core.process.ports import free_port
from frontend.service import RouterService
from tests.e2e.conftest import Lab
from tests.support.plain_http import ask_forever, http_client
from tests.support.router_service import admin_url, http_url, router_service
from tests.support.waiting import beside, told

_FILES = Path(__file__).parents[2] / "deploy" / "monitoring"
_ALERTS = {
    rule["alert"]: rule["expr"] for rule in yaml.safe_load((_FILES / "alerts.yml").read_text())["groups"][0]["rules"]
}
_PROMETHEUS, _PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (_PROMETHEUS and _PROMTOOL), reason="no prometheus here: apt-get install prometheus"),
]


def _tree(tmp_path: Path) -> dict[str, Any]:
    """With all that is exported: lower tiers, drafts, pulls."""
    pool = {"kv_memory_gib": 0.0008, "kv_host_gib": 0.001, "kv_disk_gib": 0.01}
    return {
        "model": {"served_name": "tiny", "dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"replicas": 2, **pool, "kv_disk_path": str(tmp_path / "p")},
        "decode": {"replicas": 2, **pool, "kv_disk_path": str(tmp_path / "d")},
        "speculation": {"method": "ngram"},
        "router": {"max_local_prefill": 0},
    }


async def test_no_panel_and_no_alert_is_without_data(lab: Lab, tmp_path: Path) -> None:
    directory = lab.checkpoint("llama", max_position_embeddings=256)
    async with (
        lab.own(directory, processes=True, **_tree(tmp_path)) as cluster,
        router_service(cluster, "router-1") as first,
        router_service(cluster, "router-2") as second,
        beside(_load([first, second])),
        _prometheus(tmp_path, admin_url(first).removeprefix("http://")) as ask,
    ):
        await told(lambda: _has_two(ask))
        await _check(ask)


async def _has_two(ask: Any) -> bool:
    """Return whether both routers have been scraped for some seconds, through one of them."""
    found = await ask("min(count_over_time(up[1m])) * count(up == 1)")
    return bool(found) and float(found[0]) >= 2 * 8


async def _check(ask: Any) -> None:
    queries = {}
    for path in _FILES.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            queries |= {
                f"{path.name}: {panel['title']}: {one['expr']}": one["expr"] for one in panel.get("targets", ())
            }
    queries = {who: expr.replace("$__rate_interval", "15s").replace("$job", ".+") for who, expr in queries.items()}
    # Data must exist in a healthy state, so the comparison with the limit is removed.
    queries |= {name: expr.rpartition(") ")[0] + ")" for name, expr in _ALERTS.items()}
    assert len(queries) > 60

    async def without() -> list[str]:
        return [who for who, expr in queries.items() if not any(map(math.isfinite, await ask(expr)))]

    async def none_is() -> bool:
        return not await without()

    try:
        await told(none_is)
    except AssertionError:
        raise AssertionError("without data: " + "\n".join(await without())) from None


async def _load(services: list[RouterService]) -> None:
    """Send prompts with common prefixes to both routers, more than the pools hold."""
    urls = [http_url(service) for service in services]

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        prompt = [5 + (number % 9 + i) % 20 for i in range(96)] + [5 + number % 20, 7, 8, 9] * 3
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        await client.post(f"{urls[number % 2]}/v1/completions", json=body, timeout=60)

    await ask_forever(ask, at_once=6)


@asynccontextmanager
async def _prometheus(tmp_path: Path, admin: str) -> AsyncIterator[Any]:
    """Yield a function that returns the values of a query. Uses deploy/monitoring with shorter intervals."""
    directory, port = tmp_path / "monitoring", free_port()
    directory.mkdir()
    for path in _FILES.glob("*.yml"):
        text = re.sub(r"interval: \d+s", "interval: 1s", path.read_text())
        (directory / path.name).write_text(text.replace("127.0.0.1:9100", admin))
    assert _PROMETHEUS and _PROMTOOL
    for check in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        done = await asyncio.to_thread(
            subprocess.run, [_PROMTOOL, *check], cwd=directory, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    command = [_PROMETHEUS, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
               f"--storage.tsdb.path={tmp_path / 'tsdb'}"]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        async with http_client(base_url=f"http://127.0.0.1:{port}") as client:

            async def ask(query: str) -> list[float]:
                answer = await client.get("/api/v1/query", params={"query": query}, timeout=30)
                told = answer.json()
                assert told["status"] == "success", (query, told)
                return [float(one["value"][1]) for one in told["data"]["result"]]

            async def is_ready() -> bool:
                try:
                    return (await client.get("/-/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await told(is_ready)
            groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
            assert len([rule for group in groups for rule in group["rules"]]) == len(_ALERTS)
            yield ask
            groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    finally:
        process.terminate()
        process.wait(30)
