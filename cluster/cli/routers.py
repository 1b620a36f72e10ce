"""Requests to the admin ports of a deployment's routers."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from cluster.cli.connection import find_state, join_controller
from core.types.errors import ClusterError

if TYPE_CHECKING:  # Ray must not be imported before local_ray.join()
    from cluster.launch.router_admin import AdminAnswer

Admin: TypeAlias = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a router's admin endpoint; default: all routers of the deployment."),
]

RequestId: TypeAlias = Annotated[
    str, typer.Argument(help="Request id, from `generate --json`, the X-Request-Id header or an answer's `id`.")
]


def ask_routers_of(name: str | None, admin: str | None, path: str) -> list[AdminAnswer]:
    """GET `path` from each router. Returns at least one response, else raises ClusterError."""
    from cluster.launch.router_admin import ask_at, ask_routers

    if admin:
        answers = ask_at(admin, path)
    else:
        state = find_state(name)
        if state.joined_ray is None:
            join_controller(state)
        answers = ask_routers(state, path)
    if not answers:
        raise ClusterError("no router answers; see `cluster status`")
    return answers


def remembered(name: str | None, admin: str | None, path: str, request_id: str) -> dict[str, Any]:
    """GET `path` and the request id from the router that served the request.

    Raises ClusterError if no router knows it.
    """
    answers = ask_routers_of(name, admin, path + urllib.parse.quote(request_id, safe=""))
    found = [tree for answer in answers if answer.status == 200 and (tree := answer.json())]
    if not found:
        raise ClusterError(
            f"no router remembers request {request_id}: each keeps its last 1,000, by the id in `generate --json`, "
            "in the X-Request-Id header, or in an answer"
        )
    return found[0]
