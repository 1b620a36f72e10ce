"""Health probes of a router over HTTP: liveness, readiness, startup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response


@dataclass(frozen=True, kw_only=True)
class HealthProbes:
    """Probe functions, which answer from memory."""

    live: Callable[[], bool]  # False: restart the process
    ready: Callable[[], bool]  # False: send no requests for now
    startup: Callable[[], bool]  # False: ignore the other two for now


def add_health(app: FastAPI, probes: HealthProbes) -> None:
    """Add GET /health/live, /health/ready and /health/startup, which answer 200 or 503 without a reason."""

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
