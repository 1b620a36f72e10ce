"""Which deployments have no doors of their own, and name another's: read from what Ray's store has of each."""

from __future__ import annotations

import json
import logging

from ray.exceptions import RayError

from cluster.control import desired_state
from cluster.ray import name_lock
from core.types.errors import ClusterError, DeployError
from core.types.launch import Launch

logger = logging.getLogger(__name__)


class AttachedList:
    """Of one deployment's doors. Keeps what it has read: nearly always nothing has changed."""

    def __init__(self, endpoints: str) -> None:
        """doors: whose they are."""
        self._endpoints = endpoints
        self._read: dict[str, tuple[bytes, Launch | None]] = {}  # what was stored; None: no borrower of these doors

    def launches(self) -> list[Launch]:
        """How the processes of each were started. Raises DeployError where Ray's store does not answer."""
        try:
            stored = {name: desired_state.stored(name) for name in name_lock.claimed() if name != self._endpoints}
        except (RayError, OSError) as error:
            raise DeployError(f"Ray's own store does not answer: {' '.join(str(error).split())}") from error
        self._read = {name: self._known(name, text) for name, text in stored.items() if text}
        return [launch for _, launch in self._read.values() if launch]

    def _known(self, name: str, text: bytes) -> tuple[bytes, Launch | None]:
        known = self._read.get(name)
        if known and known[0] == text:
            return known
        try:
            names = json.loads(text)["spec"].get("router", {}).get("endpoints")
            return text, desired_state.Desired.from_json(text).launch if names == self._endpoints else None
        except (
            ClusterError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # of another version, perhaps
            logger.warning("deployment %s: what is stored of it cannot be read, and does not count: %r", name, error)
            return text, known[1] if known else None


def attached_to(endpoints: str) -> list[str]:
    """Their names. Raises DeployError."""
    return sorted(launch.spec.name for launch in AttachedList(endpoints).launches())
