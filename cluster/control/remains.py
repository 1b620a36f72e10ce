"""What Ray holds of a deployment beside its controller, removed: by the controller, or in its place."""

from __future__ import annotations

from cluster.control import authority_store, desired, key_keeper, person_book, scaling_history
from cluster.control.gang import find_replicas, remove_leftovers


def remove_remains(name: str) -> None:
    """Every replica that lives, and all that is kept in Ray's store. Raises RayError."""
    for replica in find_replicas(name):
        remove_leftovers(replica, name)
    for store in (person_book, key_keeper, scaling_history, desired, authority_store):
        store.forget(name)
