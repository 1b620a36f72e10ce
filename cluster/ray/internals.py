"""Private APIs of Ray, besides its store (cluster.ray.store). pyproject.toml pins Ray to one minor version for them.

- Available resources per node; the public API has only sums.
- Nodes of Ray Serve's replicas; public only over the dashboard's HTTP.
- Suppression of node messages on stdout, which `--json` output needs.

Imports Ray, so import it after local_ray.join().
"""

from __future__ import annotations

from typing import Any

from ray._private import worker
from ray._private.state import available_resources_per_node


def available_resources() -> dict[str, dict[str, float]]:
    """Return available resources by node id and resource name; live nodes only, slightly stale."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def serve_details() -> dict[str, Any]:
    """Return ray.serve.schema.ServeInstanceDetails as a dict. Raises RayServeException if Serve does not run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "raises by default"
    found: dict[str, Any] = client.get_serve_details()
    return found


def keep_off_stdout() -> None:
    """Stop this driver from printing node messages. The controller reports what they mean for a deployment."""
    worker.print_to_stdstream = lambda data, ignore_prefix: None
