"""Whole routers of a cluster in this process, with their endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from core.process.ports import free_port
from core.types.request import Role
from frontend.service import RouterService
from tests.support.identities import router
from tests.support.local_cluster import LocalCluster
from tests.support.waiting import becomes


@asynccontextmanager
async def router_service(
    cluster: LocalCluster, name: str = "router-1", *, model: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[RouterService]:
    """Open a router of the cluster on free ports and wait until it knows all replicas.

    model: fields of its spec's `model` that replace the cluster's. options: arguments of RouterService.open.
    """
    ports, spec = {"grpc_port": free_port(), "http_port": free_port()}, cluster.spec
    changes = {"router": spec.router.model_copy(update=ports), "model": spec.model.model_copy(update=model or {})}
    spec = spec.model_copy(update=changes)
    identity = cluster.identity(router(name, deployment=spec.name))
    service = await RouterService.open(spec, credentials=cluster.credentials, identity=identity, **options)
    try:
        await becomes(lambda: all(service.own.health()[role.value] == len(cluster.pools[role]) for role in Role))
        yield service
    finally:
        await service.close()


def http_url(service: RouterService) -> str:
    return "http://{}:{}".format(*service.http_address)


def admin_url(service: RouterService) -> str:
    return "http://{}:{}".format(*service.admin_address)
