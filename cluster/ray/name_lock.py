"""Lock on a deployment's name in a Ray cluster.

Taken before anything of the deployment starts, and released after everything is gone. So one of two concurrent deploys
is rejected, and a machine with a stale state file does not take down a newer deployment of the same name.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass

import msgspec

from cluster.ray import store
from core.types.errors import DeployError

# Namespaces of deployments consist of this prefix and a name.
_NAMESPACE = "xpyd"


@dataclass(frozen=True, kw_only=True)
class NameLock:
    """Holder of a name."""

    id: str
    user: str
    host: str

    @classmethod
    def new(cls, user: str) -> NameLock:
        return cls(id=secrets.token_hex(8), user=user, host=socket.gethostname())

    def __str__(self) -> str:
        return f"{self.user} on {self.host}"


def take(name: str, lock: NameLock) -> None:
    """Take the lock. Raises DeployError if another deployment holds it."""
    if store.put_new(_NAMESPACE, name, json.dumps(asdict(lock))):
        return
    current = find(name)
    # If the ids are equal, Ray sent our request twice.
    if current is None or current.id != lock.id:
        holder = f", by {current}" if current else ""
        raise DeployError(f"{name} is deployed on this Ray already, or is being deployed{holder}")


def find(name: str) -> NameLock | None:
    """Return the holder, or None. Raises DeployError."""
    stored = store.get(_NAMESPACE, name)
    return msgspec.json.decode(stored, type=NameLock) if stored else None


def claimed() -> list[str]:
    """Return all locked names. Raises DeployError."""
    return store.keys_in(_NAMESPACE)


def give_up(name: str) -> None:
    """Release the lock. Raises DeployError."""
    store.delete(_NAMESPACE, name)
