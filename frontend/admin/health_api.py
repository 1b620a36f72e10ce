"""Three questions to a router over HTTP: is it alive, is it ready, has it started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response


@dataclass(frozen=True, kw_only=True)
class HealthProbes:
    """Each says yes or no at once, from memory."""

    live: Callable[[], bool]  # no: only a new process can help
    ready: Callable[[], bool]  # no: send requests elsewhere for now
    startup: Callable[[], bool]  # no: it has not come so far yet that the others mean anything


def add_health(app: FastAPI, probes: HealthProbes) -> None:
    """GET /health/live, /health/ready and /health/startup: 200, or 503, and not why."""

    def answer(is_so: bool) -> Response:
        return JSONResponse({"status": "ok" if is_so else "unavailable"}, status_code=200 if is_so else 503)

    @app.get("/health/live")
    async def report_liveness() -> Response:
        return answer(probes.live())

    @app.get("/health/ready")
    async def report_readiness() -> Response:
        return answer(probes.ready())

    @app.get("/health/startup")
    async def report_startup() -> Response:
        return answer(probes.startup())
