"""From a deployment's name to what is known of it, to a driver of its Ray and a handle of its controller.

No command may import Ray, or what imports it, before it has called this: see local_ray.join().
"""

from __future__ import annotations

import os
from typing import Any

from cluster.host import local_ray
from cluster.host import state as states
from cluster.host.state import State
from cluster.words.errors import DeployError

ADDRESS = "CLUSTER_ADDRESS"  # in the environment: of the Ray to be asked, in place of what is remembered here


def find_state(name: str | None) -> State:
    """The deployment called `name`, or the only one: of this machine's user or, with an address, of that Ray.

    Raises NotDeployed, SpecError when there are several, and DeployError when no Ray answers there.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return states.find(name)
    from cluster.host import remote

    return remote.find(address, name)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray; returns the controller's handle, for cluster.host.driver.ask.

    Raises DeployError when either does not answer.
    """
    if state.local_ray is not None:
        local_ray.join(state.local_ray)
    from cluster.host import driver

    driver.connect(state.ray_address, state.name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: its controller is gone from Ray at {state.ray_address}; run `cluster down`")
    return controller
