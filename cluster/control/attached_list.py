"""Deployments that share another deployment's endpoints, as recorded in Ray's key-value store."""

from __future__ import annotations

import json
import logging

from cluster.control import desired_state
from cluster.ray import name_lock
from core.types.errors import ClusterError
from core.types.launch import Launch

logger = logging.getLogger(__name__)


class AttachedList:
    """Deployments attached to one deployment's endpoints. Caches parsed records, because they rarely change."""

    def __init__(self, endpoints: str) -> None:
        """endpoints: name of the deployment that owns the endpoints."""
        self._endpoints = endpoints
        # Stored bytes, and the launch parsed from them; None if the deployment is not attached to these endpoints.
        self._parsed: dict[str, tuple[bytes, Launch | None]] = {}

    def launches(self) -> list[Launch]:
        """Return the launch of each attached deployment.

        Raises DeployError if Ray's store does not answer.
        """
        stored = {name: desired_state.stored(name) for name in name_lock.claimed() if name != self._endpoints}
        self._parsed = {name: self._parse(name, text) for name, text in stored.items() if text}
        return [launch for _, launch in self._parsed.values() if launch]

    def _parse(self, name: str, text: bytes) -> tuple[bytes, Launch | None]:
        known = self._parsed.get(name)
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
            # The record may be from another version.
        ) as error:
            logger.warning("ignored unreadable deployment record deployment=%s error=%r", name, error)
            return text, known[1] if known else None
