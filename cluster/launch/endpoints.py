"""Endpoints of a deployment: listen addresses of its routers, and URLs for clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from cluster.control.placement import Node, as_a_router, router_nodes
from cluster.launch.state import State
from core.spec.schema import RouterSpec, Spec
from core.types.errors import SpecError
from core.types.network import format_address, is_loopback

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Endpoints. On one machine all routers share one address; on several, each router listens on its own node."""

    # "host:port" of every node that may run a router, separated by commas.
    grpc: str
    http: str  # "http://host:port", or several, as `grpc`
    # Listen address of the routers; None: the address of each router's node.
    host: str | None
    # First listen address that is not on loopback; empty if there is none.
    opens_to: str = ""
    # Ray's options that keep routers on their nodes.
    actor_options: dict[str, Any] = field(default_factory=dict)
    # Maximum routers per node, so that a failing host takes few of them.
    max_per_node: int | None = None


def plan_endpoints(router: RouterSpec, nodes: Sequence[Node], *, is_one_machine: bool) -> Endpoints:
    """Choose the listen addresses. Raises SpecError if routers cannot listen at the spec's host."""
    if is_one_machine:
        host = router.host or LOOPBACK
        seen = nodes[0].ip if host in EVERYWHERE else host
        return _endpoints(router, [seen], host=host, opens_to="" if is_loopback(host) else host)
    if router.host is not None and router.host not in EVERYWHERE:
        raise SpecError(
            f"router.host: {router.host} is on one machine, and this Ray has several; unset it, or set 0.0.0.0 or ::"
        )
    ips = [node.ip for node in router_nodes(nodes)]
    opens_to = router.host or next((ip for ip in ips if not is_loopback(ip)), "")
    options = {"actor_options": as_a_router(nodes), "max_per_node": ceil(router.replicas / max(len(ips), 1))}
    return _endpoints(router, ips, host=router.host, opens_to=opens_to, **options)


def open_ones(endpoints: str, ips: Collection[str]) -> str:
    """Restrict `endpoints` to the nodes `ips` that run routers; return all if no ips are known or there is one shared
    address."""
    one, *others = endpoints.split(",")
    if not others or not ips:
        return endpoints
    where, _, port = one.rpartition(":")
    scheme = where[: where.rfind("/") + 1]
    return ",".join(scheme + format_address(ip, port) for ip in sorted(ips))


def openai_urls(http: str) -> str:
    """Return the base URLs for clients of the OpenAI API."""
    return ",".join(f"{endpoint}/v1" for endpoint in http.split(","))


def _endpoints(router: RouterSpec, ips: Sequence[str], **more: Any) -> Endpoints:
    scheme = "https" if router.tls_cert else "http"
    return Endpoints(
        grpc=",".join(format_address(ip, router.grpc_port) for ip in ips),
        http=",".join(f"{scheme}://{format_address(ip, router.http_port)}" for ip in ips),
        **more,
    )


def with_endpoints(state: State, spec: Spec, endpoints: Endpoints) -> State:
    """Return the state with everything that clients of the endpoints need. spec: with all settings of its router."""
    return replace(
        state,
        grpc=endpoints.grpc,
        http=endpoints.http,
        admin=admin_addresses(spec.router),
        needs_keys=spec.router.keys == "required",
        certificate=spec.router.tls_cert,
        endpoints=spec.router.endpoints or "",
        model=spec.model.name,
    )


def keys_of(router: RouterSpec, endpoints: Endpoints, *, has_keys: bool) -> Literal["required", "none"]:
    """Return "required" if clients need an API key, else "none". has_keys: keys exist already.

    Raises SpecError if the spec must set router.keys.
    """
    if router.keys is not None:
        return router.keys
    if not endpoints.opens_to:
        return "none"
    if has_keys:
        return "required"
    raise SpecError(
        f"router.keys: not set, but the endpoints are open to the network at {endpoints.opens_to}; set required, and "
        "create keys with `cluster keys create NAME` once it is up, or set none to let anyone use them"
    )


def admin_addresses(router: RouterSpec) -> tuple[str, ...]:
    """Return the admin addresses of the routers, each on its router's node."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(router.admin_host, router.admin_host)
    return tuple(format_address(host, port) for port in router.admin_ports)
