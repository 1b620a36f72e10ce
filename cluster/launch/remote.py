"""Lookup of deployments made by another machine or user, from any node of their Ray."""

from __future__ import annotations

import ray

from cluster.control.placement import live_nodes
from cluster.launch import driver, router_app
from cluster.launch.endpoints import EVERYWHERE, plan_endpoints, with_endpoints
from cluster.launch.state import State, choose
from cluster.ray import name_lock
from cluster.ray.store import CONTROLLER, namespace
from core.spec.loader import parse_spec
from core.types.errors import DeployError


def find(address: str, name: str | None) -> State:
    """Return the deployment called `name` on the Ray at `address`, or the only one there.

    Raises NotDeployed, SpecError if there are several, and DeployError if no Ray answers there.
    """
    state = find_any(address, name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(
            f"{state.name}: no controller on Ray at {state.ray_address}; unless it is being deployed right now, "
            f"`cluster --address {address} down` removes what is left of it"
        )
    spec = parse_spec(driver.ask(controller, "status")["spec"], origin="the stored spec")
    # On a single machine, deploy() has filled in the host.
    is_one_machine = spec.router.host not in (None, *EVERYWHERE)
    endpoints = plan_endpoints(spec.router, live_nodes(), is_one_machine=is_one_machine)
    return with_endpoints(state, spec, endpoints)


def find_any(address: str, name: str | None) -> State:
    """Like find(), but also return a partial deployment, with the fields needed to remove it."""
    driver.connect(address, "")
    prefix = namespace("")
    actors = ray.util.list_named_actors(all_namespaces=True)
    ours = [entry["namespace"] for entry in actors if entry["name"] == CONTROLLER]
    names = {space.removeprefix(prefix) for space in ours if space.startswith(prefix)}
    chosen = choose(name, sorted(names | set(name_lock.claimed())))
    claim = name_lock.find(chosen)
    return State(
        name=chosen,
        claim=claim.id if claim else "",
        ray_address=ray.get_runtime_context().gcs_address,
        owns_serve=router_app.is_serve_running() and router_app.is_only_application(chosen),
    )
