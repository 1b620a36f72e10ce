"""What Ray has no public call for, all of it here: Ray is pinned to one minor version (pyproject.toml) for its sake.

- its control store as a place to keep something, as durable as its own knowledge of the actors;
- what each node has left: public are the sums over the cluster only.

Imports Ray: not before local_ray.join().
"""

from __future__ import annotations

from ray._private.state import available_resources_per_node
from ray.experimental import internal_kv


def put(key: bytes, value: bytes, *, namespace: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=namespace)


def get(key: bytes, *, namespace: bytes) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=namespace)
    return value


def delete(key: bytes, *, namespace: bytes) -> None:
    internal_kv._internal_kv_del(key, namespace=namespace)


def available_resources() -> dict[str, dict[str, float]]:
    """By node id, by Ray's resource name; living nodes only, a moment old."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found
