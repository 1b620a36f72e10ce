"""Where a deployment's doors are: what listens where, and what clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.control.placement import Node, as_a_router, router_nodes
from cluster.words.errors import SpecError
from cluster.words.network import is_loopback
from cluster.words.spec import RouterSpec

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Doors:
    """On one machine both doors have one address. On several, each router's gRPC door is on the node on which it runs,
    and the HTTP door, which is Ray Serve's, on the head."""

    grpc: str  # "host:port" of every node that may have a router, with commas between them
    http: str  # "http://host:port"
    grpc_host: str | None  # where routers listen; None: each at the address of its own node
    http_host: str  # where Ray Serve listens
    opens_to: str = ""  # the first address off loopback at which a door listens; empty: there is none
    tls_cert: str | None = None  # of both doors
    tls_key: str | None = None
    on_head_only: bool = False  # Ray Serve has no door elsewhere
    actor_options: dict[str, Any] = field(default_factory=dict)  # Ray's, which keep routers on their nodes


def plan_doors(router: RouterSpec, nodes: Sequence[Node], *, is_one_machine: bool) -> Doors:
    """Raises SpecError when the spec's host cannot be where the routers are."""
    if is_one_machine:
        host = router.host or LOOPBACK
        seen = nodes[0].ip if host in EVERYWHERE else host
        return Doors(
            grpc=f"{seen}:{router.grpc_port}",
            http=f"{_scheme(router)}://{seen}:{router.http_port}",
            grpc_host=host,
            http_host=host,
            opens_to="" if is_loopback(host) else host,
            tls_cert=router.tls_cert,
            tls_key=router.tls_key,
        )
    if router.host is not None and router.host not in EVERYWHERE:
        raise SpecError(
            f"router.host: {router.host} is on one machine, and this Ray has several; leave it out, or set 0.0.0.0"
        )
    head = next(node for node in nodes if node.is_head)
    listens = [router.host] if router.host else [head.ip, *(node.ip for node in router_nodes(nodes))]
    return Doors(
        grpc=",".join(f"{node.ip}:{router.grpc_port}" for node in router_nodes(nodes)),
        http=f"{_scheme(router)}://{head.ip}:{router.http_port}",
        opens_to=next((host for host in listens if not is_loopback(host)), ""),
        tls_cert=router.tls_cert,
        tls_key=router.tls_key,
        grpc_host=router.host,
        http_host=router.host or head.ip,
        on_head_only=router.host is None,
        actor_options=as_a_router(nodes),
    )


def keys_of(router: RouterSpec, doors: Doors, *, has_keys: bool) -> Literal["required", "none"]:
    """Whether clients need an API key. has_keys: there are some already. Raises SpecError where nobody has said."""
    if router.keys is not None:
        return router.keys
    if not doors.opens_to:
        return "none"
    if has_keys:
        return "required"
    raise SpecError(
        f"router.keys: the doors open to a network, at {doors.opens_to}; set required, and make keys with "
        "`cluster keys create NAME` when it is up, or none, and whoever reaches them may ask"
    )


def admin_addresses(router: RouterSpec) -> tuple[str, ...]:
    """Where operators ask, on the node of each router."""
    host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(router.admin_host, router.admin_host)
    return tuple(f"{host}:{port}" for port in router.admin_ports)


def _scheme(router: RouterSpec) -> str:
    return "https" if router.tls_cert else "http"
