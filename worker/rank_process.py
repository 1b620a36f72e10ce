"""Process of one rank of any role; implements core.types.rank_api."""

from __future__ import annotations

import logging
import os
import socket
from functools import partial

from core.identity.credentials import Identity
from core.process.background import BackgroundThread
from core.process.stopwatch import Stopwatch
from core.types.failpoint import Failpoint, unobserved
from core.types.launch import Launch
from core.types.rank_api import Binding, Progress, RankStatus
from core.wire.rank_server import RankHost
from worker.handover_state import HandoverState
from worker.rank_body import RankBody
from worker.rank_setup import RankSetup
from worker.role_parts import RoleParts

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_HAND_OVER_S = 10.0  # one step, and closing the last handoffs; usually milliseconds


class RankProcess:
    """Implements core.types.rank_api.Rank."""

    def __init__(
        self,
        launch: Launch,
        *,
        role: RoleParts,
        identity: Identity,
        host: str | None = None,
        failpoint: Failpoint = unobserved,
    ) -> None:
        """host: address to listen on; None: the node's address in Ray."""
        self._launch = launch
        self._body = RankBody(role, launch.spec)
        self._setup = partial(
            RankSetup, launch=launch, role=role.role, on_progress=self._note_progress, failpoint=failpoint
        )
        self._address = host
        self._identity = identity
        self._host: RankHost | None = None
        self._binding: Binding | None = None
        self._watch = Stopwatch()
        self._progress: Progress = {"stage": "starting", "fraction": 0.0}
        self._handover_state: HandoverState | None = None  # of this process's previous rank, until `load`

    def bind(self) -> Binding:
        if self._binding is None:
            self._host = RankHost(self._address or _address_of_node(), self._identity)
            address = self._host.serve(self._body.register)
            self._binding = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "address": address,
                "device": str(self._body.device),
            }
        return self._binding

    def load(self, addresses: list[str]) -> None:
        assert self._host, "call bind() first"
        self._watch = Stopwatch()
        self._body.load(self._setup(addresses=addresses, host=self._host), self._handover_state)
        self._handover_state = None
        self._note_progress("serving", 1.0)
        logger.info("loaded: %s", self._watch)

    def progress(self) -> Progress:
        return self._progress

    def run_forever(self) -> None:
        self._body.run()

    def status(self) -> RankStatus:
        if self._body.service:
            return self._body.service.status()
        return {"state": "loading", "running": 0, "waiting": 0, "blocks": {"total": 0, "free": 0, "cached": 0}}

    def drain(self) -> None:
        if self._body.service:
            self._body.service.drain()

    def succeed(self, before: RankProcess) -> None:
        handover_state = before.hand_over()
        handover_state.check(self._launch.spec, self._body.role.role)
        self._handover_state = handover_state

    def hand_over(self) -> HandoverState:
        """End this rank and return its state for a successor. Raises ReplicaFailed.

        After return the rank rejects all calls. Its connections, which no longer touch blocks, are closed in the
        background, because peers may be slow.
        """
        handover_state = self._body.hand_over(within_s=_HAND_OVER_S)
        BackgroundThread(self._close, name="closing").start()
        return handover_state

    def stop(self) -> None:
        if self._body.service:
            self._body.service.stop()
        self._close()

    def _close(self) -> None:
        if self._host:
            self._host.call(self._body.close(), timeout_s=_CLOSE_S)
            self._host.stop()

    def _note_progress(self, stage: str, fraction: float) -> None:
        self._watch.lap(self._progress["stage"])
        self._progress = {"stage": stage, "fraction": fraction}


def _address_of_node() -> str:
    import ray  # imported on demand, so that ranks run without Ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
