"""Entries in Ray's control store, which are as durable as Ray's knowledge of its actors."""

from __future__ import annotations

from core.types.errors import DeployError


class StoreEntry:
    """One entry of one deployment. Ray must be connected when a method is called."""

    def __init__(self, key: str, *, namespace: str) -> None:
        """namespace: the deployment's (desired_state.namespace)."""
        self._key = key.encode()
        self._namespace = namespace.encode()

    def put(self, text: str) -> None:
        """Store the text. Raises DeployError."""
        from ray.exceptions import RayError

        from cluster.ray import internals

        try:
            internals.put(self._key, text.encode(), namespace=self._namespace)
        except RayError as error:
            raise DeployError(f"Ray's key-value store does not answer: {' '.join(str(error).split())}") from error

    def put_new(self, text: str) -> bool:
        """Store the text unless an entry exists. Returns whether it was stored. Raises RayError."""
        from cluster.ray import internals

        return internals.put_new(self._key, text.encode(), namespace=self._namespace)

    def get(self) -> bytes | None:
        from cluster.ray import internals

        return internals.get(self._key, namespace=self._namespace)

    def delete(self) -> None:
        from cluster.ray import internals

        internals.delete(self._key, namespace=self._namespace)


def keys_in(namespace: str) -> list[str]:
    """Return the keys of a namespace, sorted. Raises RayError."""
    from cluster.ray import internals

    return sorted(key.decode() for key in internals.keys(namespace=namespace.encode()))
