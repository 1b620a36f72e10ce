"""From what is remembered of a deployment to a driver of its Ray and a handle of its controller.

No command may import Ray, or what imports it, before it has called this: see local_ray.join().
"""

from __future__ import annotations

from typing import Any

from cluster.host import local_ray
from cluster.host.state import State
from cluster.words.errors import DeployError


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
