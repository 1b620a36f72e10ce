"""Whole routers of a cluster in this process, with their endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from core.process.ports import free_port
from core.types.request import Role
from frontend.service import RouterService
from tests.support.identities import router
from tests.support.local_cluster import LocalCluster
from tests.support.waiting import becomes


@asynccontextmanager
async def router_service(cluster: LocalCluster, name: str = "router-1", **options: Any) -> AsyncIterator[RouterService]:
    """Open a router of the cluster on free ports and wait until it knows all replicas. options: of RouterService."""
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    spec = cluster.spec.model_copy(update={"router": cluster.spec.router.model_copy(update=ports)})
    identity = cluster.identity(router(name, deployment=spec.name))
    service = await RouterService.open(spec, credentials=cluster.credentials, identity=identity, **options)
    try:
        await becomes(lambda: all(service.health()[role.value] == len(cluster.pools[role]) for role in Role))
        yield service
    finally:
        await service.close()


def http_url(service: RouterService) -> str:
    return "http://{}:{}".format(*service.http_address)


def admin_url(service: RouterService) -> str:
    return "http://{}:{}".format(*service.admin_address)
