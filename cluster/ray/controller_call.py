"""Calls to a deployment's controller from processes started by Ray."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.control.desired_state import CONTROLLER, namespace
from core.types.errors import ClusterError, DeployError

# Longer than a controller needs to restart.
_ASK_S = 60.0


def ask_controller(deployment: str, method: str, *args: Any) -> Any:
    """Call a controller method and block.

    Raises the controller's own ClusterError, or DeployError for anything else.
    """
    try:
        controller: Any = ray.get_actor(CONTROLLER, namespace=namespace(deployment))
        return ray.get(getattr(controller, method).remote(*args), timeout=_ASK_S)
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise DeployError(f"{deployment}'s controller: {method}: {error.cause}") from error
    except (RayError, GetTimeoutError, ValueError) as error:
        raise DeployError(f"{deployment}'s controller: {method}: {' '.join(str(error).split())}") from error
