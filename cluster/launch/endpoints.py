"""Where a deployment's doors are: what listens where, and what clients are told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from cluster.control.placement import Node, as_a_router, router_nodes
from core.spec.schema import RouterSpec
from core.types.errors import SpecError
from core.types.network import is_loopback

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """On one machine both have one address, which its routers share. On several, each router's are on its own node."""

    grpc: str  # "host:port" of every node that may have a router, with commas between them
    http: str  # "http://host:port", likewise
    host: str | None  # where routers listen; None: each at the address of its own node
    opens_to: str = ""  # the first address off loopback at which a door listens; empty: there is none
    actor_options: dict[str, Any] = field(default_factory=dict)  # Ray's, which keep routers on their nodes
    max_per_node: int | None = None  # routers: so that a host that fails takes few of them along


def plan_endpoints(router: RouterSpec, nodes: Sequence[Node], *, is_one_machine: bool) -> Endpoints:
    """Raises SpecError when the spec's host cannot be where the routers are."""
    if is_one_machine:
        host = router.host or LOOPBACK
        seen = nodes[0].ip if host in EVERYWHERE else host
        return _endpoints(router, [seen], host=host, opens_to="" if is_loopback(host) else host)
    if router.host is not None and router.host not in EVERYWHERE:
        raise SpecError(
            f"router.host: {router.host} is on one machine, and this Ray has several; leave it out, or set 0.0.0.0"
        )
    ips = [node.ip for node in router_nodes(nodes)]
    opens_to = router.host or next((ip for ip in ips if not is_loopback(ip)), "")
    options = {"actor_options": as_a_router(nodes), "max_per_node": ceil(router.replicas / max(len(ips), 1))}
    return _endpoints(router, ips, host=router.host, opens_to=opens_to, **options)


def open_ones(endpoints: str, ips: Collection[str]) -> str:
    """Doors like these, as in Doors, at the addresses of the nodes on which routers run; all that there may be when
    none is known. Where there is one for all routers of a machine, that."""
    one, *others = endpoints.split(",")
    if not others or not ips:
        return endpoints
    where, _, port = one.rpartition(":")
    scheme = where[: where.rfind("/") + 1]
    return ",".join(f"{scheme}{ip}:{port}" for ip in sorted(ips))


def openai_urls(http: str) -> str:
    """What clients of the OpenAI API are told, of the HTTP doors."""
    return ",".join(f"{endpoint}/v1" for endpoint in http.split(","))


def _endpoints(router: RouterSpec, ips: Sequence[str], **more: Any) -> Endpoints:
    scheme = "https" if router.tls_cert else "http"
    return Endpoints(
        grpc=",".join(f"{ip}:{router.grpc_port}" for ip in ips),
        http=",".join(f"{scheme}://{ip}:{router.http_port}" for ip in ips),
        **more,
    )


def keys_of(router: RouterSpec, endpoints: Endpoints, *, has_keys: bool) -> Literal["required", "none"]:
    """Whether clients need an API key. has_keys: there are some already. Raises SpecError where nobody has said."""
    if router.keys is not None:
        return router.keys
    if not endpoints.opens_to:
        return "none"
    if has_keys:
        return "required"
    raise SpecError(
        f"router.keys: the doors open to a network, at {endpoints.opens_to}; set required, and make keys with "
        "`cluster keys create NAME` when it is up, or none, and whoever reaches them may ask"
    )


def admin_addresses(router: RouterSpec) -> tuple[str, ...]:
    """Where operators ask, on the node of each router."""
    host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(router.admin_host, router.admin_host)
    return tuple(f"{host}:{port}" for port in router.admin_ports)
