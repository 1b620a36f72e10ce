"""Asking the routers of a deployment, for commands that show what these keep."""

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
    typer.Option(help="HOST:PORT at which a router answers operators; default: all of the deployment's."),
]

RequestId: TypeAlias = Annotated[
    str, typer.Argument(help="As `generate --json`, the X-Request-Id header or an answer's `id` says it.")
]


def ask_routers_of(name: str | None, admin: str | None, path: str) -> list[AdminAnswer]:
    """What each of them answers to GET `path`, at least one. Raises ClusterError when nobody does."""
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
    """What the router that served a request answers to GET `path` and its id. Raises ClusterError where none knows."""
    answers = ask_routers_of(name, admin, path + urllib.parse.quote(request_id, safe=""))
    found = [tree for answer in answers if answer.status == 200 and (tree := answer.json())]
    if not found:
        raise ClusterError(
            f"no router remembers request {request_id}: each keeps its last 1,000, by the id of `generate --json`, of "
            "the header X-Request-Id, or of an answer"
        )
    return found[0]
