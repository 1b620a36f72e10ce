"""From a deployment's name to what is known of it, to a driver of its Ray and a handle of its controller.

No command may import Ray, or what imports it, before it has called this: see local_ray.join().
"""

from __future__ import annotations

import os
from typing import Any

from cluster.launch import local_ray
from cluster.launch import state as states
from cluster.launch.person_file import CERTIFICATE, PersonFile
from cluster.launch.state import State
from core.types.errors import DeployError, SpecError

ADDRESS = "CLUSTER_ADDRESS"  # in the environment: of the Ray to be asked, in place of what is remembered here


def find_state(name: str | None, *, by_certificate: bool = False, to_remove: bool = False) -> State:
    """The deployment called `name`, or the only one: of this machine's user or, with an address, of that Ray; with a
    certificate, the one that it is for.

    by_certificate: whether this command can do without Ray. to_remove: also where it was never ready. Raises
    NotDeployed, SpecError when there are several, and DeployError when no Ray answers there.
    """
    if certificate := os.environ.get(CERTIFICATE):
        deployment = PersonFile.load(certificate).identity.name.deployment
        if not by_certificate or name not in (None, deployment):
            raise SpecError(
                f"--as (or {CERTIFICATE}): by that certificate there are status, logs, scale, switch, drain and keys "
                f"of {deployment}; do all else without it, from a host of its Ray"
            )
        return State(name=deployment, ray_address="", local_ray=None, grpc="", http="", deploying=None)
    address = os.environ.get(ADDRESS)
    if not address:
        return states.find(name)
    from cluster.launch import remote

    return remote.find_any(address, name) if to_remove else remote.find(address, name)


def ask_deployed(name: str | None, method: str, *args: Any, by_certificate: bool = False, **kwargs: Any) -> Any:
    """What the controller of the deployment called `name` answers. Raises as find_state, join_controller and
    cluster.launch.driver.ask do."""
    controller = join_controller(find_state(name, by_certificate=by_certificate))
    from cluster.launch import driver

    return driver.ask(controller, method, *args, **kwargs)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray; returns the controller's handle, for cluster.launch.driver.ask. Or, with
    a certificate, what takes its place.

    Raises DeployError when either does not answer.
    """
    if certificate := os.environ.get(CERTIFICATE):
        from cluster.launch.certified_controller import CertifiedController

        return CertifiedController(PersonFile.load(certificate))
    if state.joined_ray is not None:
        local_ray.join(state.joined_ray)
    from cluster.launch import driver

    driver.connect(state.ray_address, state.name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: its controller is gone from Ray at {state.ray_address}; run `cluster down`")
    return controller
