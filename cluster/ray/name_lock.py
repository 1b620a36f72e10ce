"""Whose a deployment's name is in a Ray: claimed once, before anything of it is started, and given up after everything
of it is gone. So of two deploys at once one is refused, and a machine that remembers a deployment which has died with
its Ray does not take down the one that has its name now."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass

from cluster.ray.store import StoreEntry, keys_in
from core.types.errors import DeployError
from core.types.json_records import known_fields

_NAMESPACE = "xpyd"  # of no deployment: theirs have a name behind it


@dataclass(frozen=True, kw_only=True)
class NameLock:
    """One deployment's."""

    id: str
    user: str
    host: str

    @classmethod
    def new(cls, user: str) -> NameLock:
        return cls(id=secrets.token_hex(8), user=user, host=socket.gethostname())

    def __str__(self) -> str:
        return f"{self.user} on {self.host}"


def take(name: str, lock: NameLock) -> None:
    """Raises DeployError where another has it."""
    entry = _entry(name)
    if entry.put_new(json.dumps(asdict(lock))):
        return
    prefix_source = find(name)
    if prefix_source is None or prefix_source.id != lock.id:  # else Ray has asked its store twice, and it is ours
        who = f", by {prefix_source}" if prefix_source else ""
        raise DeployError(f"{name} is deployed on this Ray already, or is being deployed{who}")


def find(name: str) -> NameLock | None:
    """Who has it; None where nobody has. Raises RayError."""
    stored = _entry(name).get()
    return NameLock(**known_fields(NameLock, json.loads(stored))) if stored else None


def claimed() -> list[str]:
    """The names that somebody has. Raises RayError."""
    return keys_in(_NAMESPACE)


def give_up(name: str) -> None:
    """Raises RayError."""
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry(name, namespace=_NAMESPACE)
