"""Standard gRPC health service, without API keys, for load balancers and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse
_MAX_WATCHERS = 1024


class EndpointHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # gRPC's stubs have no types
    """Health servicer over one table. Each watcher polls it for itself, so a slow one delays neither others nor `set`.
    Bound to the endpoint's event loop."""

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._changed = asyncio.Event()  # replaced after each change
        self._num_watchers = 0

    def set(self, is_serving: Mapping[str, bool]) -> None:
        """Set the status by service name; other names are unknown."""
        if self._is_serving == is_serving:
            return
        self._is_serving = dict(is_serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Write statuses until the client leaves. No state is kept for an unknown service name."""
        if self._num_watchers >= _MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers; use Check")
        self._num_watchers += 1
        try:
            await self._write_changes(request.service if request.service in self._is_serving else None, context)
        finally:
            self._num_watchers -= 1

    async def _write_changes(self, name: str | None, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        written = None
        while True:
            changed, status = self._changed, self._status(name)
            if status != written:
                await context.write(_Status(status=status))
                written = status
            await changed.wait()

    def _status(self, name: str | None) -> Any:
        is_serving = None if name is None else self._is_serving.get(name)
        if is_serving is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if is_serving else _Status.NOT_SERVING
