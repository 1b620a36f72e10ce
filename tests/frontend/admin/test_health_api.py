"""Liveness, readiness and startup probes."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from frontend.admin.health_api import HealthProbes, add_health


@pytest.mark.parametrize("name", ["live", "ready", "startup"])
async def test_each_probe_has_its_own_answer(name: str) -> None:
    said = dict.fromkeys(("live", "ready", "startup"), True)
    app = FastAPI()
    add_health(
        app,
        HealthProbes(live=lambda: said["live"], ready=lambda: said["ready"], startup=lambda: said["startup"]),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        assert (await client.get(f"/health/{name}")).json() == {"status": "ok"}
        said[name] = False
        answers = {question: (await client.get(f"/health/{question}")).status_code for question in said}
    assert answers == dict.fromkeys(said, 200) | {name: 503}
