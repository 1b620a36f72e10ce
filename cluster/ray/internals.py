"""What Ray has no public call for, all of it here: Ray is pinned to one minor version (pyproject.toml) for its sake.

- its control store as a place to keep something, as durable as its own knowledge of the actors;
- what each node has left: public are the sums over the cluster only;
- on which nodes Ray Serve's replicas run: public over its dashboard's HTTP only;
- its words about lost nodes, which every driver prints to stdout, where `--json` is read.

Imports Ray: not before local_ray.join().
"""

from __future__ import annotations

from typing import Any

from ray._private import worker
from ray._private.state import available_resources_per_node
from ray.experimental import internal_kv


def put(key: bytes, value: bytes, *, namespace: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=namespace)


def put_new(key: bytes, value: bytes, *, namespace: bytes) -> bool:
    """Unless there is a value; whether that was so."""
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
    """By node id, by Ray's resource name; living nodes only, a moment old."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def serve_details() -> dict[str, Any]:
    """As ray.serve.schema.ServeInstanceDetails has it. Raises RayServeException when Serve does not run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "it raises, unless it is asked not to"
    found: dict[str, Any] = client.get_serve_details()
    return found


def keep_off_stdout() -> None:
    """From now on this driver prints nothing that Ray's nodes say of themselves. What it means for a deployment is in
    its controller's failures."""
    worker.print_to_stdstream = lambda data, ignore_prefix: None
