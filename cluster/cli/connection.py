"""From a deployment's name to what is known of it, to a driver of its Ray and a handle of its controller.

No command may import Ray, or what imports it, before it has called this: see local_ray.join().
"""

from __future__ import annotations

import os
from typing import Any

from cluster.launch import local_ray
from cluster.launch import state as states
from cluster.launch.state import State
from core.types.errors import DeployError

# Environment variable: the Ray to ask, instead of the deployments that this machine's user has made.
ADDRESS = "CLUSTER_ADDRESS"


def find_state(name: str | None, *, to_remove: bool = False) -> State:
    """Find the deployment called `name`, or the only one: of this machine's user or, with an address, of that Ray.

    to_remove: also return one whose deploying was cut short. Raises NotDeployed, SpecError when there are several, and
    DeployError when no Ray answers there.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return states.find(name)
    from cluster.launch import remote

    return remote.find_any(address, name) if to_remove else remote.find(address, name)


def ask_deployed(name: str | None, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the controller of the deployment called `name`.

    Raises as find_state, join_controller and cluster.launch.driver.ask do.
    """
    controller = join_controller(find_state(name))
    from cluster.launch import driver

    return driver.ask(controller, method, *args, **kwargs)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray; returns the controller's handle, for cluster.launch.driver.ask.

    Raises DeployError when Ray or the controller does not answer.
    """
    if state.joined_ray is not None:
        local_ray.join(state.joined_ray)
    from cluster.launch import driver

    driver.connect(state.ray_address, state.name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: its controller is gone from Ray at {state.ray_address}; run `cluster down`")
    return controller
