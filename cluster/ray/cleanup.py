"""Removal of everything that Ray holds of a deployment besides its controller."""

from __future__ import annotations

from cluster.control import desired_state, key_registry, scaling_history
from cluster.control.gang import find_replicas, remove_leftovers
from cluster.ray import authority_store


def remove_remains(name: str) -> None:
    """Remove all replicas and all entries in Ray's store. Raises RayError."""
    for replica in find_replicas(name):
        remove_leftovers(replica, name)
    for store in (key_registry, scaling_history, desired_state, authority_store):
        store.forget(name)
