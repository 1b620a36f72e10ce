"""The only module that uses private APIs of Ray; pyproject.toml pins Ray to one minor version for it.

- Control store as durable key-value storage.
- Available resources per node; the public API has only sums.
- Nodes of Ray Serve's replicas; public only over the dashboard's HTTP.
- Suppression of node messages on stdout, which `--json` output needs.

Imports Ray, so import it after local_ray.join().
"""

from __future__ import annotations

from typing import Any

from ray._private import worker
from ray._private.state import available_resources_per_node
from ray.experimental import internal_kv


def put(key: bytes, value: bytes, *, namespace: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=namespace)


def put_new(key: bytes, value: bytes, *, namespace: bytes) -> bool:
    """Store the value unless the key exists. Returns whether it was stored."""
    is_there = internal_kv._internal_kv_put(key, value, overwrite=False, namespace=namespace)
    return not is_there


def keys(*, namespace: bytes) -> list[bytes]:
    found: list[bytes] = internal_kv._internal_kv_list(b"", namespace=namespace)
    return found


def get(key: bytes, *, namespace: bytes) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=namespace)
    return value


def delete(key: bytes, *, namespace: bytes) -> None:
    internal_kv._internal_kv_del(key, namespace=namespace)


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
    """Stop this driver from printing node messages. Their effect on a deployment is in its controller's failures."""
    worker.print_to_stdstream = lambda data, ignore_prefix: None
