"""Where people with certificates reach a controller, if its spec says so: opened when it can be."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.control.operations import Operated, Operations
from cluster.control.operator_registry import PersonBook
from cluster.ray.authority_store import issue_identity
from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.types.errors import ClusterError
from core.types.launch import Launch

logger = logging.getLogger(__name__)


class PeopleDoor:
    """Owned by the controller's event loop."""

    def __init__(self, controller: Operated, book: PersonBook) -> None:
        self._controller = controller
        self._book = book
        self._operations: Operations | None = None
        self._identity: Identity | None = None  # to these people

    async def open(self, launch: Launch) -> None:
        """Raises SpecError, DeployError."""
        if address := launch.spec.security.operators:
            audit_log = Path(launch.log_dir).with_name("audit_log") / "commands.jsonl"
            name = ProcessName.of_controller(launch.spec.name)
            self._identity = self._identity or issue_identity(launch.spec, name)
            self._operations = await Operations.open(
                self._controller, self._book, address, self._identity, audit_log=audit_log
            )

    async def keep_open(self, launch: Launch) -> None:
        """Try again where it could not be opened."""
        if not self._operations:
            try:
                await self.open(launch)
            except ClusterError as error:
                logger.warning("people with certificates are not served; trying again: %s", error)

    async def close(self) -> None:
        if self._operations:
            await self._operations.close()
