"""Connections to a deployment: from its name to its state, a Ray driver and the controller's handle.

Commands call this before they import Ray or anything that imports it: see local_ray.join().
"""

from __future__ import annotations

import os
from typing import Any

from cluster.launch import local_ray
from cluster.launch import state as states
from cluster.launch.state import State
from core.types.errors import DeployError

# Environment variable: address of a Ray to use instead of this user's deployments on this machine.
ADDRESS = "CLUSTER_ADDRESS"


def find_state(name: str | None, *, to_remove: bool = False) -> State:
    """Return the deployment called `name`, or the only one: of this machine's user or, with an address, of that Ray.

    to_remove: also return a partial deployment. Raises NotDeployed, SpecError if there are several, and DeployError if
    no Ray answers there.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return states.find(name)
    from cluster.launch import remote

    return remote.find_any(address, name) if to_remove else remote.find(address, name)


def ask_deployed(name: str | None, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the controller of the deployment called `name`.

    Raises what find_state, join_controller and cluster.launch.driver.ask raise.
    """
    controller = join_controller(find_state(name))
    from cluster.launch import driver

    return driver.ask(controller, method, *args, **kwargs)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray. Returns the controller's handle, for cluster.launch.driver.ask.

    Raises DeployError if Ray or the controller does not answer.
    """
    if state.joined_ray is not None:
        local_ray.join(state.joined_ray)
    from cluster.launch import driver

    driver.connect(state.ray_address, state.name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: no controller on Ray at {state.ray_address}; run `cluster down`")
    return controller
