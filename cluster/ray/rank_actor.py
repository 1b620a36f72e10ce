"""Ray actor of a rank. It imports the rank's factory by path and forwards every call to the rank.

Importing happens here, so the controller and the command line never import torch, and import errors are reported like
any other failure.
"""

from __future__ import annotations

import gc
import importlib
import logging
import threading
import time
from typing import cast

from cluster.ray.controller_call import open_tls_credentials
from core.identity.credentials import Renewal
from core.identity.process_name import ProcessName
from core.process.interpreter import spare_the_old, take_short_turns
from core.process.log import log_path, redirect_output
from core.types.launch import Launch
from core.types.rank_api import Binding, Progress, Rank, RankStatus

logger = logging.getLogger(__name__)

# run_forever occupies a thread for good, and a restarted controller adds another call. Separate groups keep `status`
# and `drain` responsive.
CONCURRENCY_GROUPS = {"watch": 16, "control": 8}


class RankActor:
    """One rank of one replica, as a Ray actor. core.types.rank_api.Rank documents the methods."""

    def __init__(self, import_path: str, launch: Launch, name: ProcessName) -> None:
        self._import_path = import_path
        self._launch = launch
        self._name = name
        self._rank: Rank | None = None
        # Renewal of its TLS credentials.
        self._renewal: Renewal | None = None
        self._becoming = threading.Lock()
        self._has_loaded = False
        redirect_output(log_path(launch.log_dir, name.replica, name.rank), who=str(name))
        take_short_turns()

    def bind(self) -> Binding:
        if self._rank is None:
            self._rank = self._make(self._import_path, self._launch, self._name)
        return self._rank.bind()

    def become(self, import_path: str, launch: Launch, replica: str) -> Binding:
        """Turn this drained rank into one of `replica`, keeping what is loaded. load() must follow.

        Idempotent, because a restarted controller repeats the call.
        """
        with self._becoming:
            if replica == self._name.replica:
                return self.bind()
            before, renewal = self._bound, self._renewal
            name = ProcessName.of_rank(self._name.deployment, replica, self._name.rank)
            logger.info("process renamed name=%s", name)
            redirect_output(log_path(launch.log_dir, replica, name.rank), who=str(name))
            successor = self._make(import_path, launch, name)
            # Before the old port closes, so that the new rank cannot get the same port.
            binding = successor.bind()
            successor.succeed(before)
            self._rank, self._name, self._import_path, self._launch = successor, name, import_path, launch
            if renewal:
                renewal.stop()
            return binding

    def replica(self) -> str:
        """Return the replica that this rank currently belongs to."""
        return self._name.replica

    def load(self, addresses: list[str]) -> None:
        self._bound.load(addresses)
        # After a role switch, collect what is new since `spare_the_old`. It takes milliseconds, and no caller waits.
        if self._has_loaded:
            gc.collect()
        else:
            spare_the_old()
        self._has_loaded = True

    def progress(self) -> Progress:
        return self._bound.progress()

    def run_forever(self) -> None:
        self._bound.run_forever()

    def status(self) -> RankStatus:
        return self._bound.status()

    def drain(self) -> None:
        self._bound.drain()

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()

    def _make(self, import_path: str, launch: Launch, name: ProcessName) -> Rank:
        module, _, function = import_path.partition(":")
        began_at = time.monotonic()
        make = getattr(importlib.import_module(module), function)
        logger.info("module imported module=%s seconds=%.1f", module, time.monotonic() - began_at)
        self._renewal = open_tls_credentials(name, tls=launch.spec.security.tls)
        return cast(Rank, make(launch, identity=self._renewal.identity))

    @property
    def _bound(self) -> Rank:
        assert self._rank is not None, "bind() comes first"
        return self._rank
