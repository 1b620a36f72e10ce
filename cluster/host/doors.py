"""Where a deployment's doors are: what listens where, and what clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.control.placement import Node, as_a_router, router_nodes
from cluster.words.errors import SpecError
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
    on_head_only: bool = False  # Ray Serve has no door elsewhere
    actor_options: dict[str, Any] = field(default_factory=dict)  # Ray's, which keep routers on their nodes


def plan_doors(router: RouterSpec, nodes: Sequence[Node], *, is_one_machine: bool) -> Doors:
    """Raises SpecError when the spec's host cannot be where the routers are."""
    if is_one_machine:
        host = router.host or LOOPBACK
        seen = nodes[0].ip if host in EVERYWHERE else host
        return Doors(
            grpc=f"{seen}:{router.grpc_port}",
            http=f"http://{seen}:{router.http_port}",
            grpc_host=host,
            http_host=host,
        )
    if router.host is not None and router.host not in EVERYWHERE:
        raise SpecError(
            f"router.host: {router.host} is on one machine, and this Ray has several; leave it out, or set 0.0.0.0"
        )
    head = next(node for node in nodes if node.is_head)
    return Doors(
        grpc=",".join(f"{node.ip}:{router.grpc_port}" for node in router_nodes(nodes)),
        http=f"http://{head.ip}:{router.http_port}",
        grpc_host=router.host,
        http_host=router.host or head.ip,
        on_head_only=router.host is None,
        actor_options=as_a_router(nodes),
    )
