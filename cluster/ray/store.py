"""Entries in Ray's control store, which are as durable as Ray's knowledge of its actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from core.types.errors import DeployError


class StoreEntry:
    """One entry of one deployment. Ray must be connected when a method is called.

    Methods raise DeployError if the store does not answer.
    """

    def __init__(self, key: str, *, namespace: str) -> None:
        """namespace: the deployment's (desired_state.namespace)."""
        self._key = key.encode()
        self._namespace = namespace.encode()

    def put(self, text: str) -> None:
        """Store the text."""
        with _answering() as store:
            store.put(self._key, text.encode(), namespace=self._namespace)

    def put_new(self, text: str) -> bool:
        """Store the text unless an entry exists. Returns whether it was stored."""
        with _answering() as store:
            return bool(store.put_new(self._key, text.encode(), namespace=self._namespace))

    def get(self) -> bytes | None:
        with _answering() as store:
            found: bytes | None = store.get(self._key, namespace=self._namespace)
            return found

    def delete(self) -> None:
        with _answering() as store:
            store.delete(self._key, namespace=self._namespace)


def keys_in(namespace: str) -> list[str]:
    """Return the keys of a namespace, sorted. Raises DeployError if the store does not answer."""
    with _answering() as store:
        return sorted(key.decode() for key in store.keys(namespace=namespace.encode()))


@contextmanager
def _answering() -> Iterator[ModuleType]:
    """Yield the functions of Ray's store. Translates Ray's errors into DeployError with one line."""
    from ray.exceptions import RayError

    from cluster.ray import internals

    try:
        yield internals
    except (RayError, OSError) as error:
        raise DeployError(f"Ray's key-value store does not answer: {' '.join(str(error).split())}") from error
